// Step 10: the exact best topk of a row's scores, ascending by token id, as token ids and physical rows.
//
// A CTA has a row or, of long ones, a cluster of up to 16 has it, each with a range of its tokens. The histogram of the
// score kernel names the bin in which the topk-th largest key lies. One pass over the keys, which come into shared
// memory by bulk copies, marks those above the bin and those in it as bits, a bit a token, and collects those in it
// with their token ids; the CTAs exchange these, and all put them in order. Where they are too many for that, radix
// passes narrow the bin down first: over what the CTAs have collected, or, where one has more than it can collect, over
// all keys in memory. Slower, never wrong. Bits in the order of tokens then give every selected token its place.
// Nothing depends on the order of execution. Where scores are made in pieces (scores_pieces.cuh) a row's selection
// awaits the row's pages, not the score kernel's end, and gives the keys up.
//
// Bounds: 4 bytes a key from L2, and for short contexts latency and issue. A CTA is alone on its SM, so that an
// instruction that all of its W warps execute costs W / 4 clocks: hence few threads, and nothing unrolled that need not
// be. All that does not depend on a row's length is asked for beside it, in one round of loads.
#include <algorithm>
#include <bit>

#include "backends/cuda/indexer_stages.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/flags.cuh"
#include "backends/cuda/select_threshold.cuh"
#include "backends/cuda/select_write.cuh"

namespace dsacore::cuda {
namespace select {
namespace {

/// Returns when the row's keys and its histogram are there: in pieces when all its pages have been counted, else with
/// the score kernel's end.
template <bool InPieces>
__device__ __forceinline__ void await_scores(const Part& part, int n) {
  if constexpr (InPieces) {
    if (n <= part.p.topk) return;
    if (threadIdx.x == 0) await_acquire(part.p.scored + part.row, uint32_t(pages_of(n, kIndexPage)));
    __syncthreads();
  } else {
    wait_for_earlier_kernels();
  }
}

/// Keeps keys that nobody reads any more from being written to memory.
__device__ __forceinline__ void give_up_keys(const Part& part) {
#pragma unroll 1
  for (int i = int(threadIdx.x); i < (part.count + 31) / 32; i += kThreads) discard_line(part.keys + 32 * i);
  if (part.rank == 0 && threadIdx.x == 0) part.p.scored[part.row] = 0;  // all CTAs have seen it
}

/// Selects among more than topk tokens and writes those of this CTA.
template <bool InPieces>
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
  clear_histogram(part);  // all CTAs have read it
  if constexpr (InPieces) give_up_keys(part);
  if (p.cluster > 1) cluster_wait();
}

/// `InPieces`: of one row a request, whose scores are made in pieces.
template <bool InPieces>
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
  // This one started when all before the scores had ended: what runs beside both may start, and lengths and tables are
  // those of the step.
  let_next_kernel_start();
  copy_entries(part);
  const int n = uniform(keys_of_row(p, part.row));
  part.count = max(0, min(part.held, n - part.begin));
  rows_of_entries(part);
  meet_cluster(p);  // every CTA of the cluster runs: its shared memory may be written to
  await_scores<InPieces>(part, n);

  if (n > p.topk) {
    Bins bins;
    bins.load_past_l1(part.histogram());
    if (threadIdx.x == 0) part.copy_chunk(0), part.copy_chunk(1);
    select_tokens<InPieces>(part, bins, n);
  } else {
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
  }
  if (part.rank == 0 && threadIdx.x == 0) p.valid(part.row) = min(n, p.topk);
  // One CTA does for all; the others leave their SMs to those of rows that are scored later.
  if (InPieces && blockIdx.x == gridDim.x - 1) wait_for_earlier_kernels();
}

/// CTAs of a row: one for every kChunk tokens, as long as `most` of all rows find an SM, and enough to have room for
/// the marks.
int cluster_of(int64_t rows, int context, int64_t most) {
  int cluster = 1;
  while (cluster < kMaxCluster && cluster * kChunk < context && 2 * rows * cluster <= most) cluster *= 2;
  while (cluster * kMostTokens < context) cluster *= 2;
  return cluster;
}

int tokens_each(int cluster, int context) { return ((context + cluster - 1) / cluster + 255) / 256 * 256; }

}  // namespace
}  // namespace select

/// CTAs of all rows: about one an SM; of rows that are scored one after the other, four turns of them.
constexpr int kSelects = 128, kSelectsOfPieces = 512;

void prepare_select(const ShapeKey&) {
  for (const auto kernel : {select::select_kernel<false>, select::select_kernel<true>}) {
    allow_shared(kernel, size_t(select::SelectShared(select::kMostTokens).total), true);
  }
}

void enqueue_select(const IndexerArgs& args, const IndexerScratch& scratch, const Workspace& workspace) {
  const int64_t rows = args.index_query.extent(0);
  const KeyedRows keyed = keyed_rows(args, scratch);
  const bool pieces = in_pieces(args, scratch);
  const int cluster = select::cluster_of(rows, keyed.context, pieces ? kSelectsOfPieces : kSelects);
  const select::SelectParameters parameters{keyed,
                                            scratch.histograms,
                                            cluster,
                                            std::countr_zero(unsigned(cluster)),
                                            select::tokens_each(cluster, keyed.context),
                                            scratch.scored};
  launch(pieces ? select::select_kernel<true> : select::select_kernel<false>,
         {.grid = unsigned(rows * cluster),
          .block = select::kThreads,
          .shared_bytes = size_t(select::SelectShared(parameters.each).total),
          .cluster = cluster},
         workspace, parameters);
}

}  // namespace dsacore::cuda
