// Step 10: the exact best topk of a row's scores, ascending by token id, as token ids and physical rows.
//
// A cluster of up to 16 CTAs has a row; each CTA has a range of its tokens. The histogram of the score kernel names the
// bin in which the topk-th largest key lies; one pass over the keys marks those above the bin and those in it as bits,
// a bit a token, and collects the keys in it; the CTAs exchange these, and each finds the exact threshold by radix
// passes over them, down to a few keys that a warp orders. Bits in the order of tokens then give every selected token
// its place, and of tokens at the threshold those with the smaller ids. Where a CTA has more keys in the bin than it
// can collect, the radix passes go over all keys in memory instead: slower, never wrong. Nothing depends on the order
// of execution.
//
// Bounds: 4 bytes a key from L2, and for short contexts the latency of some ten dependent steps (three loads from L2,
// block-wide scans, one cluster barrier). Each CTA runs alone on its SM, so code length counts: loops are not unrolled
// where that does not pay.
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

constexpr int kThreadBits = 9, kThreads = 1 << kThreadBits, kWarps = kThreads / 32;
constexpr int kLaneTokens = 16, kBatch = 32 * kLaneTokens;  ///< that a lane and a warp mark at a time
constexpr int kFew = 32;                                    ///< keys that a warp can order
constexpr int kMaxCluster = 16;
constexpr int kTokensEach = 12 * 1024;   ///< of a CTA, from which on another one helps
constexpr int kCollected = 8192;         ///< keys that all CTAs of a cluster can collect
constexpr int kMostOfOne = 4096;         ///< and one CTA
constexpr int kMostTokens = 128 * 1024;  ///< of one CTA
static_assert(kScoreBins == 4 * kThreads);

struct SelectParameters : KeyedRows {
  uint32_t* histograms;
  int cluster, cluster_bits;  ///< CTAs of a row: 1 << cluster_bits
  int words;                  ///< of bits that a CTA has room for
};

/// Keys `low <= key < high`, `count` of them, of which `need` are selected; all keys from `high` on are.
struct Range {
  uint32_t low, high;
  int need, count;

  __device__ bool is_final() const { return need == count || high - low == 1; }
};

/// How many keys a CTA has from `high` on, and in the range.
struct Counts {
  int above, inside;
};

/// Byte offsets of the dynamic shared memory.
struct SelectShared {
  int bins, list, collected, places, above, inside, total;

  DSACORE_HD constexpr SelectShared(int collected_of_one, int words)
      : bins(0),
        list(bins + kScoreBins * 4),
        collected(list + kMaxTopk * 4),
        places(collected + kCollected * 4),
        above(places + collected_of_one * 4),
        inside(above + words * 4),
        total(inside + words * 4) {}
};
DSACORE_HD constexpr int collected_of_one(int cluster_bits) {
  return kCollected >> cluster_bits < kMostOfOne ? kCollected >> cluster_bits : kMostOfOne;
}

/// What the threads of a CTA share besides.
struct Board {
  int totals[3][kWarps];  ///< of warps, for three sums over the CTA
  int found_bin, found_above, found_count;
  Counts own;  ///< of this CTA
  int few;     ///< keys in `few_keys`
  uint32_t few_keys[kFew];
  int collected;                ///< keys that this CTA met while it collected
  Counts sent[2][kMaxCluster];  ///< of every CTA, in two exchanges
  Counts refined[kMaxCluster];  ///< collected keys of every CTA from the new `high` on, and in the new range
};

/// A CTA's part of a row.
struct Part {
  const SelectParameters& p;
  Board& board;
  uint32_t *bins, *collected, *places, *above, *inside;
  int32_t* list;
  int row;
  int rank, limit;       ///< in the cluster; keys that it can collect
  const uint32_t* keys;  ///< its first
  int begin, count;      ///< its tokens

