// The plain index projection: iq = (W_IQ . q_c) ->bf16 by one kernel into scratch, then codes, weights and keys by
// another. Bytes bound it like the front (12.6 MB of weights at 32 heads and q_lora 1536), and the second kernel's
// boundary and the way of iq through L2 come on top. With more than 64 rows, CTAs of different rows share the weights
// in L2.
#include "backends/cuda/index_projection.cuh"
#include "backends/cuda/index_projection_kernels.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/tensor_copy.cuh"
#include "backends/cuda/tensor_map.h"
#include "backends/cuda/uniform.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kWarps = 8;  ///< two warpgroups that multiply; one warp more copies
constexpr int kProductThreads = (kWarps + 1) * 32;
constexpr int kFinishThreads = 256;
constexpr int kTokens = 64;  ///< rows of a CTA
constexpr int kStages = 4;
constexpr int kWeightBytes = kIndexDim * kChunkBytes;
constexpr int kStageBytes = kWeightBytes + kTokens * kChunkBytes;
constexpr int kProductShared = kStages * (kStageBytes + 2 * int(sizeof(uint64_t)));

struct ProductArguments {
  CUtensorMap weights;  ///< W_IQ in boxes of 128 rows x 64 columns
  CUtensorMap q_c;      ///< in boxes of 64 rows x 64 columns
  BFloat16* iq;         ///< out [rows, heads*128]
  int q_lora, rows;
};

/// The stages of a CTA: a tile of weights, then a tile of activations; full and empty barriers.
struct Stages {
  uint32_t base;

  __device__ __forceinline__ uint32_t weights(int chunk) const {
    return base + uint32_t(chunk % kStages * kStageBytes);
  }
  __device__ __forceinline__ uint32_t activations(int chunk) const { return weights(chunk) + kWeightBytes; }
  __device__ __forceinline__ Barrier full(int chunk) const {
    return {base + uint32_t(kStages * kStageBytes + chunk % kStages * 16)};
  }
  __device__ __forceinline__ Barrier empty(int chunk) const { return {full(chunk).address + 8}; }
  static __device__ __forceinline__ uint32_t parity(int chunk) { return uint32_t(chunk / kStages & 1); }

  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        full(stage).init(1);
        empty(stage).init(kWarps);
      }
      publish_barriers();
    }
    __syncthreads();
  }
};

/// Copies all chunks; the first weights before the earlier kernels have ended. One thread.
__device__ __forceinline__ void copy_chunks(const ProductArguments& a, const Stages& stages, int chunks) {
  const int head_row = int(blockIdx.x) * kIndexDim, first = int(blockIdx.y) * kTokens;
  const auto copy_weights = [&](int chunk) {
    stages.full(chunk).expect(kStageBytes);
    tensor_copy_once(stages.weights(chunk), a.weights, chunk * kChunkColumns, head_row, stages.full(chunk));
  };
  const auto copy_activations = [&](int chunk) {
    tensor_copy(stages.activations(chunk), a.q_c, chunk * kChunkColumns, first, stages.full(chunk));
  };
  const int ahead = min(kStages, chunks);
  for (int chunk = 0; chunk < ahead; ++chunk) copy_weights(chunk);
  wait_for_earlier_kernels();
  for (int chunk = 0; chunk < ahead; ++chunk) copy_activations(chunk);
  for (int chunk = ahead; chunk < chunks; ++chunk) {
    stages.empty(chunk).wait(Stages::parity(chunk) ^ 1);
    copy_weights(chunk);
    copy_activations(chunk);
  }
}

