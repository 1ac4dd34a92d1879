// Step 10: the exact best topk of a row's scores, ascending by token id, as token ids and physical rows.
//
// A cluster of up to 16 CTAs has a row; each CTA has a range of its tokens. The histogram of the score kernel names the bin in which the
// topk-th largest key lies; one pass over the keys marks those above the bin and those in it as bits, a bit a token, and collects
// the keys in it; the CTAs exchange these, and each finds the exact threshold by radix passes over them. Bits in the order of
// tokens then give every selected token its place, and of tokens at the threshold those with the smaller ids. Where a CTA has more keys in the bin than it can
// collect, the radix passes go over all keys in memory instead: slower, never wrong. Nothing depends on the order of execution.
//
// Bounds: 4 bytes a key from L2 (128K tokens over 16 SMs: 0.3 us; 1M: 2.2 us), else latency: two loads, two or three block-wide
// scans a radix pass (about 0.2 us each), one cluster barrier (0.2 us).
#include <algorithm>

#include "backends/cuda/indexer_stages.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "format/paging.h"

namespace dsacore::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBatchWords = 16;                    ///< words of bits, of 32 tokens each, that a warp makes at a time
constexpr int kBatch = 32 * kBatchWords;           ///< tokens
constexpr int kMaxCluster = 16;
constexpr int kTokensEach = 12 * 1024;              ///< of a CTA, from which on another one helps
constexpr int kCollected = 8192;                   ///< keys that all CTAs of a cluster can collect
constexpr int kMostOfOne = 4096;                   ///< and one CTA
constexpr int kMostTokens = 128 * 1024;            ///< of one CTA
constexpr int kBinsOfThread = kScoreBins / kThreads;
static_assert(kBinsOfThread == 4);

struct SelectParameters {
  View<const int32_t, 1> seq_lens;
  View<const int32_t, 2> block_table;
  int page;
  int64_t stride_rows;
  int q, topk, context;
  uint32_t* histograms;
  const uint32_t* keys;
  int64_t key_pitch;
  View<int32_t, 2> topk_tokens, topk_rows;
  View<int32_t, 1> valid;
  int cluster;
  int words;  ///< of bits that a CTA has room for
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
DSACORE_HD constexpr int collected_of_one(int cluster) {
  return kCollected / cluster < kMostOfOne ? kCollected / cluster : kMostOfOne;
}

/// What the threads of a CTA share besides.
struct Board {
  int totals[2][kWarps];                 ///< of warps, for scans over the CTA
  int found_bin, found_above, found_count;
  Counts own;                            ///< of this CTA
  int collected;                         ///< keys that this CTA met while it collected
  Counts sent[2][kMaxCluster];           ///< of every CTA, in two exchanges
  Counts refined[kMaxCluster];           ///< collected keys of every CTA from the new `high` on, and in the new range
};

/// A CTA's part of a row.
struct Part {
  const SelectParameters& p;
  Board& board;
  uint32_t *bins, *collected, *places, *above, *inside;
  int32_t* list;
  int64_t row;
  int rank, limit;        ///< in the cluster; keys that it can collect
  const uint32_t* keys;   ///< of the row
  int begin, count;       ///< its tokens
  int words;

  __device__ Part(const SelectParameters& parameters, Board& shared_board, std::byte* shared, int n)
      : p(parameters), board(shared_board), row(blockIdx.x / p.cluster), rank(int(blockIdx.x) % p.cluster), limit(collected_of_one(p.cluster)) {
    const SelectShared at(limit, p.words);
    bins = reinterpret_cast<uint32_t*>(shared + at.bins);
    list = reinterpret_cast<int32_t*>(shared + at.list);
    collected = reinterpret_cast<uint32_t*>(shared + at.collected);
    places = reinterpret_cast<uint32_t*>(shared + at.places);
    above = reinterpret_cast<uint32_t*>(shared + at.above);
    inside = reinterpret_cast<uint32_t*>(shared + at.inside);
    keys = p.keys + row * p.key_pitch;
    const int each = ((n + p.cluster - 1) / p.cluster + 31) / 32 * 32;
    begin = min(n, rank * each);
    count = min(n, begin + each) - begin;
    words = (count + 31) / 32;
  }
  __device__ uint32_t* histogram() const { return p.histograms + row * kScoreBins; }
};

__device__ __forceinline__ void meet_cluster(const SelectParameters& p) {
  if (p.cluster > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
}

/// Writes a word into the shared memory of CTA `rank`, where this CTA has `word`.
__device__ __forceinline__ void store_in(uint32_t rank, const void* word, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in(shared_address(word), rank)), "r"(value) : "memory");
}