  __device__ Part(const SelectParameters& parameters, Board& shared_board, std::byte* shared, int n)
      : p(parameters),
        board(shared_board),
        row(int(blockIdx.x) >> p.cluster_bits),
        rank(int(blockIdx.x) & (p.cluster - 1)),
        limit(collected_of_one(p.cluster_bits)) {
    const SelectShared at(limit, p.words);
    bins = reinterpret_cast<uint32_t*>(shared + at.bins);
    list = reinterpret_cast<int32_t*>(shared + at.list);
    collected = reinterpret_cast<uint32_t*>(shared + at.collected);
    places = reinterpret_cast<uint32_t*>(shared + at.places);
    above = reinterpret_cast<uint32_t*>(shared + at.above);
    inside = reinterpret_cast<uint32_t*>(shared + at.inside);
    const int each = ((n + p.cluster - 1 >> p.cluster_bits) + 31) / 32 * 32;
    begin = min(n, rank * each);
    count = min(n, begin + each) - begin;
    keys = p.keys + int64_t(row) * p.key_pitch + begin;
  }
  __device__ uint32_t* histogram() const { return p.histograms + int64_t(row) * kScoreBins; }
};

/// All threads of the CTAs of a row meet.
__device__ __forceinline__ void meet_cluster(const SelectParameters& p) {
  if (p.cluster > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
}

/// Writes a word into the shared memory of CTA `rank`, where this CTA has `word`.
__device__ __forceinline__ void store_in(uint32_t rank, const void* word, uint32_t value) {
  store_in_cluster(address_in(shared_address(word), rank), value);
}

/// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ int sum_up_to(int value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, value, distance);
    if (int(threadIdx.x) % 32 >= distance) value += other;
  }
  return value;
}

/// Sum of the values of the threads before this one. One barrier; `totals` must not be in use.
__device__ __forceinline__ int sum_before(int value, int* totals) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int up_to = sum_up_to(value);
  if (lane == 31) totals[warp] = up_to;
  __syncthreads();
  return up_to - value + __reduce_add_sync(~0u, lane < warp ? totals[lane] : 0);
}

constexpr int kShiftOfHistogram = -1;

/// Narrows a range to the one of its bins in which the last needed key lies. Bins are those of a row's histogram, or
/// 2^shift keys each from `low` on; thread t has bins 2047 - 4t ... 2044 - 4t.
__device__ Range narrow(const Range& range, const uint4 bins, int shift, Board& board) {
  const int counts[] = {int(bins.w), int(bins.z), int(bins.y), int(bins.x)};
  int above = sum_before(counts[0] + counts[1] + counts[2] + counts[3], board.totals[0]);
  for (int i = 0; i < 4; ++i) {
    if (above < range.need && range.need <= above + counts[i]) {
      board.found_bin = kScoreBins - 1 - (4 * int(threadIdx.x) + i);
      board.found_above = above;
      board.found_count = counts[i];
    }
    above += counts[i];
  }
  __syncthreads();
  const int bin = board.found_bin;
  Range found{0, 0, range.need - board.found_above, board.found_count};
  if (shift == kShiftOfHistogram) {
    found.low = first_key_of_bin(bin);
    found.high = first_key_of_bin(bin + 1);
  } else {
    found.low = range.low + (uint32_t(bin) << shift);
    found.high = min(range.high - found.low, 1u << shift) + found.low;
  }
  return found;
}

/// Bits by which keys of a range are moved right to make at most kScoreBins bins.
__device__ __forceinline__ int shift_of(const Range& range) {
  return max(0, 32 - __clz(int(range.high - range.low - 1)) - 11);
}

__device__ __forceinline__ int four_of_thread() { return kThreads - 1 - int(threadIdx.x); }

/// A lane's 16 tokens in a row of a warp's batch.
__device__ __forceinline__ int first_of_lane(int batch) { return batch * kBatch + int(threadIdx.x) % 32 * kLaneTokens; }

__device__ __forceinline__ void load_batch(const Part& part, int batch, uint32_t (&keys)[kLaneTokens]) {
  const int token = first_of_lane(batch);
  for (int i = 0; i < kLaneTokens; i += 4) {
    uint4 four = {0, 0, 0, 0};  // the place for a row's keys is a multiple of 64, so four that begin in it end in it
    if (token + i < part.count) four = __ldcg(reinterpret_cast<const uint4*>(part.keys + token + i));
    keys[i] = four.x, keys[i + 1] = four.y, keys[i + 2] = four.z, keys[i + 3] = four.w;
  }
}

