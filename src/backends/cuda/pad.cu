// Rows past the live ones of a step: what spec 4 and 5 say of empty requests, so that a padded batch reads as such.
// Bounds: a kernel's start; 256 rows of 96 heads are 32 MB of zeros, 8 us.
#include <algorithm>
#include <limits>

#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

/// `value` in every element of a row; all threads of the row's CTAs take part.
template <class T>
__device__ __forceinline__ void fill_row(T* row, int64_t elements, T value) {
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += int64_t(gridDim.x) * kThreads) {
    row[i] = value;
  }
}

__global__ void __launch_bounds__(kThreads) pad_rows(const __grid_constant__ PadArgs p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t row = p.live_rows + blockIdx.y;
  if (!p.topk_tokens.empty()) fill_row(p.topk_tokens.row(row), p.topk_tokens.extent(1), -1);
  if (!p.topk_rows.empty()) fill_row(p.topk_rows.row(row), p.topk_rows.extent(1), -1);
  if (!p.valid.empty()) fill_row(p.valid.row(row), 1, 0);
  if (!p.latent.empty()) {  // dense, so that 16 bytes at a time fit
    fill_row(reinterpret_cast<uint4*>(p.latent.row(row)), p.latent.extent(1) * kLatent / 8, uint4{});
  }
  if (!p.lse.empty()) fill_row(p.lse.row(row), p.lse.extent(1), kEmptyLse);
  if (!p.out.empty()) fill_row(p.out.row(row), p.out.extent(1), BFloat16{});
}

int64_t rows_of(const PadArgs& args) {
  return std::max({args.topk_tokens.extent(0), args.topk_rows.extent(0), args.valid.extent(0), args.latent.extent(0),
                   args.lse.extent(0), args.out.extent(0)});
}

}  // namespace

void enqueue_pad(const PadArgs& args, const Workspace& workspace) {
  const int64_t rows = rows_of(args) - args.live_rows;
  if (rows <= 0) return;
  const int64_t pieces = std::max<int64_t>(args.latent.empty() ? 0 : args.latent.extent(1) * kLatent / 8, kMaxTopk);
  launch(
      pad_rows,
      {.grid = dim3(unsigned((pieces + 4 * kThreads - 1) / (4 * kThreads)), unsigned(rows)), .block = dim3(kThreads)},
      workspace, args);
}

}  // namespace dsacore::cuda
