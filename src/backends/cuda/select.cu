// Step 10: the exact best topk of a row's scores, ascending by token id, as token ids and physical rows.
//
// A CTA has a row or, of long ones, a cluster of up to 16 has it, each with a range of its tokens. The histogram of the
// score kernel names the bin in which the topk-th largest key lies. One pass over the keys, which come into shared
// memory by bulk copies, marks those above the bin and those in it as bits, a bit a token, and collects those in it
// with their token ids; the CTAs exchange these, and all put them in order. Where they are too many for that, radix
// passes narrow the bin down first: over what the CTAs have collected, or, where one has more than it can collect, over
// all keys in memory. Slower, never wrong. Bits in the order of tokens then give every selected token its place.
// Nothing depends on the order of execution.
//
// Bounds: 4 bytes a key from L2, and for short contexts latency and issue. A CTA is alone on its SM, so that an
// instruction that all of its W warps execute costs W / 4 clocks: hence few threads, and nothing unrolled that need not
// be. All that does not depend on a row's length is asked for beside it, in one round of loads.
#include <algorithm>
#include <bit>

#include "backends/cuda/indexer_stages.h"
#include "backends/cuda/keyed_rows.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kThreadBits = 8, kThreads = 1 << kThreadBits, kWarps = kThreads / 32;
constexpr int kChunk = 32 * kThreads;  ///< tokens that are marked at a time: a word of bits a thread
constexpr int kFew = kThreads / 2;     ///< keys that are put in order, by two to eight threads each
constexpr int kMaxCluster = 16;
constexpr int kCollected = 4096;         ///< places for collected keys of all CTAs of a cluster
constexpr int kSentAtOnce = 48;          ///< places that every CTA sends to the others
constexpr int kMostTokens = 128 * 1024;  ///< of one CTA
constexpr int kBinsEach = kScoreBins / kThreads;
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
  alignas(16) Order few_orders[2 * kFew];  ///< from `few` on zero
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
    const int tokens = min(kChunk, (held + 63) / 64 * 64 - number * kChunk);  // there is room for whole pages
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
  int up_to = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == 31) totals[warp] = up_to;
  __syncthreads();
  return up_to - value + __reduce_add_sync(~0u, lane < warp ? totals[lane] : 0);
}

constexpr int kShiftOfHistogram = -1;

/// Narrows a range to the one of its bins in which the last needed key lies. Bins are those of a row's histogram, or
/// 2^shift keys each from `low` on.
__device__ __forceinline__ Range narrow(const Range& range, const Bins& bins, int shift, Board& board) {
  const int counts[kBinsEach] = {int(bins.high.w), int(bins.high.z), int(bins.high.y), int(bins.high.x),
                                 int(bins.low.w),  int(bins.low.z),  int(bins.low.y),  int(bins.low.x)};
  int all = 0;
  for (int i = 0; i < kBinsEach; ++i) all += counts[i];
  int above = sum_before(all, board.totals[0]);
  if (above < range.need && range.need <= above + all) {
    int bin = 0, before = 0, count = 0;
    for (int i = 0; i < kBinsEach; ++i) {
      if (above < range.need) bin = i, before = above, count = counts[i];
      above += counts[i];
    }
    bin = kScoreBins - 1 - kBinsEach * int(threadIdx.x) - bin;
    Range found{0, 0, range.need - before, count};
    if (shift == kShiftOfHistogram) {
      found.low = first_key_of_bin(bin);
      found.high = first_key_of_bin(bin + 1);
    } else {
      found.low = range.low + (uint32_t(bin) << shift);
      found.high = min(range.high - found.low, 1u << shift) + found.low;
    }
    board.found = found;
  }
  __syncthreads();
  return board.found;
}

/// Bits by which keys of a range are moved right to make at most kScoreBins bins.
__device__ __forceinline__ int shift_of(const Range& range) {
  return max(0, 32 - __clz(int(range.high - range.low - 1)) - 11);
}

