// The index front (steps 6 to 8, and step 1 where it starts from the packed row) as one kernel.
//
// Two numbers first: W_IQ of 32 heads x 128 x 1536 is 12.6 MB, 2.9 us at 4.4 TB/s; 64 rows are 0.8 GFLOP, 1 us. Bytes
// bound it, and the rest is latency: hence all weights (or as many as fit) are requested before the wait for earlier
// kernels, by 128 CTAs at once, in at most 113 KB of shared memory a CTA, so that every cluster has a place and the
// next kernel one beside it; and everything that depends on the shape but not on the step is a constant of the
// instance.
//
// A cluster of four CTAs computes an index head (128 rows of W_IQ), each CTA over a quarter of the columns:
//   1. the activations of up to `Tokens` rows: from q_c, or normalised from q_a (then the CTAs exchange the blocks'
//   sums
//      of squares, but for 8 tokens, where every CTA reads the whole rows instead: that is shorter than the exchange);
//   2. wgmma, weights as A (64 rows a warpgroup), tokens as N, from a ring of weight tiles of 64 columns;
//   3. every CTA sends its sums to the CTA that finishes the token (token % 4), which adds them in rank order and
//      quantises the head.
// Further clusters insert the keys. More than 61 heads do not fit at once: then a cluster has two heads in turn.
#pragma once

#include "backends/cuda/index_projection.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/tensor_copy.cuh"

namespace dsacore::cuda {

inline constexpr int kFrontThreads = 256;
inline constexpr int kFrontWarps = kFrontThreads / 32;
inline constexpr int kWarpgroup = 128;
inline constexpr int kWarpgroups = kFrontThreads / kWarpgroup;
inline constexpr int kWarpgroupRows = 64;        ///< of W_IQ
inline constexpr int kFrontShared = 113 * 1024;  ///< two CTAs an SM

/// Constants of an instance: up to `Tokens` rows at a time, parts of up to `PartBlocks` blocks; and where things lie in
/// a CTA's shared memory, the ring first.
template <int Tokens_, int PartBlocks_>
struct FrontShape {
  static constexpr int kTokens = Tokens_, kPartBlocks = PartBlocks_;
  static constexpr int kChunks = kPartBlocks * kBlockChunks;
  static constexpr int kRankTokens = kTokens / kParts;  ///< that a CTA finishes
  /// With many tokens the exchange overlays the ring, which costs a barrier of the cluster.
  static constexpr bool kOverlay = kTokens > 32;

  static constexpr int kHalfTileBytes = kWarpgroupRows * kChunkBytes;  ///< a warpgroup's
  static constexpr int kTileBytes = kWarpgroups * kHalfTileBytes;
  static constexpr int kActivationTileBytes = kTokens * kChunkBytes;
  static constexpr int kActivationBytes = kChunks * kActivationTileBytes;
  static constexpr int kExchangeBytes = kTokens * kIndexDim * int(sizeof(float));
  static constexpr int kFactorBytes = kTokens * int(sizeof(float));
  static constexpr int kBarriers = kWarpgroups * kPartBlocks + 3;
  static constexpr int kRest =
      kActivationBytes + (kOverlay ? 0 : kExchangeBytes) + kFactorBytes + kBarriers * int(sizeof(uint64_t));
  static constexpr int kRoom = (kFrontShared - kRest) / kTileBytes;
  static constexpr int kStages = kRoom < kChunks ? kRoom : kChunks;

  static constexpr uint32_t kActivationsAt = kStages * kTileBytes;  ///< [chunks][tokens][64] BF16, swizzled
  /// [row][blocks of the longest row] FP32, in the place of the activations until these are written
  static constexpr uint32_t kBlockSumsAt = kActivationsAt;
  static constexpr uint32_t kExchangeAt =
      kOverlay ? 0 : kActivationsAt + kActivationBytes;  ///< [rank][token / 4][128] FP32
  static constexpr uint32_t kFactorsAt = kActivationsAt + kActivationBytes + (kOverlay ? 0 : kExchangeBytes);
  static constexpr uint32_t kBarriersAt = kFactorsAt + kFactorBytes;
  static constexpr uint32_t kBytes = kBarriersAt + kBarriers * uint32_t(sizeof(uint64_t));