/// Sum of the values of the warps before this one; `totals` holds all warps' values.
__device__ __forceinline__ int sum_before(const int* totals, int warp) {
  const int lane = int(threadIdx.x) % 32;
  return __reduce_add_sync(~0u, lane < warp ? totals[lane] : 0);
}

/// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ int sum_up_to(int value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, value, distance);
    if (int(threadIdx.x) % 32 >= distance) value += other;
  }
  return value;
}

/// Narrows a range to the one of its bins in which the last needed key lies. Thread t counts bins 2047 - 4t - i in `counts[i]`; a bin
/// has `width` keys (`first_key_of_bin` says which for the histogram of a row, whose width is 0).
__device__ Range narrow(const Range& range, const uint32_t (&counts)[kBinsOfThread], int shift, Board& board) {
  const int warp = int(threadIdx.x) / 32;
  int sum = 0;
  for (int i = 0; i < kBinsOfThread; ++i) sum += int(counts[i]);
  int above = sum_up_to(sum);
  if (threadIdx.x % 32 == 31) board.totals[0][warp] = above;
  __syncthreads();
  above += sum_before(board.totals[0], warp) - sum;
  for (int i = 0; i < kBinsOfThread; ++i) {
    const int count = int(counts[i]);
    if (above < range.need && range.need <= above + count) {
      board.found_bin = kScoreBins - 1 - (kBinsOfThread * int(threadIdx.x) + i);
      board.found_above = above;
      board.found_count = count;
    }
    above += count;
  }
  __syncthreads();
  const int bin = board.found_bin;
  Range found{0, 0, range.need - board.found_above, board.found_count};
  if (shift < 0) {
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

/// Thread t's four of the CTA's bins, from the top.
__device__ __forceinline__ void read_bins(const uint4 four, uint32_t (&counts)[kBinsOfThread]) {
  counts[0] = four.w, counts[1] = four.z, counts[2] = four.y, counts[3] = four.x;
}
__device__ __forceinline__ int four_of_thread() { return kThreads - 1 - int(threadIdx.x); }

__device__ __forceinline__ void load_batch(const Part& part, int batch, uint32_t (&keys)[kBatchWords]) {
  const int token = batch * kBatch + int(threadIdx.x) % 32;
  for (int i = 0; i < kBatchWords; ++i) {
    const int at = token + 32 * i;
    keys[i] = at < part.count ? __ldcg(part.keys + part.begin + at) : 0;
  }
}

/// Collects the keys of a warp's batch that lie in the range, in any order.
__device__ __forceinline__ void collect(const Part& part, const Range& range, const uint32_t (&keys)[kBatchWords], int batch) {
  const int lane = int(threadIdx.x) % 32;
  uint32_t mine = 0;
  for (int i = 0; i < kBatchWords; ++i) {
    const bool inside = keys[i] >= range.low && keys[i] < range.high && batch * kBatch + 32 * i + lane < part.count;
    mine |= uint32_t(inside) << i;
  }
  const int count = __popc(mine);
  int at = sum_up_to(count);
  const int all = __shfl_sync(~0u, at, 31);
  int base = 0;
  if (lane == 0) base = atomicAdd(&part.board.collected, all);
  at += __shfl_sync(~0u, base, 0) - count;
  for (int i = 0; i < kBatchWords; ++i) {
    if ((mine >> i & 1) == 0) continue;
    if (at < part.limit) {
      part.collected[part.rank * part.limit + at] = keys[i];
      part.places[at] = uint32_t(batch * kBatch + 32 * i + lane);
    }
    ++at;
  }
}

/// Marks the keys above the range and in it, and counts them into `board.own`. `keys` holds the warp's first batch.
__device__ void mark(const Part& part, const Range& range, uint32_t (&keys)[kBatchWords], bool collects) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  Counts counts{0, 0};
  for (int batch = warp; batch * kBatch < part.count; batch += kWarps) {
    if (batch != warp) load_batch(part, batch, keys);
    uint32_t above = 0, inside = 0;
    for (int i = 0; i < kBatchWords; ++i) {
      const int left = part.count - batch * kBatch - 32 * i;
      const uint32_t held = left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1;
      const uint32_t from_high = __ballot_sync(~0u, keys[i] >= range.high) & held;
      const uint32_t from_low = __ballot_sync(~0u, keys[i] >= range.low) & held;
      if (lane == i) above = from_high, inside = from_low & ~from_high;
    }
    const int word = batch * kBatchWords + lane;
    if (lane < kBatchWords && word < part.words) {
      part.above[word] = above;
      part.inside[word] = inside;
    }
    counts.above += __popc(above);
    counts.inside += __popc(inside);
    if (collects && __any_sync(~0u, inside != 0)) collect(part, range, keys, batch);
  }
  counts.above = __reduce_add_sync(~0u, counts.above);
  counts.inside = __reduce_add_sync(~0u, counts.inside);
  if (lane == 0 && (counts.above | counts.inside) != 0) {
    atomicAdd(&part.board.own.above, counts.above);
    atomicAdd(&part.board.own.inside, counts.inside);
  }
  __syncthreads();
}

/// Sends this CTA's counts, and the keys that it collected, to all CTAs of the cluster.
__device__ void exchange(const Part& part, int round, int collected) {
  const int cluster = part.p.cluster, thread = int(threadIdx.x);
  if (thread < cluster) {
    const Counts& slot = part.board.sent[round][part.rank];
    store_in(uint32_t(thread), &slot.above, uint32_t(part.board.own.above));
    store_in(uint32_t(thread), &slot.inside, uint32_t(part.board.own.inside));
  }
  if (collected <= part.limit) {
    for (int i = thread; i < collected * cluster; i += kThreads) {
      const int to = i % cluster;
      const uint32_t* key = part.collected + part.rank * part.limit + i / cluster;
      if (to != part.rank) store_in(uint32_t(to), key, *key);
    }
  }
  meet_cluster(part.p);
}

/// Clears this CTA's share of the row's histogram in memory.
__device__ void clear_histogram(const Part& part) {
  const int share = kScoreBins / 4 / part.p.cluster;
  if (int(threadIdx.x) < share) {
    reinterpret_cast<uint4*>(part.histogram())[part.rank * share + int(threadIdx.x)] = {0, 0, 0, 0};
  }
}

__device__ void clear_bins(const Part& part) {
  reinterpret_cast<uint4*>(part.bins)[threadIdx.x] = {0, 0, 0, 0};
  __syncthreads();
}

/// Narrows a range to a final one by the keys that all CTAs collected.
__device__ Range narrow_by_collected(const Part& part, Range range) {
  const int team = kThreads / part.p.cluster;  // threads for the keys of one CTA
  const int from = int(threadIdx.x) / team;
  const int count = part.board.sent[0][from].inside;
  const uint32_t* keys = part.collected + from * part.limit;
  while (!range.is_final()) {
    const int shift = shift_of(range);
    clear_bins(part);
    for (int i = int(threadIdx.x) % team; i < count; i += team) {
      if (keys[i] >= range.low && keys[i] < range.high) atomicAdd(part.bins + ((keys[i] - range.low) >> shift), 1u);
    }
    __syncthreads();
    uint32_t counts[kBinsOfThread];
    read_bins(reinterpret_cast<const uint4*>(part.bins)[four_of_thread()], counts);
    range = narrow(range, counts, shift, part.board);
  }
  for (int i = int(threadIdx.x) % team; i < count; i += team) {
    if (keys[i] >= range.high) atomicAdd(&part.board.refined[from].above, 1);
    if (keys[i] >= range.low && keys[i] < range.high) atomicAdd(&part.board.refined[from].inside, 1);
  }
  return range;
}

/// Moves this CTA's collected keys to where they stand with the final range.
__device__ void refine_marks(const Part& part, const Range& range) {
  const uint32_t* keys = part.collected + part.rank * part.limit;
  for (int i = int(threadIdx.x); i < part.board.own.inside; i += kThreads) {
    const uint32_t place = part.places[i], bit = 1u << place % 32;
    if (keys[i] >= range.low && keys[i] < range.high) continue;
    atomicAnd(part.inside + place / 32, ~bit);
    if (keys[i] >= range.high) atomicOr(part.above + place / 32, bit);
  }
}

/// Narrows a range to a final one by all keys of the row: each pass adds the CTAs' bins up in the row's histogram, which is
/// clear before and after.
__device__ Range narrow_by_all(const Part& part, Range range) {
  while (!range.is_final()) {
    const int shift = shift_of(range);
    clear_bins(part);
    for (int i = int(threadIdx.x); i < part.count; i += kThreads) {
      const uint32_t key = __ldcg(part.keys + part.begin + i);
      if (key >= range.low && key < range.high) atomicAdd(part.bins + ((key - range.low) >> shift), 1u);
    }
    meet_cluster(part.p);  // the histogram is clear
    for (int i = int(threadIdx.x); i < kScoreBins; i += kThreads) {
      if (part.bins[i] != 0) atomicAdd(part.histogram() + i, part.bins[i]);
    }
    __threadfence();
    meet_cluster(part.p);
    uint32_t counts[kBinsOfThread];
    read_bins(__ldcg(reinterpret_cast<const uint4*>(part.histogram()) + four_of_thread()), counts);
    range = narrow(range, counts, shift, part.board);
    meet_cluster(part.p);
    clear_histogram(part);
    __threadfence();
  }
  return range;
}

/// The lowest `quota` bits of a word.
__device__ uint32_t lowest_bits(uint32_t word, int quota) {
  if (quota <= 0) return 0;
  for (int left = __popc(word); left > quota; --left) word &= ~(0x80000000u >> __clz(int(word)));
  return word;
}

/// The words of this warp.
struct WarpWords {
  int begin, end;

  __device__ explicit WarpWords(int words) {
    const int each = (words + kWarps - 1) / kWarps;
    begin = min(words, int(threadIdx.x) / 32 * each);
    end = min(words, begin + each);
  }
};

/// Joins the first `quota` marks of the range, in the order of tokens, to those above it; `board.totals[0]` counts each warp's.
__device__ void join_marks(const Part& part, int quota, int inside) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const WarpWords own(part.words);
  int before = 0;
  const bool some = quota > 0 && quota < inside;
  if (some) {
    int sum = 0;
    for (int word = own.begin + lane; word < own.end; word += 32) sum += __popc(part.inside[word]);
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) part.board.totals[1][warp] = sum;
    __syncthreads();
    before = sum_before(part.board.totals[1], warp);
  }
  int selected = 0;
  for (int first = own.begin; first < own.end; first += 32) {
    const int word = first + lane;
    uint32_t bits = word < own.end ? part.above[word] : 0;
    if (quota > 0) {
      uint32_t more = word < own.end ? part.inside[word] : 0;
      if (some) {
        const int up_to = sum_up_to(__popc(more));
        const int all = __shfl_sync(~0u, up_to, 31);
        more = lowest_bits(more, quota - before - (up_to - __popc(more)));
        before += all;
      }
      bits |= more;
      if (word < own.end) part.above[word] = bits;
    }
    selected += __popc(bits);
  }
  selected = __reduce_add_sync(~0u, selected);
  if (lane == 0) part.board.totals[0][warp] = selected;
  __syncthreads();
}