/// Collects the marked keys of a warp's batch, in any order.
__device__ __forceinline__ void collect(const Part& part, const uint32_t (&keys)[kLaneTokens], uint32_t inside,
                                        int batch) {
  const int up_to = sum_up_to(__popc(inside));
  int at = 0;
  if (int(threadIdx.x) % 32 == 31 && up_to != 0) at = atomicAdd(&part.board.collected, up_to);
  at = __shfl_sync(~0u, at, 31) + up_to - __popc(inside);
  uint32_t* collected = part.collected + part.rank * part.limit;
  const uint32_t place = uint32_t(first_of_lane(batch));
  for (int i = 0; i < kLaneTokens; ++i) {
    if ((inside & 1u << i) == 0) continue;
    if (at < part.limit) {
      collected[at] = keys[i];
      part.places[at] = place + uint32_t(i);
    }
    ++at;
  }
}

/// Marks the keys above the range and in it, and counts them into `board.own`; collects those in it at the first time,
/// when `keys` holds the warp's first batch.
__device__ void mark(const Part& part, const Range& range, uint32_t (&keys)[kLaneTokens], bool is_first) {
  const int warp = int(threadIdx.x) / 32;
  Counts counts{0, 0};
#pragma unroll 1
  for (int batch = warp; batch * kBatch < part.count; batch += kWarps) {
    int is_loaded = is_first && batch == warp;
    asm volatile("" : "+r"(is_loaded));  // as in select_tokens
    if (is_loaded == 0) load_batch(part, batch, keys);
    uint32_t above = 0, inside = 0;
    for (int i = 0; i < kLaneTokens; ++i) {
      if (keys[i] >= range.high) above |= 1u << i;
      if (keys[i] >= range.low) inside |= 1u << i;
    }
    const int left = part.count - first_of_lane(batch);
    const uint32_t held = left >= kLaneTokens ? (1u << kLaneTokens) - 1 : left <= 0 ? 0 : (1u << left) - 1;
    inside &= held & ~above;
    above &= held;
    if (first_of_lane(batch) / 32 * 32 < part.count) {  // both halves of every word that is in use
      reinterpret_cast<uint16_t*>(part.above)[first_of_lane(batch) / kLaneTokens] = uint16_t(above);
      reinterpret_cast<uint16_t*>(part.inside)[first_of_lane(batch) / kLaneTokens] = uint16_t(inside);
    }
    counts.above += __popc(above);
    counts.inside += __popc(inside);
    if (is_first && !range.is_final()) collect(part, keys, inside, batch);
  }
  counts.above = __reduce_add_sync(~0u, counts.above);
  counts.inside = __reduce_add_sync(~0u, counts.inside);
  if (threadIdx.x % 32 == 0 && (counts.above | counts.inside) != 0) {
    atomicAdd(&part.board.own.above, counts.above);
    atomicAdd(&part.board.own.inside, counts.inside);
  }
  __syncthreads();
}

/// Sends this CTA's counts, and the keys that it collected if it could collect all, to all CTAs of the cluster.
__device__ void exchange(const Part& part, int round) {
  const int cluster = part.p.cluster, thread = int(threadIdx.x);
  if (thread < cluster) {
    const Counts& slot = part.board.sent[round][part.rank];
    store_in(uint32_t(thread), &slot.above, uint32_t(part.board.own.above));
    store_in(uint32_t(thread), &slot.inside, uint32_t(part.board.own.inside));
  }
  const int collected = cluster > 1 && round == 0 && part.board.collected <= part.limit ? part.board.collected : 0;
#pragma unroll 1
  for (int i = thread; i < collected * cluster; i += kThreads) {
    const uint32_t* key = part.collected + part.rank * part.limit + (i >> part.p.cluster_bits);
    const int to = i & (cluster - 1);
    if (to != part.rank) store_in(uint32_t(to), key, *key);
  }
  meet_cluster(part.p);
}

