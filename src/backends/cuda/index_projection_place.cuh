// The index front's constants, arguments, and where a CTA stands: its part of a head, its shared memory, its weights.
#pragma once

#include "backends/cuda/index_projection.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/tensor_copy.cuh"
#include "backends/cuda/uniform.cuh"

namespace dsacore::cuda {

inline constexpr int kFrontThreads = 256;
inline constexpr int kFrontWarps = kFrontThreads / 32;
inline constexpr int kWarpgroup = 128;
inline constexpr int kWarpgroups = kFrontThreads / kWarpgroup;
inline constexpr int kWarpgroupRows = 64;  ///< of W_IQ
inline constexpr int kSumsOfPart = 4;      ///< of the blocks' squares: room for the longest part
inline constexpr int kEight = 8;           ///< tokens that are handled together: columns of a product's fragment

/// Constants of an instance: up to `Tokens` rows at a time, parts of up to `PartBlocks` blocks; and where things lie in
/// a CTA's shared memory, the ring first.
template <int Tokens_, int PartBlocks_>
struct FrontShape {
  static constexpr int kTokens = Tokens_, kPartBlocks = PartBlocks_;
  static constexpr int kEights = kTokens / kEight;
  static constexpr int kChunks = kPartBlocks * kBlockChunks;
  static constexpr int kCopyChunks = kTokens > 16 ? kBlockChunks : kChunks;  ///< of activations, on one barrier
  /// With more than 8 tokens the inbox overlays the ring, which costs a barrier of the cluster.
  static constexpr bool kOverlay = kTokens > kEight;

  /// A CTA finishes whole eights of tokens, or a pair of tokens of every eight where there are fewer eights than CTAs.
  static constexpr bool kWholeEights = kEights >= kParts;
  static constexpr int kTurns = kWholeEights ? kEights / kParts : kEights;  ///< eights of which a CTA finishes tokens
  static constexpr int kSenderLanes = kWholeEights ? 32 : 8;                ///< of a warp to a CTA and turn
  static constexpr int kTurnBytes = kSenderLanes * int(sizeof(float4));     ///< of a warp
  static constexpr int kMessageBytes = kFrontWarps * kTurns * kTurnBytes;   ///< of a CTA to another
  static constexpr int kInboxBytes = (kParts - 1) * kMessageBytes;
  static constexpr int kMaximaBytes = kTurns * kEight * kFrontWarps * int(sizeof(float));
  static constexpr int kExchangeBytes = kInboxBytes + kMaximaBytes;

  static constexpr int kHalfTileBytes = kWarpgroupRows * kChunkBytes;  ///< a warpgroup's
  static constexpr int kTileBytes = kWarpgroups * kHalfTileBytes;
  static constexpr int kActivationTileBytes = kTokens * kChunkBytes;
  static constexpr int kActivationBytes = kChunks * kActivationTileBytes;
  static constexpr int kNormBytes = kPartBlocks * kNormBlock * int(sizeof(BFloat16));
  static constexpr int kBlockSumsBytes = kTokens * kParts * kSumsOfPart * int(sizeof(float));
  static constexpr int kBarriers = kWarpgroups * kChunks + kChunks / kCopyChunks + 2;
  /// The blocks' sums of the longest tiles have their place in the ring's last stage, which is requested when they
  /// have been read.
  static constexpr bool kSumsInRing = kTokens > 32;
  static constexpr int kRest = kActivationBytes + (kOverlay ? 0 : kExchangeBytes) + kNormBytes +
                               (kSumsInRing ? 0 : kBlockSumsBytes) + kBarriers * int(sizeof(uint64_t));
  static constexpr int kRoom = (kHalfOfShared - kRest) / kTileBytes;
  static constexpr int kStages = kRoom < kChunks ? kRoom : kChunks;
  /// Chunks that complete on one barrier: what is requested in two pieces has two.
  static constexpr int kBarrierChunks = kStages == kChunks ? kBlockChunks : 1;

  static constexpr uint32_t kActivationsAt = kStages * kTileBytes;  ///< [chunks][tokens][64] BF16, swizzled
  /// [sender ^ rank, from 1][warp][turn][lane] float4, then [turn][token of 8][warp] FP32: the warps' largest
  /// magnitudes.
  static constexpr uint32_t kInboxAt =
      kOverlay ? (kChunks - kStages) % kStages * kTileBytes : kActivationsAt + kActivationBytes;
  static constexpr uint32_t kMaximaAt = kInboxAt + kInboxBytes;
  static constexpr uint32_t kNormAt = kActivationsAt + kActivationBytes + (kOverlay ? 0 : kExchangeBytes);
  /// [row][part][4] FP32
  static constexpr uint32_t kBlockSumsAt = kSumsInRing ? kStages * kTileBytes - kBlockSumsBytes : kNormAt + kNormBytes;
  static constexpr uint32_t kBarriersAt = kNormAt + kNormBytes + (kSumsInRing ? 0 : kBlockSumsBytes);
  static constexpr uint32_t kBytes = kBarriersAt + kBarriers * uint32_t(sizeof(uint64_t));