/// The marked tokens in ascending order into `part.list`.
__device__ void list_tokens(const Part& part) {
  const int lane = int(threadIdx.x) % 32;
  const WarpWords own(part.words);
  int at = sum_before(part.board.totals[0], int(threadIdx.x) / 32);
  for (int first = own.begin; first < own.end; first += 32) {
    const uint32_t mine = first + lane < own.end ? part.above[first + lane] : 0;
    const int up_to = sum_up_to(__popc(mine));
    const int before = at + up_to - __popc(mine);
    for (int i = 0; i < 32; ++i) {
      const uint32_t word = __shfl_sync(~0u, mine, i);
      const int base = __shfl_sync(~0u, before, i);
      if (word == 0) continue;
      if ((word >> lane & 1) != 0) {
        part.list[base + __popc(word & ((1u << lane) - 1))] = part.begin + 32 * (first + i) + lane;
      }
    }
    at += __shfl_sync(~0u, up_to, 31);
  }
  __syncthreads();
}

__device__ void write_token(const SelectParameters& p, int64_t row, int at, int32_t token) {
  p.topk_tokens.row(row)[at] = token;
  const int32_t* table = p.block_table.row(row / p.q);
  p.topk_rows.row(row)[at] = physical_row(kv_place(table, p.page, LocalId(token)), p.stride_rows).value();
}