/// Clears this CTA's share of the row's histogram in memory.
__device__ __forceinline__ void clear_histogram(const Part& part) {
  const int share = kThreads >> part.p.cluster_bits;
  if (int(threadIdx.x) < share) {
    reinterpret_cast<uint4*>(part.histogram())[part.rank * share + int(threadIdx.x)] = {0, 0, 0, 0};
  }
}

/// Which of the cluster's collected keys a thread looks at.
struct CollectedKeys {
  int from, first, step, count;
  const uint32_t* keys;

  __device__ explicit CollectedKeys(const Part& part)
      : from(int(threadIdx.x) >> (kThreadBits - part.p.cluster_bits)),
        first(int(threadIdx.x) & ((kThreads >> part.p.cluster_bits) - 1)),
        step(kThreads >> part.p.cluster_bits),
        count(part.board.sent[0][from].inside),
        keys(part.collected + from * part.limit) {}
};

/// Counts the keys of a range by bins of 2^shift: those that all CTAs collected or, at `overflow`, all keys of the row.
/// For these the CTAs' bins are added up in the row's histogram, which is clear before and after.
__device__ uint4 count_keys(const Part& part, const Range& range, int shift, bool overflow) {
  reinterpret_cast<uint4*>(part.bins)[threadIdx.x] = {0, 0, 0, 0};
  __syncthreads();
  const auto count_key = [&](uint32_t key) {
    if (key >= range.low && key < range.high) atomicAdd(part.bins + ((key - range.low) >> shift), 1u);
  };
  if (!overflow) {
    const CollectedKeys mine(part);
#pragma unroll 1
    for (int i = mine.first; i < mine.count; i += mine.step) count_key(mine.keys[i]);
    __syncthreads();
    return reinterpret_cast<const uint4*>(part.bins)[four_of_thread()];
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
  const uint4 four = __ldcg(reinterpret_cast<const uint4*>(part.histogram()) + four_of_thread());
  meet_cluster(part.p);
  clear_histogram(part);
  __threadfence();
  return four;
}

/// Narrows a range of at most kFew collected keys to the last key that is needed. Every warp does the same.
__device__ Range pick(const Part& part, const Range& range) {
  const CollectedKeys mine(part);
#pragma unroll 1
  for (int i = mine.first; i < mine.count; i += mine.step) {
    const uint32_t key = mine.keys[i];
    if (key >= range.low && key < range.high) part.board.few_keys[atomicAdd(&part.board.few, 1)] = key;
  }
  __syncthreads();
  const int lane = int(threadIdx.x) % 32;
  const uint32_t key = part.board.few_keys[min(lane, range.count - 1)];
  int above = 0, equal = 0;
#pragma unroll 1
  for (int i = 0; i < range.count; ++i) {
    above += part.board.few_keys[i] > key;
    equal += part.board.few_keys[i] == key;
  }
  const int last = __ffs(int(__ballot_sync(~0u, above < range.need && range.need <= above + equal))) - 1;
  const uint32_t low = __shfl_sync(~0u, key, last);
  return {low, low + 1, range.need - __shfl_sync(~0u, above, last), __shfl_sync(~0u, equal, last)};
}

/// Brings marks and counts, which are those of the first range, to the final one by the collected keys.
__device__ void refine(const Part& part, const Range& range) {
  const CollectedKeys mine(part);
#pragma unroll 1
  for (int i = mine.first; i < mine.count; i += mine.step) {
    if (mine.keys[i] >= range.high) atomicAdd(&part.board.refined[mine.from].above, 1);
    if (mine.keys[i] >= range.low && mine.keys[i] < range.high) atomicAdd(&part.board.refined[mine.from].inside, 1);
  }
  const uint32_t* keys = part.collected + part.rank * part.limit;
  const int count = part.board.sent[0][part.rank].inside;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < count; i += kThreads) {
    const uint32_t place = part.places[i], bit = 1u << place % 32;
    if (keys[i] >= range.low && keys[i] < range.high) continue;
    atomicAnd(part.inside + place / 32, ~bit);
    if (keys[i] >= range.high) atomicOr(part.above + place / 32, bit);
  }
  __syncthreads();
  if (int(threadIdx.x) < part.p.cluster) {
    Counts& all = part.board.sent[0][threadIdx.x];
    all = {all.above + part.board.refined[threadIdx.x].above, part.board.refined[threadIdx.x].inside};
  }
  __syncthreads();
}

