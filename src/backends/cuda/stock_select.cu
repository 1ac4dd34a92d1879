// Step 10 in the plainest way that is exact: one CTA a row finds the topk-th largest key by four radix passes of 8 bits
// over all its keys and writes the selected token ids in order; a second kernel turns ids into physical rows. Kept as a
// check of `fused`, and bound by what one SM reads from L2.
#include "backends/cuda/indexer_stages.h"
#include "backends/cuda/keyed_rows.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kRadix = 256;

/// The `need`-th largest key, and how many keys equal to it are needed.
struct Threshold {
  uint32_t key;
  int need;
};

__device__ Threshold find_threshold(const uint32_t* keys, int n, int topk) {
  __shared__ int bins[kRadix];
  __shared__ Threshold found;
  Threshold threshold{0, topk};
  for (int shift = 24; shift >= 0; shift -= 8) {
    const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8);
    for (int i = int(threadIdx.x); i < kRadix; i += kThreads) bins[i] = 0;
    __syncthreads();
    for (int i = int(threadIdx.x); i < n; i += kThreads) {
      const uint32_t key = __ldcg(keys + i);
      if (((key ^ threshold.key) & known) == 0) atomicAdd(bins + (key >> shift) % kRadix, 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kRadix - 1, need = threshold.need;
      while (bins[digit] < need) need -= bins[digit--];
      found = {threshold.key | uint32_t(digit) << shift, need};
    }
    __syncthreads();
    threshold = found;
  }
  return threshold;
}

/// Sums of `value` over the threads before this one and over all.
struct Sums {
  int before, all;
};

__device__ Sums sum_threads(int value) {
  __shared__ int totals[kWarps];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const uint32_t ballot = __ballot_sync(~0u, value != 0);  // values are 0 or 1
  __syncthreads();
  if (lane == 0) totals[warp] = __popc(ballot);
  __syncthreads();
  const int before = __reduce_add_sync(~0u, lane < warp ? totals[lane] : 0);
  return {before + __popc(ballot & ((1u << lane) - 1)), __reduce_add_sync(~0u, totals[lane])};
}

__global__ void __launch_bounds__(kThreads) stock_tokens_kernel(const __grid_constant__ KeyedRows p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int n = keys_of_row(p, int(row)), taken = min(n, p.topk);
  int32_t* out = p.topk_tokens.row(row);
  if (threadIdx.x == 0) p.valid(row) = taken;
  for (int i = int(threadIdx.x); i < p.topk; i += kThreads) {
    if (n <= p.topk || i >= taken) out[i] = i < n ? i : -1;
  }
  if (n <= p.topk) return;

  const uint32_t* keys = p.keys + row * p.key_pitch;
  const Threshold threshold = find_threshold(keys, n, p.topk);
  int at = 0, need = threshold.need;
  for (int first = 0; first < n; first += kThreads) {
    const int token = first + int(threadIdx.x);
    const uint32_t key = token < n ? __ldcg(keys + token) : 0;
    const bool ties = token < n && key == threshold.key;
    const Sums earlier = sum_threads(ties);
    const bool selected = token < n && (key > threshold.key || (ties && earlier.before < need));
    const Sums place = sum_threads(selected);
    if (selected) out[at + place.before] = token;
    at += place.all;
    need = max(0, need - earlier.all);
  }
}

__global__ void __launch_bounds__(kThreads) stock_rows_kernel(const __grid_constant__ KeyedRows p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int32_t* table = p.block_table.row(row / p.q);
  for (int i = int(threadIdx.x); i < p.topk; i += kThreads) {
    const int32_t token = __ldcg(p.topk_tokens.row(row) + i);
    p.topk_rows.row(row)[i] =
        token < 0 ? -1 : physical_row(kv_place(table, p.page, LocalId(token)), p.stride_rows).value();
  }
}

}  // namespace

void enqueue_stock_select(const IndexerArgs& args, const IndexerScratch& scratch, const Workspace& workspace) {
  const KeyedRows parameters = keyed_rows(args, scratch);
  const LaunchShape shape{.grid = unsigned(args.index_query.extent(0)), .block = kThreads};
  launch(stock_tokens_kernel, shape, workspace, parameters);
  launch(stock_rows_kernel, shape, workspace, parameters);
}

}  // namespace dsacore::cuda