/// Moves `bits` left by one and appends whether `a` + `b` carries: for b = -c, c > 0, whether a >= c.
__device__ __forceinline__ void append_if_sum_carries(uint32_t& bits, uint32_t a, uint32_t b) {
  [[maybe_unused]] uint32_t sum;
  asm("add.cc.u32 %0, %2, %3;\n\taddc.u32 %1, %1, %1;" : "=r"(sum), "+r"(bits) : "r"(a), "r"(b));
}

/// Collects the marked keys of a warp's words, in any order; `keys` are those of the thread's word, `first` its token.
__device__ __forceinline__ void collect(const Part& part, uint32_t inside, const uint32_t* keys, int first) {
  const int lane = int(threadIdx.x) % 32, count = __reduce_add_sync(~0u, __popc(inside));
  if (count == 0) return;
  int at = 0;
  if (lane == 0) at = atomicAdd(&part.board.collected, count);
  at = __shfl_sync(~0u, at, 0);
  Order* own = part.collection(part.rank).orders;
#pragma unroll 1
  for (uint32_t lanes; (lanes = __ballot_sync(~0u, inside != 0)) != 0; inside &= inside - 1) {  // one key of each
    const int place = at + __popc(lanes & ((1u << lane) - 1)), bit = __ffs(int(inside)) - 1;
    if (inside != 0 && place < part.limit) own[place] = order_of(keys[bit], first + bit);
    at += __popc(lanes);
  }
}

/// Marks the keys above the range and in it, and counts them; collects those in it where `collects` says so. The chunks
/// 0 and 1 have been asked for; `parities` are those of the barriers, a bit each.
__device__ __forceinline__ void mark(const Part& part, const Range& range, bool collects, Counts& own,
                                     uint32_t& parities) {
  const int thread = int(threadIdx.x);
  Counts counts{0, 0};
  const int tokens = max(part.count, min(part.held, 2 * kChunk));
#pragma unroll 1
  for (int number = 0; number * kChunk < tokens; ++number) {
    const uint32_t* keys = part.chunk(number) + 32 * thread;
    const int first = number * kChunk + 32 * thread;
    part.copied(number % 2).wait(parities >> number % 2 & 1);
    parities ^= 1u << number % 2;
    uint32_t above = 0, inside = 0;
    if (first < part.count) {
#pragma unroll 2
      for (int i = 7; i >= 0; --i) {  // lanes that read together start at different banks
        const uint4 four = reinterpret_cast<const uint4*>(keys)[(i + thread) % 8];
        for (const uint32_t key : {four.w, four.z, four.y, four.x}) {
          append_if_sum_carries(above, key, 0 - range.high);
          append_if_sum_carries(inside, key, 0 - range.low);
        }
      }
      if (range.low == 0) inside = ~0u;
      const uint32_t seen = part.count - first >= 32 ? ~0u : (1u << (part.count - first)) - 1;
      above = __funnelshift_l(above, above, 4 * thread) & seen;
      inside = __funnelshift_l(inside, inside, 4 * thread) & seen & ~above;
      part.marks[first / 32] = {above, inside};
      counts.above += __popc(above);
      counts.inside += __popc(inside);
    }
    if (collects) collect(part, inside, keys, part.begin + first);
    if ((number + 2) * kChunk < tokens) {
      __syncthreads();
      if (thread == 0) part.copy_chunk(number + 2);
    }
  }
  counts.above = __reduce_add_sync(~0u, counts.above);
  counts.inside = __reduce_add_sync(~0u, counts.inside);
  if (thread % 32 == 0 && (counts.above | counts.inside) != 0) {
    atomicAdd(&own.above, counts.above);
    atomicAdd(&own.inside, counts.inside);
  }
  if (part.p.cluster > 1) fence_async_proxy();  // `exchange` sends by copies what was collected
  __syncthreads();
}

