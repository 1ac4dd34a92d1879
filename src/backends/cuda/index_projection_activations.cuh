// The index front's activations, wgmma's right side: tiles of 64 columns, a swizzled line of 128 bytes a token. `load`
// reads a tile of rows, `make` has them in their place, `wait` returns when a chunk may be multiplied. Of the ring of
// weights, `kEarlyStages` may be filled before `load` returns.
#pragma once

#include "backends/cuda/index_projection_place.cuh"

namespace dsacore::cuda {

/// Has the part's chunks of rows `first` and up copied to their tiles, from what `a.activations` describes.
template <class Place>
__device__ __forceinline__ void copy_activations(const FrontArguments& a, const Place& place, int first) {
  using Shape = typename Place::Shape;
  if (place.warpgroup != 0 || !place.first_warp || !elect_one()) return;
#pragma unroll 1
  for (int chunk = 0; chunk < place.chunks(); ++chunk) {
    const Barrier full = place.activations_full(chunk);
    if (chunk % Shape::kCopyChunks == 0) {
      full.expect(uint32_t(min(Shape::kCopyChunks, place.chunks()) * Shape::kActivationTileBytes));
    }
    tensor_copy(place.activation_tile(chunk), a.activations, place.part.first * kNormBlock + chunk * kChunkColumns,
                first, full);
  }
}
template <class Place>
__device__ __forceinline__ void prefetch_activations_map(const FrontArguments& a, const Place& place) {
  if (threadIdx.x != 0) return;
  prefetch_map(a.activations);
  prefetch_box_l2(a.activations, place.part.first * kNormBlock, 0);  // has the address translated in time
}

/// The activations as they are, from q_c.
template <int Tokens, int PartBlocks>
class StoredActivations {
  using Place = FrontPlace<Tokens, PartBlocks>;
  using Shape = typename Place::Shape;

 public:
  static constexpr bool kPacked = false;  ///< from the packed row
  static constexpr int kEarlyStages = Shape::kStages;

  __device__ StoredActivations(const FrontArguments& a, const Place& place) : a_(a), place_(place) {
    prefetch_activations_map(a, place);
  }
  __device__ __forceinline__ void load(int first, int, uint32_t parity) {
    parity_ = parity;
    copy_activations(a_, place_, first);
  }
  __device__ __forceinline__ void make() const {}
  __device__ __forceinline__ void wait(int chunk) const {
    if (chunk % Shape::kCopyChunks == 0) place_.activations_full(chunk).wait(parity_);
  }

 private:
  const FrontArguments& a_;
  const Place& place_;
  uint32_t parity_ = 0;
};

/// Eight values of q_c, where it is asked for: for the query, which comes later.
__device__ __forceinline__ void store_q_c(const FrontArguments& a, int row, int column, const uint4& values) {
  if (a.q_c.data() != nullptr) *reinterpret_cast<uint4*>(a.q_c.row(row) + column) = values;
}

/// The activations by the norm of step 1 from q_a: copied as they are, and normalised in place. A warp has blocks of
/// eight rows, four lanes a row: lane c of them has pieces c and c + 4 (of eight values) of each chunk. The CTAs
/// exchange the blocks' sums of squares. Of q_c each cluster stores some rows.
template <int Tokens, int PartBlocks>
class NormalisedActivations {
  using Place = FrontPlace<Tokens, PartBlocks>;
  using Shape = typename Place::Shape;
  static constexpr int kRowWarps = kFrontWarps / Shape::kEights;                      ///< that share eight rows
  static constexpr int kTurns = (PartBlocks + kRowWarps - 1) / kRowWarps;             ///< blocks of a warp
  static constexpr int kSenders = kRowWarps < kSumsOfPart ? kRowWarps : kSumsOfPart;  ///< of them: the others have none
  static constexpr uint32_t kSentBytes = kTurns == 1 ? 4 : kTurns == 2 ? 8 : 16;
  static_assert(kSenders * kTurns <= kSumsOfPart && kSenders * kTurns >= PartBlocks);

 public:
  static constexpr bool kPacked = true;
  static constexpr int kEarlyStages = Shape::kStages - (Shape::kSumsInRing ? 1 : 0);