  /// Chunks requested by the time a block is waited for: the ring, then the places of the blocks before the last one.
  DSACORE_HD static constexpr int requested(int block) {
    const int chunks = kStages + (block > 0 ? (block - 1) * kBlockChunks : 0);
    return chunks < kChunks ? chunks : kChunks;
  }
  static_assert(kStages == kChunks || kStages >= 2 * kBlockChunks, "the next block must be under way");
  static_assert(!kOverlay || kStages * kTileBytes >= kExchangeBytes);
  static_assert(kTokens * kParts * kPartBlocks * int(sizeof(float)) <= kActivationBytes);
  static_assert(kBytes <= kFrontShared);
};

struct FrontArguments {
  CUtensorMap weights;  ///< W_IQ in boxes of 64 rows x 64 columns
  CUtensorMap q_c;      ///< in boxes of `Tokens` rows x 64 columns; not where the kernel normalises q_a
  View<const BFloat16, 2> projected;
  bool aligned16;             ///< the projected rows
  const BFloat16* q_norm;     ///< [q_lora]
  View<BFloat16, 2> q_c_out;  ///< or empty
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
        warpgroup(__shfl_sync(0xFFFFFFFF, int(threadIdx.x) / kWarpgroup, 0)),
        first_warp(__shfl_sync(0xFFFFFFFF, int(threadIdx.x) % kWarpgroup / 32, 0) == 0),
        part(part_of(int(rank), a.row_blocks())) {}

  __device__ __forceinline__ int chunks() const { return part.blocks * kBlockChunks; }
  __device__ __forceinline__ Barrier barrier(int i) const { return {base + Shape::kBarriersAt + uint32_t(i) * 8}; }
  __device__ __forceinline__ Barrier weights_full(int block) const { return barrier(warpgroup * PartBlocks + block); }
  __device__ __forceinline__ Barrier activations_full() const { return barrier(kWarpgroups * PartBlocks); }
  __device__ __forceinline__ Barrier sums_full() const { return barrier(kWarpgroups * PartBlocks + 1); }
  __device__ __forceinline__ Barrier exchange_full() const { return barrier(kWarpgroups * PartBlocks + 2); }
  __device__ __forceinline__ uint32_t weight_tile(int chunk) const {
    return base + uint32_t(chunk % Shape::kStages * Shape::kTileBytes + warpgroup * Shape::kHalfTileBytes);
  }
  __device__ __forceinline__ uint32_t activation_tile(int chunk) const {
    return base + Shape::kActivationsAt + uint32_t(chunk * Shape::kActivationTileBytes);
  }
  /// The tokens of `live` that this CTA finishes.
  __device__ __forceinline__ int own_tokens(int live) const { return (live - int(rank) + kParts - 1) / kParts; }

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
      const Barrier full = weights_full(chunk / kBlockChunks);
      if (chunk % kBlockChunks == 0) full.expect(kBlockChunks * Shape::kHalfTileBytes);
      tensor_copy(weight_tile(chunk), a.weights, part.first * kNormBlock + chunk * kChunkColumns,
                  head * kIndexDim + warpgroup * kWarpgroupRows, full);
    }
  }
  /// Asks L2 for the chunks that the ring has no room for yet. One thread of the warpgroup.
  __device__ __forceinline__ void prefetch_weights(const FrontArguments& a, int head) const {
#pragma unroll
    for (int chunk = Shape::kStages; chunk < Shape::kChunks; ++chunk) {
      if (chunk >= chunks()) return;
      prefetch_box_l2(a.weights, part.first * kNormBlock + chunk * kChunkColumns,
                      head * kIndexDim + warpgroup * kWarpgroupRows);
    }
  }
};