/// Every token is selected.
__device__ void write_all(const SelectParameters& p, int64_t row, int rank, int n) {
  for (int at = rank * kThreads + int(threadIdx.x); at < p.topk; at += p.cluster * kThreads) {
    if (at < n) {
      write_token(p, row, at, at);
    } else {
      p.topk_tokens.row(row)[at] = -1;
      p.topk_rows.row(row)[at] = -1;
    }
  }
}

/// Writes what this CTA has of the selection. `counts[r]` are those of CTA r, with the final range.
__device__ void write_selection(const Part& part, const Range& range, const Counts* counts) {
  int first = 0, need = range.need;  // of this CTA, after those of smaller ids
  for (int r = 0; r < part.rank; ++r) {
    const int taken = min(counts[r].inside, need);
    first += counts[r].above + taken;
    need -= taken;
  }
  const int quota = min(counts[part.rank].inside, need);
  join_marks(part, quota, counts[part.rank].inside);
  list_tokens(part);
  const int selected = counts[part.rank].above + quota;
  for (int i = int(threadIdx.x); i < selected; i += kThreads) write_token(part.p, part.row, first + i, part.list[i]);
}

__device__ void clear_board(Board& board) {
  if (threadIdx.x == 0) board.own = {0, 0}, board.collected = 0;
  if (threadIdx.x < kMaxCluster) board.refined[threadIdx.x] = {0, 0};
}