  __device__ NormalisedActivations(const FrontArguments& a, const Place& place)
      : a_(a), place_(place), c_(int(threadIdx.x) % 4), share_(int(threadIdx.x) / 32 % kRowWarps) {
    const int quad = int(threadIdx.x) % 32 / 4;
    const int r = quad % 2 * 4 + quad / 2;  // so that two neighbouring quads reach different banks
    row_ = int(threadIdx.x) / 32 / kRowWarps * kEight + r;
    first_piece_ = uint32_t(row_ * kChunkBytes + (c_ ^ r) * 16);
    for (int i = int(threadIdx.x); i < place.part.blocks * kNormBlock / 8; i += kFrontThreads) {
      reinterpret_cast<uint4*>(place.shared + Shape::kNormAt)[i] =
          __ldg(reinterpret_cast<const uint4*>(a.q_norm + place.part.first * kNormBlock) + i);
    }
    if (a.aligned16) prefetch_activations_map(a, place);
    __syncthreads();
  }

  /// Rows `first` to `first + live - 1`: their values and factors.
  __device__ __forceinline__ void load(int first, int live, uint32_t parity) {
    if (a_.aligned16) {
      copy_activations(a_, place_, first);
    } else {
      copy_unaligned(first, live);
    }
    float sums[kSumsOfPart] = {};
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int block = share_ * kTurns + turn;
      if (block >= place_.part.blocks) break;
      place_.activations_full(block * kBlockChunks).wait(parity);
      const float sum = sum_of_block(block);
#pragma unroll
      for (int i = 0; i < kTurns; ++i) sums[i] = i == turn ? sum : sums[i];
    }
    share_sums(sums, live, parity);
    factor_ = factor();
    q_c_row_ = row_ < live && (first + row_) % a_.head_clusters == place_.cluster ? first + row_ : -1;
    if (Shape::kSumsInRing) __syncthreads();  // weights may come
  }

  __device__ __forceinline__ void make() const {
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int block = share_ * kTurns + turn;
      if (block < place_.part.blocks) normalise(block);
    }
    fence_async_proxy();
    __syncthreads();
  }
  __device__ __forceinline__ void wait(int) const {}

 private:
  /// Piece c (+ 4) of this lane's row of a chunk.
  __device__ __forceinline__ uint4* piece(int chunk, int plus4) const {
    return reinterpret_cast<uint4*>(place_.shared + Shape::kActivationsAt + chunk * Shape::kActivationTileBytes +
                                    (first_piece_ ^ uint32_t(plus4 * 64)));
  }
  __device__ __forceinline__ void normalise(int block) const {
    constexpr int kPieces = 2 * kBlockChunks;
    const auto* weights =
        reinterpret_cast<const uint4*>(place_.shared + Shape::kNormAt) + block * (kNormBlock / 8) + c_;
    uint4 values[kPieces], of_norm[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      values[i] = *piece(block * kBlockChunks + i / 2, i % 2);
      of_norm[i] = weights[4 * i];
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      values[i] = normalised(values[i], factor_, of_norm[i]);
      *piece(block * kBlockChunks + i / 2, i % 2) = values[i];
    }
    if (q_c_row_ < 0) return;
    const int column = (place_.part.first + block) * kNormBlock + c_ * 8;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) store_q_c(a_, q_c_row_, column + i * 32, values[i]);
  }

  /// Where the copy engine cannot read: the same tiles, zeros past the last row.
  __device__ __forceinline__ void copy_unaligned(int first, int live) const {
    const int row_pieces = place_.chunks() * 8;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < Tokens * row_pieces; i += kFrontThreads) {
      const int row = i / row_pieces, at = i % row_pieces;
      const uint4 values =
          row < live ? load_bf16x8(a_.projected.row(first + row) + place_.part.first * kNormBlock + at * 8, false)
                     : uint4{};
      *reinterpret_cast<uint4*>(place_.shared + Shape::kActivationsAt + at / 8 * Shape::kActivationTileBytes +
                                row * kChunkBytes + (at % 8 ^ row % 8) * 16) = values;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int chunk = 0; chunk < place_.chunks(); chunk += Shape::kCopyChunks) place_.activations_full(chunk).arrive();
  }

  /// The sum of squares of a block (norm.cuh), in every lane of the row.
  __device__ __forceinline__ float sum_of_block(int block) const {
    const int chunk = block * kBlockChunks;
    float sum = (sum_of_squares(*piece(chunk, 0)) + sum_of_squares(*piece(chunk, 1))) +
                (sum_of_squares(*piece(chunk + 1, 0)) + sum_of_squares(*piece(chunk + 1, 1)));
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
    return sum + __shfl_xor_sync(0xFFFFFFFF, sum, 2);
  }

  /// Has the blocks' sums of the whole rows in shared memory: each of a row's four lanes tells one CTA.
  __device__ __forceinline__ void share_sums(const float (&sums)[kSumsOfPart], int live, uint32_t parity) const {
    const Barrier full = place_.sums_full();
    if (threadIdx.x == 0) full.expect(uint32_t(live * kParts * kSenders) * kSentBytes);
    const int at = (row_ * kParts + int(place_.rank)) * kSumsOfPart + share_ * kTurns;
    const uint32_t there =
        address_in(place_.base + Shape::kBlockSumsAt + uint32_t(at) * uint32_t(sizeof(float)), uint32_t(c_));
    const uint32_t full_there = address_in(full.address, uint32_t(c_));
    if (row_ < live && share_ < kSenders) {
      if constexpr (kTurns == 1) send_to_cluster(there, sums[0], full_there);
      if constexpr (kTurns == 2) send_to_cluster(there, float2{sums[0], sums[1]}, full_there);
      if constexpr (kTurns > 2) send_to_cluster(there, float4{sums[0], sums[1], sums[2], sums[3]}, full_there);
    }
    wait_in_cluster(full, parity);
  }

  /// Of this lane's row, from the blocks' sums from left to right.
  __device__ __forceinline__ float factor() const {
    const auto* sums = reinterpret_cast<const float4*>(place_.shared + Shape::kBlockSumsAt) + row_ * kParts;
    float4 fours[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) fours[part] = sums[part];
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int blocks = part_of(part, a_.row_blocks()).blocks;
      if (blocks > 0) sum += fours[part].x;
      if (blocks > 1) sum += fours[part].y;
      if (blocks > 2) sum += fours[part].z;
      if (blocks > 3) sum += fours[part].w;
    }
    return norm_factor(sum, a_.row_blocks(), a_.eps);
  }

  const FrontArguments& a_;
  const Place& place_;
  int c_;                 ///< lane of the row
  int share_;             ///< which of the warps that share the rows
  int row_;               ///< of the tile
  uint32_t first_piece_;  ///< in a tile
  float factor_ = 0;
  int q_c_row_ = -1;  ///< this lane's row of q_c, where its cluster stores it
};