/// Sends this CTA's counts, and the keys that it collected if it could collect all, to all CTAs of the cluster.
__device__ __forceinline__ void exchange(const Part& part) {
  if (part.p.cluster == 1) return;
  const Collection own = part.collection(part.rank);
#pragma unroll 1
  for (int to = int(threadIdx.x) / 32; to < part.p.cluster; to += kWarps) {
    if (to == part.rank || !elect_one()) continue;
    copy_to_cta(address_in(shared_address(own.counts), uint32_t(to)), shared_address(own.counts), kSentAtOnce * 8,
                address_in(part.exchanged().address, uint32_t(to)));
  }
  wait_in_cluster(part.exchanged(), 0);
  const int lane = int(threadIdx.x) % 32;
  if (!__any_sync(~0u, lane < part.p.cluster && part.counts(0, lane).inside >= kSentAtOnce)) return;
  const int count = part.board.collected <= part.limit ? part.board.collected : 0;
#pragma unroll 1
  for (int i = (kSentAtOnce - 1 << part.p.cluster_bits) + int(threadIdx.x); i < count << part.p.cluster_bits;
       i += kThreads) {
    const Order* order = own.orders + (i >> part.p.cluster_bits);
    const int to = i & (part.p.cluster - 1);
    if (to == part.rank) continue;
    store_in_cluster(address_in(shared_address(order), uint32_t(to)), uint32_t(*order), uint32_t(*order >> 32));
  }
  meet_cluster(part.p);
}

/// Sends this CTA's counts of a second marking to all CTAs of the cluster.
__device__ __forceinline__ void exchange_again(const Part& part) {
  const Counts& own = part.board.again[part.rank];
  if (int(threadIdx.x) < part.p.cluster && int(threadIdx.x) != part.rank) {
    store_in_cluster(address_in(shared_address(&own), threadIdx.x), uint32_t(own.above), uint32_t(own.inside));
  }
  meet_cluster(part.p);
}

/// Clears this CTA's share of the row's histogram in memory.
__device__ __forceinline__ void clear_histogram(const Part& part) {
  const int share = kScoreBins / 4 >> part.p.cluster_bits;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < share; i += kThreads) {
    reinterpret_cast<uint4*>(part.histogram())[part.rank * share + i] = {0, 0, 0, 0};
  }
}

/// Which of the cluster's collected keys a thread looks at.
struct CollectedKeys {
  int first, step, count;
  const Order* orders;

  __device__ explicit CollectedKeys(const Part& part)
      : first(int(threadIdx.x) & ((kThreads >> part.p.cluster_bits) - 1)), step(kThreads >> part.p.cluster_bits) {
    const int from = int(threadIdx.x) >> (kThreadBits - part.p.cluster_bits);
    count = part.counts(0, from).inside;
    orders = part.collection(from).orders;
  }
};

/// Clears the thread's bins in shared memory.
__device__ __forceinline__ void clear_bins(const Part& part) {
  uint4* mine = reinterpret_cast<uint4*>(part.bins) + 2 * (kThreads - 1 - int(threadIdx.x));
  mine[0] = mine[1] = {0, 0, 0, 0};
}

/// Counts the keys of a range by bins of 2^shift, which are clear: those that all CTAs collected or, at `overflow`, all
/// keys of the row. For these the CTAs' bins are added up in the row's histogram, which is clear before and after.
__device__ __forceinline__ void count_keys(const Part& part, const Range& range, int shift, bool overflow,
                                           Bins& counted) {
  const auto count_key = [&](uint32_t key) {
    if (key >= range.low && key < range.high) atomicAdd(part.bins + ((key - range.low) >> shift), 1u);
  };
  if (!overflow) {
    const CollectedKeys mine(part);
#pragma unroll 1
    for (int i = mine.first; i < mine.count; i += mine.step) count_key(key_of(mine.orders[i]));
    __syncthreads();
    counted.load(part.bins);
    return;
  }
#pragma unroll 4
  for (int i = int(threadIdx.x); i < part.count; i += kThreads) count_key(__ldcg(part.keys + i));
  meet_cluster(part.p);  // the histogram is clear
#pragma unroll 1
  for (int i = int(threadIdx.x); i < kScoreBins; i += kThreads) {
    if (part.bins[i] != 0) atomicAdd(part.histogram() + i, part.bins[i]);
  }
  __threadfence();
  meet_cluster(part.p);
  counted.load_past_l1(part.histogram());
  meet_cluster(part.p);
  clear_histogram(part);
  __threadfence();
}