/// The activations as they are, from q_c.
template <int Tokens, int PartBlocks>
class StoredActivations {
  using Place = FrontPlace<Tokens, PartBlocks>;

 public:
  __device__ StoredActivations(const FrontArguments& a, const Place& place) : a_(a), place_(place) {
    if (threadIdx.x == 0) {
      prefetch_map(a.q_c);
      prefetch_box_l2(a.q_c, place.part.first * kNormBlock, 0);  // has the address translated in time
    }
  }

  /// Rows `first` and up. The CTA may multiply when it returns.
  __device__ __forceinline__ void load(int first, int, uint32_t parity) const {
    const Barrier full = place_.activations_full();
    if (place_.warpgroup == 0 && place_.first_warp && elect_one()) {
      full.expect(uint32_t(place_.chunks() * Place::Shape::kActivationTileBytes));
#pragma unroll
      for (int chunk = 0; chunk < Place::Shape::kChunks; ++chunk) {
        if (chunk >= place_.chunks()) break;
        tensor_copy(place_.activation_tile(chunk), a_.q_c, place_.part.first * kNormBlock + chunk * kChunkColumns,
                    first, full);
      }
    }
    full.wait(parity);
  }

 private:
  const FrontArguments& a_;
  const Place& place_;
};

/// The activations by the norm of step 1 from q_a. Half a warp has a block of a row at a time, always the same block.
template <int Tokens, int PartBlocks>
class NormalisedActivations {
  using Place = FrontPlace<Tokens, PartBlocks>;
  using Shape = typename Place::Shape;
  /// Every CTA reads whole rows, and not its part alone.
  static constexpr bool kWholeRows = Tokens == 8;
  static constexpr int kHalfWarps = kFrontThreads / 16;
  static constexpr int kSumsPitch = kParts * PartBlocks;                         ///< floats of a row
  static constexpr int kBlocks = kWholeRows ? kParts * PartBlocks : PartBlocks;  ///< side by side
  static constexpr int kRows = kHalfWarps / kBlocks;                             ///< at a time
  static constexpr int kTurns = (Tokens + kRows - 1) / kRows;

 public:
  __device__ NormalisedActivations(const FrontArguments& a, const Place& place)
      : a_(a), place_(place), lane_(int(threadIdx.x) % 16), row_(int(threadIdx.x) / 16 / kBlocks) {
    const int begin = kWholeRows ? 0 : place.part.first, blocks = kWholeRows ? a.row_blocks() : place.part.blocks;
    const int at = int(threadIdx.x) / 16 % kBlocks;
    works_ = row_ < kRows && at < blocks;
    block_ = begin + at;
    const int own = block_ - place.part.first;
    stored_ = works_ && own >= 0 && own < place.part.blocks;
    tile_ = Shape::kActivationsAt + uint32_t((own * kBlockChunks + lane_ / 8) * Shape::kActivationTileBytes);
    if (stored_) weight_ = __ldg(reinterpret_cast<const uint4*>(a.q_norm + column()));
  }