/// The same of one row: every CTA sums the squares of all of it, a half warp a block, which is shorter than an
/// exchange. The part's values are loaded a second time, eight a thread.
template <int Tokens, int PartBlocks>
class OneRowActivations {
  static_assert(Tokens == kEight);
  using Place = FrontPlace<Tokens, PartBlocks>;
  using Shape = typename Place::Shape;
  static_assert(PartBlocks * kNormBlock / 8 <= kFrontThreads);

 public:
  static constexpr bool kPacked = true;
  static constexpr int kEarlyStages = Shape::kStages;

  __device__ OneRowActivations(const FrontArguments& a, const Place& place) : a_(a), place_(place) {
    if (makes()) weights_ = __ldg(reinterpret_cast<const uint4*>(a.q_norm + column()));
  }

  __device__ __forceinline__ void load(int row, int, uint32_t) {
    const int half_warp = int(threadIdx.x) / 16, lane = int(threadIdx.x) % 16;
    const bool sums = half_warp < a_.row_blocks();
    const BFloat16* packed = a_.projected.row(row);
    const uint4 squared = load_bf16x8(packed + (sums ? half_warp * kNormBlock : 0) + lane * 8, a_.aligned16);
    values_ = load_bf16x8(packed + (makes() ? column() : 0), a_.aligned16);
    const float sum = block_sum(sum_of_squares(squared));
    if (sums && lane == 0) block_sums()[half_warp] = sum;
    __syncthreads();
  }

  __device__ __forceinline__ void make() const {
    if (makes()) {
      const uint4 made =
          normalised(values_, norm_factor<kParts * PartBlocks>(block_sums(), a_.row_blocks(), a_.eps), weights_);
      const int piece = int(threadIdx.x);
      *reinterpret_cast<uint4*>(place_.shared + Shape::kActivationsAt + piece / 8 * Shape::kActivationTileBytes +
                                piece % 8 * 16) = made;
      if (place_.cluster == 0) store_q_c(a_, 0, column(), made);
    }
    fence_async_proxy();
    __syncthreads();
  }
  __device__ __forceinline__ void wait(int) const {}

 private:
  __device__ __forceinline__ bool makes() const { return int(threadIdx.x) < place_.part.blocks * (kNormBlock / 8); }
  __device__ __forceinline__ int column() const { return place_.part.first * kNormBlock + int(threadIdx.x) * 8; }
  __device__ __forceinline__ float* block_sums() const {
    return reinterpret_cast<float*>(place_.shared + Shape::kBlockSumsAt);
  }

  const FrontArguments& a_;
  const Place& place_;
  uint4 weights_, values_;
};

}  // namespace dsacore::cuda