/// Marks the collected keys that are selected: those above the range, and in it, where they are at most kFew or all,
/// the first `range.need`. Counts those of the CTAs before.
__device__ __forceinline__ void choose(const Part& part, const Range& range) {
  int before = 0;
  const auto select = [&](int token) {
    const int at = token - part.begin;
    if (at < 0) ++before;
    if (at >= 0 && at < part.count) atomicOr(&part.marks[at / 32].above, 1u << at % 32);
  };
  const uint32_t high = range.need == range.count ? range.low : range.high;
  const CollectedKeys mine(part);
#pragma unroll 1
  for (int i = mine.first; i < mine.count; i += mine.step) {
    const Order order = mine.orders[i];
    if (key_of(order) >= high) {
      select(token_of(order));
    } else if (key_of(order) >= range.low) {
      part.board.few_orders[atomicAdd(&part.board.few, 1)] = order;
    }
  }
  __syncthreads();
  const int few = part.board.few, bits = few <= kFew / 4 ? 3 : few <= kFew / 2 ? 2 : 1, each = 1 << bits;
  const int which = int(threadIdx.x) >> bits, part_of_key = int(threadIdx.x) & (each - 1);
  if (int(threadIdx.x) / 32 * 32 < few * each) {
    const Order order = part.board.few_orders[min(which, few - 1)];
    int larger = 0;
#pragma unroll 1
    for (int i = part_of_key; 2 * i < few; i += 8 * each) {
      const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(part.board.few_orders) + i;
#pragma unroll
      for (int j = 0; j < 8; ++j) larger += (pairs[j * each].x > order) + (pairs[j * each].y > order);
    }
    for (int distance = 1; distance < 8; distance *= 2) {
      const int other = __shfl_xor_sync(~0u, larger, distance);
      if (distance < each) larger += other;
    }
    if (part_of_key == 0 && which < few && larger < range.need) select(token_of(order));
  }
  before = __reduce_add_sync(~0u, before);
  if (threadIdx.x % 32 == 0 && before != 0) atomicAdd(&part.board.before, before);
  __syncthreads();
}

/// Asks for the block table's entries of the CTA's tokens, one for each 64, where their physical rows will be.
__device__ __forceinline__ void copy_entries(const Part& part) {
  const int32_t* table = part.p.block_table.row(part.row / part.p.q);
#pragma unroll 1
  for (int i = int(threadIdx.x); 64 * i < part.held; i += kThreads) {
    async_copy4(shared_address(part.rows + i), table + (part.begin + 64 * i) / part.p.page);
  }
  async_commit();
}

/// Turns the thread's entries into physical rows; a barrier must follow.
__device__ __forceinline__ void rows_of_entries(const Part& part) {
  async_wait<0>();
#pragma unroll 1
  for (int i = int(threadIdx.x); 64 * i < part.count; i += kThreads) {
    const Place place = kv_place(part.rows + i, part.p.page, LocalId((part.begin + 64 * i) % part.p.page));
    part.rows[i] = physical_row(place, part.p.stride_rows).value();
  }
}

/// The lowest `quota` bits of a word.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t word, int quota) {
#pragma unroll 1
  for (int left = __popc(word); left > max(quota, 0); --left) word &= ~(0x80000000u >> __clz(int(word)));
  return word;
}