  /// Rows `first` to `first + live - 1`. The CTA may multiply when it returns.
  __device__ __forceinline__ void load(int first, int live, uint32_t parity) const {
    uint4 values[kTurns] = {};
    const BFloat16* from = a_.projected.row(first + row_) + column();
    const int64_t step = kRows * a_.projected.stride(0);
    if (a_.aligned16) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        if (has(turn, live)) values[turn] = *reinterpret_cast<const uint4*>(from + turn * step);
      }
    } else {
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        const uint4 loaded = has(turn, live) ? load_bf16x8(from + turn * step, false) : uint4{};
#pragma unroll
        for (int i = 0; i < kTurns; ++i) values[i] = i == turn ? loaded : values[i];
      }
    }
    find_factors(values, live, parity);
    const auto* factors = reinterpret_cast<const float*>(place_.shared + Shape::kFactorsAt);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn * kRows >= live) break;  // for all threads alike
      if (!stored_ || row(turn) >= live) continue;
      const uint4 result = normalised(values[turn], factors[row(turn)], weight_);
      *reinterpret_cast<uint4*>(place_.shared + tile_ + row(turn) * kChunkBytes + (lane_ % 8 ^ row(turn) % 8) * 16) =
          result;
      // q_c goes to memory once: the clusters share the rows.
      if (place_.cluster == turn % kMinIndexHeads && !a_.q_c_out.empty()) {
        *reinterpret_cast<uint4*>(a_.q_c_out.row(first + row(turn)) + column()) = result;
      }
    }
    fence_async_proxy();
    __syncthreads();
  }

 private:
  __device__ __forceinline__ int row(int turn) const { return turn * kRows + row_; }
  __device__ __forceinline__ bool has(int turn, int live) const { return works_ && row(turn) < live; }
  __device__ __forceinline__ int column() const { return block_ * kNormBlock + lane_ * 8; }

  /// The blocks' sums of squares, in the other CTAs too where these do not read whole rows; then a factor for every
  /// row.
  __device__ __forceinline__ void find_factors(const uint4 (&values)[kTurns], int live, uint32_t parity) const {
    auto* sums = reinterpret_cast<float*>(place_.shared + Shape::kBlockSumsAt);
    const uint32_t there = uint32_t(lane_) % kParts;  // each of four lanes tells one CTA
    const uint32_t sums_there = address_in(place_.base + Shape::kBlockSumsAt, there);
    const uint32_t full_there = address_in(place_.sums_full().address, there);
    if (!kWholeRows && threadIdx.x == 0) place_.sums_full().expect(uint32_t(live * a_.row_blocks()) * sizeof(float));
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn * kRows >= live) break;  // for all threads alike
      const float sum = block_sum(sum_of_squares(values[turn]));
      const int at = row(turn) * kSumsPitch + block_;
      if (kWholeRows) {
        if (has(turn, live) && lane_ == 0) sums[at] = sum;
      } else {
        if (has(turn, live) && lane_ < kParts) send_to_cluster(sums_there + uint32_t(at) * 4, sum, full_there);
      }
    }
    if (kWholeRows) {
      __syncthreads();
    } else {
      wait_in_cluster(place_.sums_full(), parity);
    }
    if (int(threadIdx.x) < live) {
      const float factor = norm_factor<kSumsPitch>(sums + int(threadIdx.x) * kSumsPitch, a_.row_blocks(), a_.eps);
      reinterpret_cast<float*>(place_.shared + Shape::kFactorsAt)[threadIdx.x] = factor;
    }
    __syncthreads();
  }

  const FrontArguments& a_;
  const Place& place_;
  int lane_, row_;
  int block_;
  uint32_t tile_;  ///< of the chunk that this lane's values belong to
  bool works_;     ///< this half of the warp has a block at all
  bool stored_;    ///< and it belongs to this CTA's part
  uint4 weight_{};
};

/// The sums of this CTA's part for one head, 64 rows of W_IQ a warpgroup. Requests what the ring had no room for.
template <int Tokens, int PartBlocks>
__device__ __forceinline__ void multiply_part(float (&sums)[Tokens / 2], const FrontArguments& a,
                                              const FrontPlace<Tokens, PartBlocks>& place, int head, uint32_t parity) {
  using Shape = FrontShape<Tokens, PartBlocks>;
#pragma unroll
  for (float& sum : sums) sum = 0;
#pragma unroll
  for (int block = 0; block < PartBlocks; ++block) {
    if (block >= place.part.blocks) break;
    place.weights_full(block).wait(parity);
    if (block > 0 && Shape::requested(block) < Shape::requested(block + 1)) {
      wgmma_wait<0>();
      barrier_meet(1 + place.warpgroup, kWarpgroup);  // all four warps have done with the block before
      if (place.first_warp && elect_one()) {
        place.request_weights(a, head, Shape::requested(block), Shape::requested(block + 1));
      }
    }
#pragma unroll
    for (int i = 0; i < kBlockChunks; ++i) {
      const int chunk = block * kBlockChunks + i;
      multiply_chunk<Tokens>(sums, place.weight_tile(chunk), place.activation_tile(chunk), chunk > 0);
    }
  }
  wgmma_wait<0>();
  wgmma_settle(sums);
}

