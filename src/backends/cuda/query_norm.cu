// query_norm: q_a -> norm -> q_c | kv_a -> norm -> quantise -> MLA cache row.
//
// A warp a row and task. Bound by latency: 3 KB a row from L2, one pass; 64 rows are 0.4 MB. The next kernel is let in
// at once, so that its weights travel meanwhile.
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/query_rows.cuh"

namespace dsacore::cuda::query {
namespace {

constexpr int kWarps = 4;
constexpr int kUsualSteps = 1536 / kWarpValues;

/// Step 1 of one row, in `Steps` times 256 values.
template <int Steps>
__device__ __forceinline__ void normalise_row(const Parameters& p, const WarpRow<Steps>& weights, int row, int lane) {
  WarpRow<Steps> x;
  x.load(p.projected.row(row), p.q_lora, p.aligned_rows, lane);
  x.normalise(weights, p.q_lora, p.eps);
#pragma unroll
  for (int i = 0; i < Steps; ++i) {
    const int at = x.first_value(i, lane);
    if (at < p.q_lora) *reinterpret_cast<uint4*>(p.q_c.row(row) + at) = x.values[i];
  }
}

/// Tasks 0..rows-1 normalise, rows..2 rows-1 insert.
template <int Steps>
__global__ void __launch_bounds__(32 * kWarps) query_norm(const __grid_constant__ Parameters p, int tasks) {
  let_next_kernel_start();  // it waits for all of this grid, which waits for all before it
  const int task = int(blockIdx.x * kWarps + threadIdx.x / 32), lane = int(threadIdx.x % 32);
  if (task < p.rows) {
    WarpRow<Steps> weights;
    weights.load(p.q_norm.data(), p.q_lora, true, lane);
    wait_for_earlier_kernels();
    normalise_row(p, weights, task, lane);
  } else {
    LatentRow weights;
    weights.load(p.kv_norm.data(), kLatent, true, lane);
    wait_for_earlier_kernels();
    if (task < tasks) insert_row(p, weights, task - p.rows, lane);
  }
}

}  // namespace

void enqueue_norm(const Parameters& p, const Workspace& workspace, bool insert) {
  const int tasks = insert ? 2 * p.rows : p.rows;
  const auto kernel =
      p.q_lora <= kUsualSteps * kWarpValues ? query_norm<kUsualSteps> : query_norm<kMaxQLora / kWarpValues>;
  launch(kernel, {.grid = dim3(unsigned(tasks + kWarps - 1) / kWarps), .block = dim3(32 * kWarps)}, workspace, p,
         tasks);
}

}  // namespace dsacore::cuda::query