/// The lowest `quota` bits of a word.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t word, int quota) {
#pragma unroll 1
  for (int left = __popc(word); left > max(quota, 0); --left) word &= ~(0x80000000u >> __clz(int(word)));
  return word;
}

/// Lists the tokens marked above the range and the first `quota` of those marked in it, in ascending order.
__device__ void list_tokens(const Part& part, int quota, int inside) {
  const int words = (part.count + 31) / 32, each = (words + kThreads - 1) / kThreads;
  const int begin = min(words, int(threadIdx.x) * each), end = min(words, begin + each);
  const bool some = quota > 0 && quota < inside;
  int before = 0;
  if (some) {
    int sum = 0;
#pragma unroll 1
    for (int word = begin; word < end; ++word) sum += __popc(part.inside[word]);
    before = sum_before(sum, part.board.totals[1]);
  }
  int selected = 0;
#pragma unroll 1
  for (int word = begin; word < end; ++word) {
    uint32_t more = quota > 0 ? part.inside[word] : 0;
    const int count = __popc(more);
    if (some) more = lowest_bits(more, quota - before);
    before += count;
    part.above[word] |= more;
    selected += __popc(part.above[word]);
  }
  int at = sum_before(selected, part.board.totals[2]);
#pragma unroll 1
  for (int word = begin; word < end; ++word) {
#pragma unroll 1
    for (uint32_t bits = part.above[word]; bits != 0; bits &= bits - 1) {
      part.list[at++] = part.begin + 32 * word + __ffs(int(bits)) - 1;
    }
  }
  __syncthreads();
}

/// What a CTA writes of a row: its places `first ... first + count - 1`.
struct Places {
  int first, count;
};

/// Selects among more than topk tokens; this CTA's are left in `part.list`.
__device__ Places select_tokens(const Part& part, const uint4 histogram, int n) {
  const SelectParameters& p = part.p;
  uint32_t keys[kLaneTokens];
  load_batch(part, int(threadIdx.x) / 32, keys);
  uint4 bins = histogram;
  int shift = kShiftOfHistogram, round = 0;
  bool overflow = false, refines = false;
  Range range{0, 0, p.topk, n};
#pragma unroll 1
  while (true) {
    range = narrow(range, bins, shift, part.board);
    asm volatile("" : "+r"(round));  // else the first turn is compiled apart, and there is twice the code to fetch
    const bool is_first = round == 0;
    if (is_first || (overflow && range.is_final())) {
      mark(part, range, keys, is_first);
      exchange(part, round);
      ++round;
    }
    if (is_first) {
      clear_histogram(part);  // all CTAs have read it
      if (threadIdx.x == 0) part.board.own = {0, 0};
#pragma unroll 1
      for (int r = 0; r < p.cluster; ++r) overflow |= part.board.sent[0][r].inside > part.limit;
      refines = !range.is_final() && !overflow;
    }
    if (range.is_final()) break;
    if (!overflow && range.count <= kFew) {
      range = pick(part, range);
      break;
    }
    shift = shift_of(range);
    bins = count_keys(part, range, shift, overflow);
  }
  if (refines) refine(part, range);

  const Counts* counts = part.board.sent[round - 1];
  Places places{0, 0};
  int need = range.need;  // in the range, from this CTA on
#pragma unroll 1
  for (int r = 0; r < part.rank; ++r) {
    const int taken = min(counts[r].inside, need);
    places.first += counts[r].above + taken;
    need -= taken;
  }
  const int quota = min(counts[part.rank].inside, need);
  places.count = counts[part.rank].above + quota;
  list_tokens(part, quota, counts[part.rank].inside);
  return places;
}