/// Sends the sums of the live tokens to the CTAs that finish them: [rank of the sender][token / 4][128] there, four
/// values of a token at a time. Of the four lanes with the same tokens and neighbouring values, each gets one (row
/// half, token).
template <int Tokens, int PartBlocks>
__device__ __forceinline__ void send_sums(const float (&sums)[Tokens / 2], const FrontPlace<Tokens, PartBlocks>& place,
                                          int live) {
  using Shape = FrontShape<Tokens, PartBlocks>;
  const int lane = int(threadIdx.x) % 32, pair = lane % 4;
  const bool odd = lane & 4, lower = lane & 8;
  const int value = int(threadIdx.x) / 32 * 16 + (lower ? 8 : 0) + lane / 16 * 4;  // of 128, in the head
  const int token = 2 * pair + (odd ? 1 : 0);                                      // of 8
  const uint32_t to_rank = uint32_t(token) % kParts;
  const uint32_t at = ((place.rank * Shape::kRankTokens + uint32_t(token) / kParts) * kIndexDim + uint32_t(value)) * 4;
  const uint32_t there = address_in(place.base + Shape::kExchangeAt, to_rank) + at;
  const uint32_t full = address_in(place.exchange_full().address, to_rank);
#pragma unroll
  for (int eight = 0; eight < Tokens / 8; ++eight) {
    if (8 * eight >= live) break;
    const float* d = sums + 4 * eight;  // rows +0: even and odd token; rows +8: even and odd token
    const float upper_got = __shfl_xor_sync(0xFFFFFFFF, odd ? d[0] : d[1], 4);
    const float lower_got = __shfl_xor_sync(0xFFFFFFFF, odd ? d[2] : d[3], 4);
    const float2 upper = odd ? float2{upper_got, d[1]} : float2{d[0], upper_got};
    const float2 lower_rows = odd ? float2{lower_got, d[3]} : float2{d[2], lower_got};
    const float2 keep = lower ? lower_rows : upper, give = lower ? upper : lower_rows;
    const float2 got = {__shfl_xor_sync(0xFFFFFFFF, give.x, 8), __shfl_xor_sync(0xFFFFFFFF, give.y, 8)};
    const float2 low = lower ? got : keep, high = lower ? keep : got;
    if (8 * eight + token >= live) continue;
    send_to_cluster(there + uint32_t(eight * 2 * kIndexDim) * 4, float4{low.x, low.y, high.x, high.y}, full);
  }
}

/// Adds the four parts of the tokens that this CTA finishes, one a warp and turn, and quantises the head.
template <int Tokens, int PartBlocks>
class Finish {
  using Shape = FrontShape<Tokens, PartBlocks>;
  static constexpr int kTurns = (Shape::kRankTokens + kFrontWarps - 1) / kFrontWarps;

