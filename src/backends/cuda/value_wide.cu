// value, `wide`: step 12 as a matrix product over all heads into `v`, then the gate kernel: other instructions and
// another order of sums than `fused`, whose check it is. Measured up to 256 rows of 96 heads it is nowhere the faster
// one. W_UV, latent -> shared memory, 64 latent values a stage -> wgmma -> v, rounded -> scratch -> gate
//
// A CTA owns one head and 64 rows: two warpgroups take 64 columns each as the left side. Bounds: 192 KB from L2 a CTA,
// 1.5 us at 64 bytes a clock; 2048 clocks of products. Shared memory: 97 KB.
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/cache_policy.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/value.h"
#include "backends/cuda/value_parts.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kWarpgroups = 2;
constexpr int kThreads = 128 * kWarpgroups;
constexpr int kRows = 64;         // of a CTA
constexpr int kStageValues = 64;  // latent values of a stage: a swizzled row of 128 bytes
constexpr int kSteps = kLatent / kStageValues;
constexpr int kStages = 4;
constexpr uint32_t kRowBytes = kStageValues * sizeof(BFloat16);
constexpr uint32_t kWeightBytes = kValue * kRowBytes;
constexpr uint32_t kLatentBytes = kRows * kRowBytes;
constexpr uint32_t kStageBytes = kWeightBytes + kLatentBytes;
constexpr uint32_t kTileAlignment = 1024;
constexpr uint32_t kSharedBytes = kStages * kStageBytes + kTileAlignment;
constexpr int kOutPitch = kValue + 8;  // of v in shared memory: a store's 4 rows x 8 columns reach different banks
static_assert(kRows * kOutPitch * sizeof(BFloat16) <= kStages * kStageBytes);

struct WideParameters {
  View<const BFloat16, 3> latent;
  View<const BFloat16, 3> w_uv;
  View<BFloat16, 2> v;
  LiveRows live;
  int rows;
  bool v_pairs;
};

/// Copies `Rows` rows of 128 bytes into a swizzled tile (ptx/wgmma.cuh); `row_at(r)` is the start of row r. `Once`: as
/// what is read once.
template <int Rows, bool Once, class RowAt>
__device__ __forceinline__ void copy_tile(uint32_t tile, RowAt row_at) {
  constexpr int kPieces = int(kRowBytes) / 16;
#pragma unroll
  for (int i = 0; i < Rows * kPieces / kThreads; ++i) {
    const int at = i * kThreads + int(threadIdx.x);
    const int row = at / kPieces;
    const int piece = at % kPieces;
    const uint32_t to = tile + uint32_t(row) * kRowBytes + uint32_t((piece ^ (row % 8)) * 16);
    if constexpr (Once) {
      async_copy16_once(to, row_at(row) + piece * 8);
    } else {
      async_copy16(to, row_at(row) + piece * 8);
    }
  }
}

/// One stage's products: 64 columns of this warpgroup by 64 rows.
__device__ __forceinline__ void multiply_stage(float (&sum)[kRows / 2], uint32_t stage, int warpgroup, bool first) {
  const uint64_t weights = swizzled_tile(stage + uint32_t(warpgroup) * (kWeightBytes / kWarpgroups));
  const uint64_t latent = swizzled_tile(stage + kWeightBytes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kStageValues / 16; ++k) {
    WgmmaShape<Operands::kBf16, kRows>::shared<>(sum, weights + uint64_t(2 * k), latent + uint64_t(2 * k),
                                                 first && k == 0 ? 0 : 1);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

__global__ void __launch_bounds__(kThreads) value_wide(const __grid_constant__ WideParameters p) {
  extern __shared__ std::byte shared[];
  const uint32_t stages = (shared_address(shared) + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  BFloat16* v_rows = reinterpret_cast<BFloat16*>(shared + (stages - shared_address(shared)));
  const int head = int(blockIdx.x);
  const int first_row = int(blockIdx.y) * kRows;
  const int warpgroup = int(threadIdx.x) / 128;

  const auto stage_at = [&](int step) { return stages + uint32_t(step % kStages) * kStageBytes; };
  const auto copy_weights = [&](int step) {
    copy_tile<kValue, true>(stage_at(step), [&](int column) { return p.w_uv.row(head, column) + step * kStageValues; });
  };
  const auto copy_latent = [&](int step) {  // rows past the last one repeat it; nobody takes their sums
    copy_tile<kRows, false>(stage_at(step) + kWeightBytes, [&](int row) {
      return p.latent.row(min(first_row + row, p.rows - 1), head) + step * kStageValues;
    });
  };

  if (threadIdx.x / 32 == 0 && elect_one()) prefetch_l2(p.w_uv.row(head), kValue * kLatent * sizeof(BFloat16));
  for (int step = 0; step < kStages - 1; ++step) copy_weights(step);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  for (int step = 0; step < kStages - 1; ++step) {
    copy_latent(step);
    async_commit();
  }

  float sum[kRows / 2];
  for (int step = 0; step < kSteps; ++step) {
    async_wait<kStages - 2>();
    fence_async_proxy();
    __syncthreads();  // the stage is whole, and the one before it is free
    if (step + kStages - 1 < kSteps) {
      copy_weights(step + kStages - 1);
      copy_latent(step + kStages - 1);
    }
    async_commit();
    multiply_stage(sum, stage_at(step), warpgroup, step == 0);
  }
  __syncthreads();  // the stages make room for v

  const int lane = int(threadIdx.x) % 32;
  const int column = int(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
    v_rows[row * kOutPitch + column + i / 2 % 2 * 8] = to_bf16(sum[i]);
  }
  __syncthreads();
  constexpr int kPairs = kValue / 2;
  for (int at = int(threadIdx.x); at < kRows * kPairs; at += kThreads) {
    const int row = first_row + at / kPairs;
    if (row >= p.rows) break;
    const Bf16Pair v = load_pair(v_rows + at / kPairs * kOutPitch + at % kPairs * 2, true);
    store_pair(p.v.row(row) + head * kValue + at % kPairs * 2, p.live(row) ? v : Bf16Pair{0}, p.v_pairs);
  }
}

}  // namespace

int64_t wide_value_bytes(const ShapeKey& shape, int) {
  return int64_t(shape.rows) * shape.sizes.heads * kValue * int64_t(sizeof(BFloat16));
}

void prepare_wide_value(const ShapeKey&) { allow_shared(value_wide, kSharedBytes); }

void run_wide_value(const ValueArgs& args, const Workspace& workspace) {
  const int64_t rows = args.latent.extent(0);
  const int64_t heads = args.latent.extent(1);
  if (rows == 0) return;
  const bool gated = !args.gate.empty();
  const View<BFloat16, 2> v =
      gated ? View<BFloat16, 2>(reinterpret_cast<BFloat16*>(workspace.scratch.data()), rows, heads * kValue) : args.out;
  const WideParameters parameters{.latent = args.latent,
                                  .w_uv = args.w_uv,
                                  .v = v,
                                  .live = live_rows(args.seq_lens, args.q),
                                  .rows = int(rows),
                                  .v_pairs = has_aligned_pairs(v)};
  launch(value_wide,
         {.grid = dim3(unsigned(heads), unsigned((rows + kRows - 1) / kRows)),
          .block = dim3(kThreads),
          .shared_bytes = kSharedBytes},
         workspace, parameters);
  if (gated) run_gate({v, args.gate, args.out, args.seq_lens, args.q}, workspace);
}

}  // namespace dsacore::cuda
