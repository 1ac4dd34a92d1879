// The plain index projection: iq = (W_IQ . q_c) ->bf16 by one kernel into scratch, then codes, weights and keys by
// another. Bytes bound it like the front (12.6 MB of weights at 32 heads and q_lora 1536), and the second kernel's
// boundary and the way of iq through L2 come on top. With more than 64 rows, CTAs of different rows share the weights
// in L2.
#include "backends/cuda/index_projection.cuh"
#include "backends/cuda/index_projection_kernels.h"
#include "backends/cuda/ptx/dependency.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 64;  ///< rows of a CTA
constexpr int kStages = 4;
constexpr int kActivationBytes = kTokens * kChunkColumns * int(sizeof(BFloat16));
constexpr int kStageBytes = kTileBytes + kActivationBytes;

struct ProductArguments {
  const BFloat16* w_iq;  ///< [heads*128, q_lora]
  View<const BFloat16, 2> q_c;
  BFloat16* iq;  ///< out [rows, heads*128]
  int q_lora, rows;
};

/// One index head of up to 64 rows a CTA; a warpgroup has 64 of the head's 128 values.
__global__ void __launch_bounds__(kThreads) index_product(const __grid_constant__ ProductArguments a) {
  extern __shared__ __align__(1024) std::byte shared[];
  const int thread = int(threadIdx.x), warpgroup = thread / 128;
  const int head = int(blockIdx.x), first = int(blockIdx.y) * kTokens;
  const int live = min(kTokens, a.rows - first);
  const int chunks = a.q_lora / kChunkColumns;
  const uint32_t base = fixed_shared_address(shared);
  const auto stage = [&](int chunk) { return base + uint32_t(chunk % kStages * kStageBytes); };
  const auto weights = [&](int chunk) { return stage(chunk) + uint32_t(warpgroup * (kTileBytes / 2)); };
  const auto activations = [&](int chunk) { return stage(chunk) + uint32_t(kTileBytes); };

  wait_for_earlier_kernels();
  let_next_kernel_start();
  const BFloat16* w = a.w_iq + (int64_t(head) * kIndexDim + warpgroup * 64) * a.q_lora;
  const auto request = [&](int chunk) {  // one group each, also past the end
    if (chunk < chunks) {
      copy_tile(weights(chunk), w + chunk * kChunkColumns, a.q_lora, thread % 128);
      if (warpgroup == 0) {
        copy_tile(activations(chunk), a.q_c.row(first) + chunk * kChunkColumns, a.q_c.stride(0), thread, live);
      }
    }
    async_commit();
  };
  for (int chunk = 0; chunk < kStages - 1; ++chunk) request(chunk);

  float total[kTokens / 2], sums[kTokens / 2];
  int chunk = 0;
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (float& sum : sums) sum = 0;
    const int begin = chunk, end = chunk + part_of(part, a.q_lora / kNormBlock).blocks * kBlockChunks;
    for (; chunk < end; ++chunk) {
      async_wait<kStages - 2>();
      fence_async_proxy();
      wgmma_wait<0>();
      __syncthreads();  // this chunk is there, the one before is done with
      request(chunk + kStages - 1);
      multiply_chunk<kTokens>(sums, weights(chunk), activations(chunk), chunk > begin);
    }
    wgmma_wait<0>();
    wgmma_settle(sums);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) total[i] = part == 0 ? sums[i] : total[i] + sums[i];
  }

  const int value = head * kIndexDim + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    const int token = i / 4 * 8 + thread % 4 * 2 + i % 2;
    if (token >= live) continue;
    a.iq[int64_t(first + token) * gridDim.x * kIndexDim + value + i % 4 / 2 * 8] = to_bf16(total[i]);
  }
}

struct FinishArguments {
  const BFloat16* iq;  ///< [rows, heads*128]
  HeadOutput output;
  KeyInsert keys;
  int heads, rows;
};

/// A warp a key, then a warp an index head of a row.
__global__ void __launch_bounds__(kThreads) index_finish(const __grid_constant__ FinishArguments a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int warp = int(blockIdx.x) * (kThreads / 32) + int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (warp < a.rows) return a.keys.insert(warp, lane);
  const int row = (warp - a.rows) / a.heads, head = (warp - a.rows) % a.heads;
  if (row >= a.rows) return;
  const auto* values = reinterpret_cast<const uint2*>(a.iq + (int64_t(row) * a.heads + head) * kIndexDim);
  const uint2 pairs = values[lane];
  const float4 iq = {low_bf16(pairs.x), high_bf16(pairs.x), low_bf16(pairs.y), high_bf16(pairs.y)};
  a.output.finish(row, head, iq, a.output.wv(row, head), lane);
}

}  // namespace

void run_plain(const IndexProjectionArgs& args, const Workspace& workspace) {
  const LayerSizes& sizes = args.model->sizes;
  const int rows = int(args.projected.extent(0)), heads = sizes.index_heads;
  auto* iq = reinterpret_cast<BFloat16*>(workspace.scratch.data());
  launch(index_product,
         {.grid = dim3(unsigned(heads), unsigned((rows + kTokens - 1) / kTokens)),
          .block = dim3(kThreads),
          .shared_bytes = kStages * kStageBytes},
         workspace, ProductArguments{args.model->w_iq.data(), args.q_c, iq, sizes.q_lora, rows});
  const int warps = rows * (heads + 1);
  launch(index_finish, {.grid = dim3(unsigned((warps + kThreads / 32 - 1) / (kThreads / 32))), .block = dim3(kThreads)},
         workspace, FinishArguments{iq, head_output(args), key_insert(args), heads, rows});
}

void prepare_plain(const ShapeKey&) { allow_shared(index_product, kStages * kStageBytes); }

int64_t plain_scratch_bytes(const ShapeKey& shape, int) {
  return int64_t(shape.rows) * shape.sizes.index_heads * kIndexDim * int64_t(sizeof(BFloat16));
}

}  // namespace dsacore::cuda