 public:
  __device__ Finish(const FrontArguments& a, const FrontPlace<Tokens, PartBlocks>& place, int first, int live, int head)
      : a_(a), place_(place), first_(first), live_(live), head_(head) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      wv_[turn] = token(turn) < live ? a.output.wv(first + token(turn), head) : BFloat16{};
    }
  }

  __device__ __forceinline__ void run() const {
    const int lane = int(threadIdx.x) % 32;
    const auto* exchange = reinterpret_cast<const float4*>(place_.shared + Shape::kExchangeAt) + lane;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (token(turn) >= live_) continue;
      float4 sum = exchange[slot(turn) * 32];
#pragma unroll
      for (int sender = 1; sender < kParts; ++sender) {
        const float4 other = exchange[(sender * Shape::kRankTokens + slot(turn)) * 32];
        sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
      }
      a_.output.finish(first_ + token(turn), head_, sum, wv_[turn], lane);
    }
  }

 private:
  static __device__ __forceinline__ int slot(int turn) { return turn * kFrontWarps + int(threadIdx.x) / 32; }
  __device__ __forceinline__ int token(int turn) const { return slot(turn) * kParts + int(place_.rank); }

  const FrontArguments& a_;
  const FrontPlace<Tokens, PartBlocks>& place_;
  int first_, live_, head_;
  BFloat16 wv_[kTurns];
};

template <int Tokens, int PartBlocks, template <int, int> class Activations>
__device__ __forceinline__ void project_heads(const FrontArguments& a, std::byte* shared) {
  using Shape = FrontShape<Tokens, PartBlocks>;
  const FrontPlace<Tokens, PartBlocks> place(a, shared);
  place.init_barriers();
  cluster_arrive_relaxed();
  if (place.first_warp && elect_one()) {
    place.request_weights(a, place.cluster, 0, Shape::kStages);
    place.prefetch_weights(a, place.cluster);
  }
  const Activations<Tokens, PartBlocks> activations(a, place);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  cluster_wait();  // the others run: their shared memory may be written

  uint32_t tile = 0, pass = 0;
  for (int first = 0; first < a.rows; first += Tokens, ++tile) {
    const int live = min(Tokens, a.rows - first);
    activations.load(first, live, tile & 1);
    for (int head = place.cluster; head < a.heads; head += a.head_clusters, ++pass) {
      const Finish<Tokens, PartBlocks> finish(a, place, first, live, head);
      if (threadIdx.x == 0 && place.own_tokens(live) > 0) {
        place.exchange_full().expect(uint32_t(place.own_tokens(live) * kParts * kIndexDim) * sizeof(float));
      }
      float sums[Tokens / 2];
      multiply_part<Tokens, PartBlocks>(sums, a, place, head, pass & 1);
      if (Shape::kOverlay || pass > 0) {  // the others' exchange must be free
        cluster_arrive_relaxed();
        cluster_wait();
      }
      send_sums<Tokens, PartBlocks>(sums, place, live);
      if (place.own_tokens(live) > 0) wait_in_cluster(place.exchange_full(), pass & 1);
      finish.run();

      const int next = head + a.head_clusters < a.heads ? head + a.head_clusters : place.cluster;
      if (next != place.cluster || first + Tokens < a.rows) {
        __syncthreads();  // the exchange has been read, and all warps have done with the weights
        if (place.first_warp && elect_one()) {
          place.request_weights(a, next, 0, Shape::kStages);
          place.prefetch_weights(a, next);
        }
      }
    }
  }
}

__device__ __forceinline__ void insert_keys(const FrontArguments& a) {
  const int lane = int(threadIdx.x) % 32;
  const KeyInsert::Norm norm = a.keys.norm(lane);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int block = int(blockIdx.x) - a.head_clusters * kParts;
  const int step = a.key_clusters * kParts * kFrontWarps;
  for (int row = block * kFrontWarps + int(threadIdx.x) / 32; row < a.rows; row += step) a.keys.insert(row, norm, lane);
}

template <int Tokens, int PartBlocks, template <int, int> class Activations>
__global__ void __launch_bounds__(kFrontThreads, 2) index_front(const __grid_constant__ FrontArguments a) {
  extern __shared__ __align__(1024) std::byte shared[];
  if (int(blockIdx.x) < a.head_clusters * kParts) {
    project_heads<Tokens, PartBlocks, Activations>(a, shared);
  } else {
    insert_keys(a);
  }
}

}  // namespace dsacore::cuda