  static_assert(kStages == kChunks || kStages >= 3, "the next chunk must be under way");
  /// The inbox lies in tiles that are read no more when the last chunk but two has been multiplied.
  static_assert(!kOverlay || kInboxAt + kExchangeBytes <= kStages * kTileBytes);
  static_assert(!kOverlay || (kChunks - kStages) + (kExchangeBytes + kTileBytes - 1) / kTileBytes <= kChunks - 2);
  static_assert(!kSumsInRing || kInboxAt + kExchangeBytes <= kBlockSumsAt, "sums may come while the inbox is read");
  static_assert(kPartBlocks <= kSumsOfPart && kChunks <= 2 * kStages);
  static_assert(kBytes <= kHalfOfShared);
};

struct FrontArguments {
  CUtensorMap weights;      ///< W_IQ in boxes of 64 rows x 64 columns
  CUtensorMap activations;  ///< q_c or the packed rows, where aligned, in boxes of `Tokens` rows x 64 columns
  View<const BFloat16, 2> projected;
  bool aligned16;          ///< the projected rows
  const BFloat16* q_norm;  ///< [q_lora]
  View<BFloat16, 2> q_c;   ///< out [rows, q_lora]; empty: not asked for
  HeadOutput output;
  KeyInsert keys;
  float eps;
  int q_lora, heads, head_clusters, key_clusters, rows;

  DSACORE_HD int row_blocks() const { return q_lora / kNormBlock; }
};

/// A CTA of a cluster that projects heads.
template <int Tokens, int PartBlocks>
struct FrontPlace {
  using Shape = FrontShape<Tokens, PartBlocks>;

  std::byte* shared;
  uint32_t base;  ///< of shared memory
  uint32_t rank;
  int cluster;
  int warpgroup;
  bool first_warp;  ///< of the warpgroup: its elected lane requests weights
  Part part;

  __device__ FrontPlace(const FrontArguments& a, std::byte* memory)
      : shared(memory),
        base(shared_address(memory)),
        rank(cluster_rank()),
        cluster(int(blockIdx.x) / kParts),
        warpgroup(uniform(int(threadIdx.x) / kWarpgroup)),
        first_warp(uniform(int(threadIdx.x) % kWarpgroup / 32) == 0),
        part(part_of(int(rank), a.row_blocks())) {}

  __device__ __forceinline__ int chunks() const { return part.blocks * kBlockChunks; }
  __device__ __forceinline__ Barrier barrier(int i) const { return {base + Shape::kBarriersAt + uint32_t(i) * 8}; }
  __device__ __forceinline__ Barrier weights_full(int chunk) const {
    return barrier(warpgroup * Shape::kChunks + chunk / Shape::kBarrierChunks);
  }
  __device__ __forceinline__ Barrier activations_full(int chunk) const {
    return barrier(kWarpgroups * Shape::kChunks + chunk / Shape::kCopyChunks);
  }
  __device__ __forceinline__ Barrier sums_full() const { return barrier(Shape::kBarriers - 2); }
  __device__ __forceinline__ Barrier inbox_full() const { return barrier(Shape::kBarriers - 1); }
  __device__ __forceinline__ uint32_t weight_tile(int chunk) const {
    const int stage = chunk < Shape::kStages ? chunk : chunk - Shape::kStages;
    return base + uint32_t(stage * Shape::kTileBytes + warpgroup * Shape::kHalfTileBytes);
  }
  __device__ __forceinline__ uint32_t activation_tile(int chunk) const {
    return base + Shape::kActivationsAt + uint32_t(chunk * Shape::kActivationTileBytes);
  }

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Shape::kBarriers; ++i) barrier(i).init(1);
      publish_barriers();
    }
    __syncthreads();
  }

  /// Requests the warpgroup's tiles of chunks `begin` to `end - 1` of a head. One thread of the warpgroup.
  __device__ __forceinline__ void request_weights(const FrontArguments& a, int head, int begin, int end) const {
#pragma unroll
    for (int chunk = begin; chunk < end; ++chunk) {
      if (chunk >= chunks()) return;
      const Barrier full = weights_full(chunk);
      if (chunk % Shape::kBarrierChunks == 0) full.expect(Shape::kBarrierChunks * Shape::kHalfTileBytes);
      tensor_copy_once(weight_tile(chunk), a.weights, part.first * kNormBlock + chunk * kChunkColumns,
                       head * kIndexDim + warpgroup * kWarpgroupRows, full);
    }
  }
  /// Asks L2 for the chunks from `begin` on, which the ring has no room for yet. One thread of the warpgroup.
  __device__ __forceinline__ void prefetch_weights(const FrontArguments& a, int head, int begin) const {
#pragma unroll
    for (int chunk = begin; chunk < Shape::kChunks; ++chunk) {
      if (chunk >= chunks()) return;
      prefetch_box_l2(a.weights, part.first * kNormBlock + chunk * kChunkColumns,
                      head * kIndexDim + warpgroup * kWarpgroupRows);
    }
  }
};

}  // namespace dsacore::cuda