/// Writes the tokens marked above the range and the first `quota` of the `inside` marked in it, in ascending order, and
/// their physical rows, from place `first` of the row on.
__device__ __forceinline__ void write_marked(const Part& part, int quota, int inside, int first) {
  const int words = (part.count + 31) / 32, each = (words + kThreads - 1) / kThreads;
  const int begin = min(words, int(threadIdx.x) * each), end = min(words, begin + each);
  const bool some = quota > 0 && quota < inside;
  int before = 0;
  if (some) {
    int sum = 0;
#pragma unroll 1
    for (int word = begin; word < end; ++word) sum += __popc(part.marks[word].inside);
    before = sum_before(sum, part.board.totals[1]);
  }
  int selected = 0;
#pragma unroll 1
  for (int word = begin; word < end; ++word) {
    Marks mine = part.marks[word];
    if (quota > 0) {
      const int count = __popc(mine.inside);
      mine.above |= some ? lowest_bits(mine.inside, quota - before) : mine.inside;
      before += count;
      part.marks[word].above = mine.above;
    }
    selected += __popc(mine.above);
  }
  int at = sum_before(selected, part.board.totals[2]);
#pragma unroll 1
  for (int word = begin; word < end; ++word) {
    uint32_t bits = part.marks[word].above;
    int last = at += __popc(bits);
#pragma unroll 1
    for (int next = at - __popc(bits); bits != 0; ++next) {  // from both ends, which do not wait for each other
      const int low = __ffs(int(bits)) - 1, high = 31 - __clz(int(bits));
      part.list[next] = 32 * word + low;
      part.list[--last] = 32 * word + high;
      bits &= ~(1u << low | 1u << high);
    }
  }
  rows_of_entries(part);
  __syncthreads();
  const int lane = int(threadIdx.x) % 32;
  const int all = __reduce_add_sync(~0u, lane < kWarps ? part.board.totals[2][lane] : 0);
  if (all == 0) return;
  int32_t *tokens = part.p.topk_tokens.row(part.row) + first, *rows = part.p.topk_rows.row(part.row) + first;
  constexpr int kMost = kMaxTopk / kThreads;
  int32_t token[kMost], row[kMost];
  for (int i = 0; i < kMost; ++i) token[i] = part.list[min(int(threadIdx.x) + i * kThreads, all - 1)];
  for (int i = 0; i < kMost; ++i) row[i] = part.rows[token[i] / 64] + token[i] % 64;
  for (int i = 0; i < kMost; ++i) {
    const int place = int(threadIdx.x) + i * kThreads;
    if (place >= all) break;
    tokens[place] = part.begin + token[i];
    rows[place] = row[i];
  }
}

/// Selects among more than topk tokens and writes those of this CTA.
__device__ __forceinline__ void select_tokens(const Part& part, Bins& bins, int n) {
  const SelectParameters& p = part.p;
  const int lane = int(threadIdx.x) % 32;
  int shift = kShiftOfHistogram, round = 0;
  uint32_t parities = 0;
  bool overflow = false, chooses = false;
  Range range{0, 0, p.topk, n};
#pragma unroll 1
  while (true) {
    range = narrow(range, bins, shift, part.board);
    chooses = round > 0 && !overflow && (range.count <= kFew || range.need == range.count);
    if (chooses) break;
    if (round == 0 || range.is_final()) {
      int is_first = round == 0;
      asm volatile("" : "+r"(is_first));  // else the first turn is compiled apart, and there is twice the code to fetch
      if (is_first == 0 && threadIdx.x == 0) part.copy_chunk(0), part.copy_chunk(1);
      mark(part, range, is_first != 0 && !range.is_final(), part.counts(round, part.rank), parities);
      if (is_first != 0) {
        exchange(part);
        clear_histogram(part);  // all CTAs have read it
        overflow = __any_sync(~0u, lane < p.cluster && part.counts(0, lane).inside > part.limit);
      } else {
        exchange_again(part);
      }
      ++round;
    }
    if (range.is_final()) break;
    chooses = !overflow && range.count <= kFew;
    if (chooses) break;
    shift = shift_of(range);
    count_keys(part, range, shift, overflow, bins);
    clear_bins(part);
  }
  if (chooses) choose(part, range);

  // No CTA ends before all have what it has sent.
  if (p.cluster > 1) cluster_arrive_relaxed();
  const Counts counts = lane < p.cluster ? part.counts(round - 1, lane) : Counts{0, 0};
  int first = __reduce_add_sync(~0u, lane < part.rank ? counts.above : 0), quota = 0;
  const int inside = __shfl_sync(~0u, counts.inside, part.rank);
  if (chooses) {
    first += part.board.before;
  } else {
    const int before = __reduce_add_sync(~0u, lane < part.rank ? counts.inside : 0);
    first += min(range.need, before);
    quota = min(max(range.need - before, 0), inside);
  }
  write_marked(part, quota, inside, first);
  if (p.cluster > 1) cluster_wait();
}

