// value, `merge`: step 12 of the specification behind a sparse core that leaves the parts of its splits
// (sparse_core_few.h), which are merged here.
// W_UV slice, in registers since before the wait | parts -> latents of a chunk, rounded -> partial sums of 128 columns
// -> the cluster's CTAs, 16 columns each -> v, rounded -> gate -> out
//
// A cluster of 8 has one head and a tile of up to 16 rows; each CTA has 64 latents, and adds up 16 columns. The order
// of all sums is that of value_fused.cu: the same latents give the same bits.
//
// Bound: latency. One read from L2, 4 dependent products, an exchange in the cluster, one store.
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/sparse_core_few_merge.cuh"
#include "backends/cuda/value.h"
#include "backends/cuda/value_parts.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kColumns = kValue / kChunks;  // of a CTA's outputs: 16
constexpr int kStrips = 2;                  // of 8 columns, those of a product
constexpr int kHalves = 2;                  // of a chunk: 32 values, 8 a lane of a quad, two products
static_assert(kMergeThreads == 32 * kChunks && kColumns == 8 * kStrips && kChunk == 32 * kHalves);

struct ValueMergeParameters {
  MergeArgs merge;
  const BFloat16* w_uv;  // [heads, 128, 512]
  const BFloat16* gate;  // [rows, heads * 128], or null
  BFloat16* out;         // [rows, heads * 128]
  int64_t head_pitch;    // of w_uv
  int64_t gate_pitch;
  int64_t out_pitch;
  LiveRows live;
  bool aligned;  // the pairs of gate and out lie on words
};

struct ValueMergeShared {
  static constexpr int kPitch = kChunk + 32;  ///< a quarter warp's 16-byte reads of two rows meet no bank twice
  MergeShared merge;
  alignas(16) uint16_t latents[kMergeRows][kPitch];  ///< BF16
  float4 inbox[kChunks][kMergeRows][4];  ///< of each CTA: by row and lane of a quad two columns of both strips
  alignas(8) uint64_t received;
};

/// With more than 32 rows and 4 splits each at most, 12 heads are more clusters than fit at three CTAs an SM.
constexpr int kFewSplits = 4;

template <int UnitSplits>
__global__ void __launch_bounds__(kMergeThreads, UnitSplits <= kFewSplits ? 4 : 3)
    value_merge(const __grid_constant__ ValueMergeParameters p) {
  __shared__ __align__(16) ValueMergeShared shared;
  const int warp = int(threadIdx.x / 32), lane_row = int(threadIdx.x % 32 / 4), lane_part = int(threadIdx.x % 4);
  const int chunk = int(blockIdx.x) % kChunks;
  const int head = int(blockIdx.x) / kChunks % p.merge.heads;
  const int first_row = int(blockIdx.x) / kChunks / p.merge.heads * p.merge.cta_rows();
  const int rows = min(p.merge.rows - first_row, p.merge.cta_rows());
  const Barrier received = {shared_address(&shared.received)};

  uint4 weights[kStrips][kHalves];
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      weights[s][h] = load_weights(p.w_uv + head * p.head_pitch + (warp * kColumns + s * 8 + lane_row) * kLatent +
                                   chunk * kChunk + h * 32 + lane_part * 8);
    }
  }
  // What a thread finishes: two columns of a row.
  const int own_row = first_row + int(threadIdx.x) / 8, strip = int(threadIdx.x) % 2, part = int(threadIdx.x) % 8 / 2;
  const int column = head * kValue + chunk * kColumns + strip * 8 + part * 2;
  const bool owns = int(threadIdx.x) / 8 < rows;
  // Whatever it holds yet: it is to lie in L2 when it is read.
  if (owns && p.gate != nullptr) prefetch_line_l2(p.gate + own_row * p.gate_pitch + column);
  if (threadIdx.x == 0) {
    received.init(1);
    publish_barriers();
  }
  cluster_arrive_relaxed();
  wait_for_earlier_kernels();
  let_next_kernel_start();

  const uint2 merged = merge_chunk<UnitSplits>(shared.merge, p.merge, chunk, [=](int i) {
    return MergePlace{first_row + i, head};
  });
  if (int(threadIdx.x / 16) < p.merge.cta_rows()) {
    *reinterpret_cast<uint2*>(&shared.latents[threadIdx.x / 16][threadIdx.x % 16 * 4]) = merged;
  }
  __syncthreads();

  float sum[kStrips][4] = {};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const uint4 low = *reinterpret_cast<const uint4*>(&shared.latents[lane_row][h * 32 + lane_part * 8]);
    const uint4 high = *reinterpret_cast<const uint4*>(&shared.latents[lane_row + 8][h * 32 + lane_part * 8]);
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      mma_bf16(sum[s], {low.x, high.x, low.y, high.y}, weights[s][h].x, weights[s][h].y);
      mma_bf16(sum[s], {low.z, high.z, low.w, high.w}, weights[s][h].z, weights[s][h].w);
    }
  }
  cluster_wait();
  if (threadIdx.x == 0) received.expect(uint32_t(kChunks * rows * 4 * int(sizeof(float4))));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane_row + 8 * i;
    if (row < rows) {
      send_to_cluster(address_in(shared_address(&shared.inbox[chunk][row][lane_part]), uint32_t(warp)),
                      make_float4(sum[0][2 * i], sum[0][2 * i + 1], sum[1][2 * i], sum[1][2 * i + 1]),
                      address_in(received.address, uint32_t(warp)));
    }
  }

  Bf16Pair gate = {};
  bool live = false;
  if (owns) {
    if (p.gate != nullptr) gate = load_pair(p.gate + own_row * p.gate_pitch + column, p.aligned);
    live = p.live(own_row);
  }
  wait_in_cluster(received, 0);
  if (!owns) return;
  float2 v = reinterpret_cast<const float2*>(&shared.inbox[0][threadIdx.x / 8][part])[strip];
#pragma unroll
  for (int source = 1; source < kChunks; ++source) {
    const float2 more = reinterpret_cast<const float2*>(&shared.inbox[source][threadIdx.x / 8][part])[strip];
    v.x += more.x;
    v.y += more.y;
  }
  Bf16Pair result = round_pair(v.x, v.y);
  if (p.gate != nullptr) result = gated(result, gate);
  store_pair(p.out + own_row * p.out_pitch + column, live ? result : Bf16Pair{0}, p.aligned);
}

}  // namespace

void run_value_merge(const ValueArgs& args, const Workspace& workspace) {
  const MergeArgs merge = merge_args(*args.core, args.parts);
  if (merge.rows == 0) return;
  const int tiles = (merge.rows + merge.cta_rows() - 1) / merge.cta_rows();
  launch(merge.splits <= kFewSplits << merge.helper_bits ? value_merge<kFewSplits> : value_merge<kUnitSplits>,
         {.grid = dim3(unsigned(tiles * merge.heads * kChunks)), .block = dim3(kMergeThreads), .cluster = kChunks},
         workspace,
         ValueMergeParameters{.merge = merge,
                              .w_uv = args.w_uv.data(),
                              .gate = args.gate.data(),
                              .out = args.out.data(),
                              .head_pitch = args.w_uv.stride(0),
                              .gate_pitch = args.gate.stride(0),
                              .out_pitch = args.out.stride(0),
                              .live = live_rows(args.seq_lens, args.q),
                              .aligned = has_aligned_pairs(args.gate) && has_aligned_pairs(args.out)});
}

}  // namespace dsacore::cuda