/// Writes the tokens at a CTA's places and their rows. Places without a list hold their own number: every token is
/// selected.
__device__ void write_tokens(const SelectParameters& p, int row, const Places& places, const int32_t* list) {
  if (places.count <= 0) return;
  const int32_t* table = p.block_table.row(row / p.q);
  constexpr int kMost = kMaxTopk / kThreads;
  int32_t tokens[kMost];
  PhysicalRow rows[kMost];
  for (int i = 0; i < kMost; ++i) {  // all loads before the first store
    const int at = min(int(threadIdx.x) + i * kThreads, places.count - 1);
    tokens[i] = list != nullptr ? list[at] : places.first + at;
    rows[i] = physical_row(kv_place(table, p.page, LocalId(tokens[i])), p.stride_rows);
  }
  for (int i = 0; i < kMost; ++i) {
    const int at = int(threadIdx.x) + i * kThreads;
    if (at >= places.count) continue;
    p.topk_tokens.row(row)[places.first + at] = tokens[i];
    p.topk_rows.row(row)[places.first + at] = rows[i].value();
  }
}

__global__ void __launch_bounds__(kThreads, 1) select_kernel(const __grid_constant__ SelectParameters p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ Board board;
  if (threadIdx.x == 0) board.own = {0, 0}, board.collected = board.few = 0;
  if (threadIdx.x < kMaxCluster) board.refined[threadIdx.x] = {0, 0};
  meet_cluster(p);  // every CTA of the cluster runs: its shared memory may be written to
  let_next_kernel_start();
  wait_for_earlier_kernels();

  const int row = int(blockIdx.x) >> p.cluster_bits;
  const uint4 histogram =
      __ldcg(reinterpret_cast<const uint4*>(p.histograms + int64_t(row) * kScoreBins) + four_of_thread());
  const int n = keys_of_row(p, row);
  const Part part(p, board, shared, n);
  Places places{part.begin, part.count};
  if (n > p.topk) places = select_tokens(part, histogram, n);
  write_tokens(p, row, places, n > p.topk ? part.list : nullptr);
#pragma unroll 1
  for (int at = n + part.rank * kThreads + int(threadIdx.x); at < p.topk; at += p.cluster * kThreads) {
    p.topk_tokens.row(row)[at] = -1;
    p.topk_rows.row(row)[at] = -1;
  }
  if (part.rank == 0 && threadIdx.x == 0) p.valid(row) = min(n, p.topk);
}

/// CTAs of a row: one for every kTokensEach tokens, as long as they find an SM, and enough to have room for the marks.
int cluster_of(int64_t rows, int context) {
  int cluster = 1;
  while (cluster < kMaxCluster && cluster * kTokensEach < context && rows * cluster < 132) cluster *= 2;
  while (cluster * kMostTokens < context) cluster *= 2;
  return cluster;
}

int words_of(int cluster, int context) { return ((context + cluster - 1) / cluster + 31) / 32; }

}  // namespace

void prepare_select(const ShapeKey&) {
  allow_shared(select_kernel, size_t(SelectShared(collected_of_one(0), kMostTokens / 32).total), true);
}

void enqueue_select(const IndexerArgs& args, const IndexerScratch& scratch, const Workspace& workspace) {
  const int64_t rows = args.index_query.extent(0);
  const KeyedRows keyed = keyed_rows(args, scratch);
  const int cluster = cluster_of(rows, keyed.context);
  const SelectParameters parameters{keyed, scratch.histograms, cluster, std::countr_zero(unsigned(cluster)),
                                    words_of(cluster, keyed.context)};
  const size_t shared_bytes = size_t(SelectShared(collected_of_one(parameters.cluster_bits), parameters.words).total);
  launch(select_kernel,
         {.grid = unsigned(rows * cluster), .block = kThreads, .shared_bytes = shared_bytes, .cluster = cluster},
         workspace, parameters);
}

}  // namespace dsacore::cuda
