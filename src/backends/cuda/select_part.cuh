// The selection: what a CTA has of a row, in shared memory and beside it (select.cu).
#pragma once

#include "backends/cuda/keyed_rows.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/uniform.cuh"
#include "backends/cuda/warp_sum.cuh"

namespace dsacore::cuda::select {

inline constexpr int kThreadBits = 8, kThreads = 1 << kThreadBits, kWarps = kThreads / 32;
inline constexpr int kChunk = 32 * kThreads;  ///< tokens that are marked at a time: a word of bits a thread
inline constexpr int kFew = kThreads / 2;     ///< keys that are put in order, by two to eight threads each
inline constexpr int kMaxCluster = 16;
inline constexpr int kCollected = 2048;         ///< places for collected keys of all CTAs of a cluster
inline constexpr int kSentAtOnce = 48;          ///< places that every CTA sends to the others
inline constexpr int kMostTokens = 128 * 1024;  ///< of one CTA
inline constexpr int kBinsEach = kScoreBins / kThreads;
static_assert(kBinsEach == 8 && kScoreBins >= kMaxTopk);

/// A key in its place: larger is selected first, and no two tokens are equal.
using Order = uint64_t;
__device__ __forceinline__ Order order_of(uint32_t key, int token) { return Order(key) << 32 | uint32_t(~token); }
__device__ __forceinline__ uint32_t key_of(Order order) { return uint32_t(order >> 32); }
__device__ __forceinline__ int token_of(Order order) { return int(~uint32_t(order)); }

struct SelectParameters : KeyedRows {
  uint32_t* histograms;
  int cluster, cluster_bits;  ///< CTAs of a row: 1 << cluster_bits
  int each;                   ///< tokens of a CTA, a multiple of 256
  uint32_t* scored;           ///< [rows]: in pieces, pages of the row that have been scored
};

/// Byte offsets of the dynamic shared memory. The list comes where the bins were.
struct SelectShared {
  int keys, bins, collected, marks, rows, total;

  DSACORE_HD constexpr explicit SelectShared(int each)
      : keys(0),
        bins((each <= kChunk ? each : 2 * kChunk) * 4),
        collected(bins + kScoreBins * 4),
        marks(collected + kCollected * 8),
        rows(marks + each / 32 * 8),
        total(rows + each / 64 * 4) {}
};

/// Keys `low <= key < high`, `count` of them, of which `need` are selected; all keys from `high` on are.
struct alignas(16) Range {
  uint32_t low, high;
  int need, count;

  __device__ bool is_final() const { return need == count || high - low == 1; }
};

/// How many keys a CTA has from `high` on, and in the range.
struct Counts {
  int above, inside;
};

/// Of 32 tokens, those above the range and those in it.
struct alignas(8) Marks {
  uint32_t above, inside;
};

/// The histogram's bins of a thread t: 2047 - 8t ... 2040 - 8t.
struct Bins {
  uint4 high, low;

  __device__ __forceinline__ void load(const uint32_t* from) {
    const uint4* mine = reinterpret_cast<const uint4*>(from) + 2 * (kThreads - 1 - int(threadIdx.x));
    low = mine[0], high = mine[1];
  }
  __device__ __forceinline__ void load_past_l1(const uint32_t* from) {
    const uint4* mine = reinterpret_cast<const uint4*>(from) + 2 * (kThreads - 1 - int(threadIdx.x));
    low = __ldcg(mine), high = __ldcg(mine + 1);
  }
};

/// What the threads of a CTA share besides.
struct Board {
  uint64_t copied[2];  ///< barriers of the two places for chunks
  uint64_t exchanged;  ///< barrier: what the other CTAs have sent
  Range found;
  int totals[3][kWarps];                   ///< of warps, for three sums over the CTA
  int collected;                           ///< keys that this CTA met while it collected
  int few;                                 ///< in `few_orders`
  int before;                              ///< chosen keys of the CTAs before
  alignas(16) Order few_orders[2 * kFew];  ///< from the lowest of their range on; from `few` on zero
  Counts again[kMaxCluster];               ///< of every CTA, where keys have been marked a second time
};

/// The keys that a CTA has collected, and how many it has.
struct Collection {
  Counts* counts;
  Order* orders;
};

/// A CTA's part of a row. Its range of tokens follows from the largest context, not from the row's length.
struct Part {
  const SelectParameters& p;
  Board& board;
  uint32_t* chunks;
  uint32_t* bins;
  Order* collections;  ///< of every CTA: its counts, in one place, and up to `limit` keys
  Marks* marks;
  int32_t *rows, *list;  ///< physical row of the first of each 64 tokens; selected tokens
  int row, rank, limit;  ///< rank in the cluster
  const uint32_t* keys;  ///< its first
  int begin, held;       ///< its tokens at the largest context
  int count = 0;         ///< and of the row

  __device__ Part(const SelectParameters& parameters, Board& shared_board, std::byte* shared)
      : p(parameters),
        board(*fixed_shared(&shared_board)),
        row(int(blockIdx.x) >> p.cluster_bits),
        rank(int(blockIdx.x) & (p.cluster - 1)),
        limit((kCollected >> p.cluster_bits) - 1) {
    const SelectShared at(p.each);
    shared = fixed_shared(shared);
    chunks = reinterpret_cast<uint32_t*>(shared + at.keys);
    bins = reinterpret_cast<uint32_t*>(shared + at.bins);
    list = reinterpret_cast<int32_t*>(shared + at.bins);
    collections = reinterpret_cast<Order*>(shared + at.collected);
    marks = reinterpret_cast<Marks*>(shared + at.marks);
    rows = reinterpret_cast<int32_t*>(shared + at.rows);
    begin = rank * p.each;
    held = max(0, min(p.each, p.context - begin));
    keys = p.keys + int64_t(row) * p.key_pitch + begin;
  }
  __device__ uint32_t* histogram() const { return p.histograms + int64_t(row) * kScoreBins; }
  __device__ Barrier copied(int place) const { return {shared_address(&board.copied[place])}; }
  __device__ Barrier exchanged() const { return {shared_address(&board.exchanged)}; }
  __device__ Collection collection(int of) const {
    Order* const first = collections + of * (limit + 1);
    return {reinterpret_cast<Counts*>(first), first + 1};
  }
  __device__ Counts& counts(int round, int of) const { return round == 0 ? *collection(of).counts : board.again[of]; }
  __device__ uint32_t* chunk(int number) const { return chunks + number % 2 * kChunk; }

  /// By one thread: asks for a chunk of keys, if there is one.
  __device__ __forceinline__ void copy_chunk(int number) const {
    const int tokens = min(kChunk, (count + 63) / 64 * 64 - number * kChunk);  // there is room for whole pages
    if (tokens <= 0) return;
    copied(number % 2).expect(uint32_t(tokens) * 4);
    bulk_copy(shared_address(chunk(number)), keys + number * kChunk, uint32_t(tokens) * 4, copied(number % 2));
  }
};

/// All threads of the CTAs of a row meet.
__device__ __forceinline__ void meet_cluster(const SelectParameters& p) {
  if (p.cluster > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
}

/// Sum of the values of the threads before this one. One barrier; `totals` must not be in use.
__device__ __forceinline__ int sum_before(int value, int* totals) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int up_to = sum_up_to_lane(value);
  if (lane == 31) totals[warp] = up_to;
  __syncthreads();
  return up_to - value + __reduce_add_sync(~0u, lane < warp ? totals[lane] : 0);
}

}  // namespace dsacore::cuda::select
