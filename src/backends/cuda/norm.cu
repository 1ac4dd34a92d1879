// Step 1 alone: `q_c` of each row, for overlap modes that run the index projection before the query. One CTA a row.
// Bounds: the latency of one read of a row; at 256 rows of 1536 it moves 1.6 MB.
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/norm.cuh"
#include "backends/cuda/ptx/dependency.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kPerThread = 8;
constexpr int kThreads = kMaxQLora / kPerThread;
constexpr int kThreadsOfBlock = kNormBlock / kPerThread;

struct NormRows {
  View<const BFloat16, 2> projected;
  View<BFloat16, 2> q_c;
  const BFloat16* weight;
  int q_lora;
  float eps;
  bool aligned16;  ///< the projected rows
};

__global__ void __launch_bounds__(kThreads) norm_rows(const __grid_constant__ NormRows p) {
  __shared__ float block_sums[kMaxQLora / kNormBlock];
  const int at = int(threadIdx.x) * kPerThread;
  const bool live = at < p.q_lora;  // whole warps of 256 values, or one half of a warp
  const uint4 weight = live ? load_bf16x8(p.weight + at, reinterpret_cast<uintptr_t>(p.weight) % 16 == 0) : uint4{};
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const uint4 x = live ? load_bf16x8(p.projected.row(row) + at, p.aligned16) : uint4{};
  const float sum = block_sum(sum_of_squares(x));
  if (live && threadIdx.x % kThreadsOfBlock == 0) block_sums[threadIdx.x / kThreadsOfBlock] = sum;
  __syncthreads();
  if (!live) return;
  const float factor = norm_factor(block_sums, p.q_lora / kNormBlock, p.eps);
  *reinterpret_cast<uint4*>(p.q_c.row(row) + at) = normalised(x, factor, weight);
}

void run_norm(const NormArgs& args, const Workspace& workspace) {
  const LayerModel& m = *args.model;
  const bool aligned16 =
      reinterpret_cast<uintptr_t>(args.projected.data()) % 16 == 0 && args.projected.stride(0) % kPerThread == 0;
  launch(norm_rows, {.grid = dim3(unsigned(args.projected.extent(0))), .block = dim3(kThreads)}, workspace,
         NormRows{args.projected, args.q_c, m.q_norm.data(), m.sizes.q_lora, float(m.config.eps), aligned16});
}

constexpr Kernel<NormArgs> kNormKernels[] = {{"rows", [](const ShapeKey&) { return Verdict{}; },
                                              [](const ShapeKey&, int) { return int64_t(0); }, run_norm}};

}  // namespace

std::span<const Kernel<NormArgs>> norm_kernels() { return kNormKernels; }

}  // namespace dsacore::cuda
