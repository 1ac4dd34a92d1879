// query_norm: q_a -> norm -> q_c, and its image for the streamed projection | kv_a -> norm -> quantise -> MLA cache row.
//
// A warp a row and task. Bound by latency: 3 KB a row from L2, one pass; 64 rows are 0.4 MB. The next kernel is let in at
// once, so that its weights travel meanwhile.
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/query_rows.cuh"

namespace dsacore::cuda::query {
namespace {

constexpr int kWarps = 4;

/// Eight values of q_c, from value `at` on, into the image.
__device__ void write_image(const QcImage& image, int q_lora, int row, int at, const uint4& values) {
  constexpr int kRowBytes = 128, kPieceBytes = 16;
  const int chunk = at / 64, unit = at / 32 % 2, c = at / kLaneValues % 4;
  const int64_t block = int64_t(row / image.tile) * (q_lora / 64) + chunk;
  std::byte* line = image.data + (block * image.tile + row % image.tile) * kRowBytes;
  const uint32_t pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const int piece = (unit * 4 + p) ^ (row % 8);
    *reinterpret_cast<uint32_t*>(line + piece * kPieceBytes + c * 4) = pairs[p];
  }
}

using QueryRow = WarpRow<kMaxQLora / kWarpValues>;

/// Step 1 of one row.
__device__ void normalise_row(const Parameters& p, const QcImage& image, const QueryRow& weights, int row, int lane) {
  QueryRow x;
  x.load(p.projected.row(row), p.q_lora, p.aligned_rows, lane);
  x.normalise(weights, p.q_lora, p.eps);
#pragma unroll
  for (int i = 0; i < kMaxQLora / kWarpValues; ++i) {
    const int at = x.first_value(i, lane);
    if (at >= p.q_lora) continue;
    *reinterpret_cast<uint4*>(p.q_c.row(row) + at) = x.values[i];
    if (image.data != nullptr) write_image(image, p.q_lora, row, at, x.values[i]);
  }
}

/// Tasks 0..rows-1 normalise, rows..2 rows-1 insert.
__global__ void __launch_bounds__(32 * kWarps) query_norm(const __grid_constant__ Parameters p,
                                                          const __grid_constant__ QcImage image, int tasks) {
  let_next_kernel_start();  // it waits for all of this grid, which waits for all before it
  const int task = int(blockIdx.x * kWarps + threadIdx.x / 32), lane = int(threadIdx.x % 32);
  if (task < p.rows) {
    QueryRow weights;
    weights.load(p.q_norm.data(), p.q_lora, true, lane);
    wait_for_earlier_kernels();
    normalise_row(p, image, weights, task, lane);
  } else {
    LatentRow weights;
    weights.load(p.kv_norm.data(), kLatent, true, lane);
    wait_for_earlier_kernels();
    if (task < tasks) insert_row(p, weights, task - p.rows, lane);
  }
}

}  // namespace

void enqueue_norm(const Parameters& p, const Workspace& workspace, QcImage image, bool insert) {
  const int tasks = insert ? 2 * p.rows : p.rows;
  launch(query_norm, {.grid = dim3(unsigned(tasks + kWarps - 1) / kWarps), .block = dim3(32 * kWarps)}, workspace, p, image,
         tasks);
}

}  // namespace dsacore::cuda::query