/// One index head of up to 64 rows a CTA; a warpgroup has 64 of the head's 128 values.
__global__ void __launch_bounds__(kProductThreads) index_product(const __grid_constant__ ProductArguments a) {
  extern __shared__ __align__(1024) std::byte shared[];
  const int warp = uniform_warp();
  const int chunks = a.q_lora / kChunkColumns;
  const Stages stages{shared_address(shared)};
  stages.init();
  if (warp == kWarps) {
    if (elect_one()) copy_chunks(a, stages, chunks);
    wait_for_earlier_kernels();
    return;
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();

  float total[kTokens / 2], even[kTokens / 2], sums[kTokens / 2];
  int chunk = 0;
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (float& sum : sums) sum = 0;
    const int begin = chunk, end = chunk + part_of(part, a.q_lora / kNormBlock).blocks * kBlockChunks;
    for (; chunk < end; ++chunk) {
      stages.full(chunk).wait(Stages::parity(chunk));
      multiply_chunk<kTokens>(sums, stages.weights(chunk) + uint32_t(warp / 4 * (kWeightBytes / 2)),
                              stages.activations(chunk), chunk > begin);
      if (chunk > 0) {
        wgmma_wait<1>();
        if (elect_one()) stages.empty(chunk - 1).arrive();
      }
    }
    wgmma_wait<0>();
    wgmma_settle(sums);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      if (part % 2 == 0) {
        even[i] = sums[i];
      } else {
        total[i] = part == 1 ? even[i] + sums[i] : total[i] + (even[i] + sums[i]);
      }
    }
  }

  const int first = int(blockIdx.y) * kTokens, live = min(kTokens, a.rows - first);
  const int lane = int(threadIdx.x) % 32, value = int(blockIdx.x) * kIndexDim + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
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
__global__ void __launch_bounds__(kFinishThreads) index_finish(const __grid_constant__ FinishArguments a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int warp = int(blockIdx.x) * (kFinishThreads / 32) + int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (warp < a.rows) return a.keys.insert(warp, a.keys.norm(lane), lane);
  const int row = (warp - a.rows) / a.heads, head = (warp - a.rows) % a.heads;
  if (row >= a.rows) return;
  const auto* values = reinterpret_cast<const uint2*>(a.iq + (int64_t(row) * a.heads + head) * kIndexDim);
  const FourValues iq(values[lane]);
  const HeadScale scale(largest_of_lanes<32>(iq.largest()));
  reinterpret_cast<uint32_t*>(a.output.index_query.row(row, head))[lane] = scale.codes(iq);
  if (lane == 0) a.output.write_weight(row, head, a.output.wv(row, head), scale);
}

}  // namespace

void run_plain(const IndexProjectionArgs& args, const Workspace& workspace) {
  const LayerSizes& sizes = args.model->sizes;
  const int rows = int(args.projected.extent(0)), heads = sizes.index_heads;
  if (rows == 0) return;
  auto* iq = reinterpret_cast<BFloat16*>(workspace.scratch.data());
  const ProductArguments product = {
      .weights = tensor_map(args.model->w_iq.data(), int64_t(heads) * kIndexDim, sizes.q_lora, sizes.q_lora, kIndexDim),
      .q_c = tensor_map(args.q_c.data(), rows, sizes.q_lora, args.q_c.stride(0), kTokens),
      .iq = iq,
      .q_lora = sizes.q_lora,
      .rows = rows};
  launch(index_product,
         {.grid = dim3(unsigned(heads), unsigned((rows + kTokens - 1) / kTokens)),
          .block = dim3(kProductThreads),
          .shared_bytes = kProductShared},
         workspace, product);
  const int warps = rows * (heads + 1);
  launch(index_finish,
         {.grid = dim3(unsigned((warps + kFinishThreads / 32 - 1) / (kFinishThreads / 32))),
          .block = dim3(kFinishThreads)},
         workspace, FinishArguments{iq, head_output(args), key_insert(args), heads, rows});
}

void prepare_plain(const ShapeKey&) { allow_shared(index_product, kProductShared); }

int64_t plain_scratch_bytes(const ShapeKey& shape, int) {
  return int64_t(shape.rows) * shape.sizes.index_heads * kIndexDim * int64_t(sizeof(BFloat16));
}

}  // namespace dsacore::cuda