__global__ void __launch_bounds__(kThreads) select_kernel(const __grid_constant__ SelectParameters p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ Board board;
  clear_board(board);
  meet_cluster(p);  // every CTA of the cluster runs: its shared memory may be written to
  wait_for_earlier_kernels();
  let_next_kernel_start();

  const int64_t row = blockIdx.x / p.cluster;
  const uint4 four = __ldcg(reinterpret_cast<const uint4*>(p.histograms + row * kScoreBins) + four_of_thread());
  const int length = min(max(__ldcg(&p.seq_lens(row / p.q)), 0), p.context);
  const int n = int(keys_seen(length, p.q, int(row % p.q)));
  const Part part(p, board, shared, n);
  if (part.rank == 0 && threadIdx.x == 0) p.valid(row) = min(n, p.topk);
  if (n <= p.topk) return write_all(p, row, part.rank, n);

  uint32_t keys[kBatchWords];
  load_batch(part, int(threadIdx.x) / 32, keys);
  uint32_t counts[kBinsOfThread];
  read_bins(four, counts);
  Range range = narrow({0, 0, p.topk, n}, counts, -1, board);
  const bool collects = !range.is_final();
  mark(part, range, keys, collects);
  exchange(part, 0, collects ? board.collected : 0);
  clear_histogram(part);  // all CTAs have read it
  if (!collects) return write_selection(part, range, board.sent[0]);

  bool overflow = false;
  for (int r = 0; r < p.cluster; ++r) overflow |= board.sent[0][r].inside > part.limit;
  if (!overflow) {
    range = narrow_by_collected(part, range);
    __syncthreads();
    if (int(threadIdx.x) < p.cluster) {
      Counts& all = board.sent[0][threadIdx.x];
      all = {all.above + board.refined[threadIdx.x].above, board.refined[threadIdx.x].inside};
    }
    refine_marks(part, range);
    __syncthreads();
    return write_selection(part, range, board.sent[0]);
  }
  __threadfence();
  range = narrow_by_all(part, range);
  if (threadIdx.x == 0) board.own = {0, 0};
  __syncthreads();
  load_batch(part, int(threadIdx.x) / 32, keys);
  mark(part, range, keys, false);
  exchange(part, 1, 0);
  write_selection(part, range, board.sent[1]);
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
  int most = 0;
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    most = std::max(most, SelectShared(collected_of_one(cluster), kMostTokens / 32).total);
  }
  allow_shared(select_kernel, size_t(most), true);
}

void enqueue_select(const IndexerArgs& args, const IndexerScratch& scratch, const Workspace& workspace) {
  const int64_t rows = args.index_query.extent(0);
  const int context = context_of(args, scratch), cluster = cluster_of(rows, context);
  const SelectParameters parameters{.seq_lens = args.seq_lens,
                                    .block_table = args.block_table,
                                    .page = args.page,
                                    .stride_rows = args.stride_rows,
                                    .q = args.q,
                                    .topk = args.model->config.topk,
                                    .context = context,
                                    .histograms = scratch.histograms,
                                    .keys = scratch.keys,
                                    .key_pitch = scratch.key_pitch,
                                    .topk_tokens = args.topk_tokens,
                                    .topk_rows = args.topk_rows,
                                    .valid = args.valid,
                                    .cluster = cluster,
                                    .words = words_of(cluster, context)};
  const size_t shared_bytes = size_t(SelectShared(collected_of_one(cluster), parameters.words).total);
  launch(select_kernel, {.grid = unsigned(rows * cluster), .block = kThreads, .shared_bytes = shared_bytes, .cluster = cluster}, workspace,
         parameters);
}

}  // namespace dsacore::cuda