__global__ void __launch_bounds__(kThreads, 1) select_kernel(const __grid_constant__ SelectParameters p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ Board board;
  Part part(p, board, shared);
  clear_bins(part);
  board.few_orders[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    part.counts(0, part.rank) = part.counts(1, part.rank) = {0, 0};
    board.collected = board.few = board.before = 0;
    part.copied(0).init(1);
    part.copied(1).init(1);
    part.exchanged().init(1);
    publish_barriers();
    part.exchanged().expect(uint32_t(p.cluster - 1) * kSentAtOnce * 8);
  }
  meet_cluster(p);          // every CTA of the cluster runs: its shared memory may be written to
  let_next_kernel_start();  // this one started when all before the scores had ended: what runs beside both may start
  wait_for_earlier_kernels();

  Bins bins;
  bins.load_past_l1(part.histogram());
  if (threadIdx.x == 0) part.copy_chunk(0), part.copy_chunk(1);
  copy_entries(part);
  const int n = keys_of_row(p, part.row);
  part.count = max(0, min(part.held, n - part.begin));
  if (n > p.topk) {
    select_tokens(part, bins, n);
  } else {
    rows_of_entries(part);
    __syncthreads();
    int32_t *tokens = p.topk_tokens.row(part.row), *rows = p.topk_rows.row(part.row);
#pragma unroll 1
    for (int i = int(threadIdx.x); i < part.count; i += kThreads) {
      tokens[part.begin + i] = part.begin + i;
      rows[part.begin + i] = part.rows[i / 64] + i % 64;
    }
#pragma unroll 1
    for (int at = n + part.rank * kThreads + int(threadIdx.x); at < p.topk; at += p.cluster * kThreads) {
      tokens[at] = rows[at] = -1;
    }
    // What was asked for must have come before the CTA ends.
    if (part.held > 0) part.copied(0).wait(0);
    if (part.held > kChunk) part.copied(1).wait(0);
  }
  if (part.rank == 0 && threadIdx.x == 0) p.valid(part.row) = min(n, p.topk);
}

/// CTAs of a row: one for every kChunk tokens, as long as they find an SM, and enough to have room for the marks.
int cluster_of(int64_t rows, int context) {
  int cluster = 1;
  while (cluster < kMaxCluster && cluster * kChunk < context && 2 * rows * cluster <= 128) cluster *= 2;
  while (cluster * kMostTokens < context) cluster *= 2;
  return cluster;
}

int tokens_each(int cluster, int context) { return ((context + cluster - 1) / cluster + 255) / 256 * 256; }

}  // namespace

void prepare_select(const ShapeKey&) { allow_shared(select_kernel, size_t(SelectShared(kMostTokens).total), true); }

void enqueue_select(const IndexerArgs& args, const IndexerScratch& scratch, const Workspace& workspace) {
  const int64_t rows = args.index_query.extent(0);
  const KeyedRows keyed = keyed_rows(args, scratch);
  const int cluster = cluster_of(rows, keyed.context);
  const SelectParameters parameters{keyed, scratch.histograms, cluster, std::countr_zero(unsigned(cluster)),
                                    tokens_each(cluster, keyed.context)};
  launch(select_kernel,
         {.grid = unsigned(rows * cluster),
          .block = kThreads,
          .shared_bytes = size_t(SelectShared(parameters.each).total),
          .cluster = cluster},
         workspace, parameters);
}

}  // namespace dsacore::cuda
