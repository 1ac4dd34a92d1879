// The index front (steps 6 to 8, and step 1 where it starts from the packed row) as one kernel.
//
// Two numbers first: W_IQ of 32 heads x 128 x 1536 is 12.6 MB, 2.9 us at 4.4 TB/s; 64 rows are 0.8 GFLOP, 1 us. Bytes
// bound it, and the rest is latency: hence all weights (or as many as fit) are requested before the wait for earlier
// kernels, by 128 CTAs at once, in at most 113 KB of shared memory a CTA, so that every cluster has a place and the
// next kernel one beside it.
//
// A cluster of four CTAs computes an index head (128 rows of W_IQ), each CTA over a quarter of the columns:
//   1. the activations of up to `Tokens` rows: from q_c, or normalised from q_a (then the CTAs exchange the blocks'
//   sums of
//      squares, but for 8 tokens, where every CTA reads the whole rows instead: that is shorter than the exchange);
//   2. wgmma, weights as A (64 rows a warpgroup), tokens as N, from a ring of weight tiles of 64 columns;
//   3. every CTA sends its sums to the CTA that finishes the token (token % 4), which adds them in rank order and
//      quantises the head.
// One cluster more inserts the keys. More than 61 heads do not fit at once: then a cluster has two heads in turn.
#pragma once

#include "backends/cuda/index_projection.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"

namespace dsacore::cuda {

inline constexpr int kFrontThreads = 256;
inline constexpr int kFrontWarps = kFrontThreads / 32;
inline constexpr int kFrontShared = 113 * 1024;  ///< two CTAs an SM
inline constexpr int kMostStages = 6;

/// Where things lie in a CTA's shared memory; the ring comes first.
struct FrontPlan {
  int stages;
  uint32_t activations_at;  ///< [chunks][tokens][64] BF16, swizzled
  uint32_t exchange_at;     ///< [ranks][tokens / 4][128] FP32
  uint32_t block_sums_at;   ///< [tokens][blocks of a row] FP32
  uint32_t factors_at;      ///< [tokens] FP32
  uint32_t bytes;
};

/// With many tokens the exchange overlays the ring, which costs a barrier of the cluster.
DSACORE_HD constexpr bool exchange_overlays_ring(int tokens) { return tokens > 32; }

/// With many tokens a thread has no registers for the values of longer rows.
DSACORE_HD constexpr int most_q_lora(int tokens) { return tokens > 32 ? 1536 : kMaxQLora; }

constexpr FrontPlan front_plan(int tokens, int q_lora) {
  const int row_blocks = q_lora / kNormBlock;
  const int chunks = (row_blocks + kParts - 1) / kParts * kBlockChunks;
  const int activations = chunks * tokens * kChunkColumns * int(sizeof(BFloat16));
  const int exchange = exchange_overlays_ring(tokens) ? 0 : tokens * kIndexDim * int(sizeof(float));
  const int block_sums = tokens * row_blocks * int(sizeof(float));
  const int rest = activations + exchange + block_sums + tokens * int(sizeof(float));
  const int room = (kFrontShared - rest) / kTileBytes;
  const int stages = room < chunks ? room : chunks;
  FrontPlan plan = {};
  plan.stages = stages < kMostStages ? stages : kMostStages;
  plan.activations_at = uint32_t(plan.stages * kTileBytes);
  plan.exchange_at = exchange_overlays_ring(tokens) ? 0 : plan.activations_at + uint32_t(activations);
  plan.block_sums_at = plan.activations_at + uint32_t(activations + exchange);
  plan.factors_at = plan.block_sums_at + uint32_t(block_sums);
  plan.bytes = plan.activations_at + uint32_t(rest);
  return plan;
}
static_assert(front_plan(64, most_q_lora(64)).stages * kTileBytes >= 64 * kIndexDim * int(sizeof(float)));
static_assert(front_plan(64, kQLoraStep).stages * kTileBytes >= 64 * kIndexDim * int(sizeof(float)));

struct FrontArguments {
  const BFloat16* w_iq;           ///< [heads*128, q_lora]
  const BFloat16* q_norm;         ///< [q_lora]
  View<const BFloat16, 2> input;  ///< q_c, or the projected rows, which begin with q_a
  bool aligned16;                 ///< all rows of `input`
  View<BFloat16, 2> q_c_out;      ///< or empty
  HeadOutput output;
  KeyInsert keys;
  FrontPlan plan;
  float eps;
  int q_lora, heads, head_clusters, rows;

  DSACORE_HD int row_blocks() const { return q_lora / kNormBlock; }
};

/// The waits of cp.async take constants.
__device__ __forceinline__ void async_wait_open(int open) {
  switch (open) {
    case 0: return async_wait<0>();
    case 1: return async_wait<1>();
    case 2: return async_wait<2>();
    case 3: return async_wait<3>();
    case 4: return async_wait<4>();
    default: return async_wait<kMostStages - 1>();
  }
}

/// A warpgroup's weight tiles, 64 rows of its head each: chunk after chunk of the CTA's columns, head after head, and
/// again for every tile of tokens. One group of cp.async a chunk.
class WeightRing {
 public:
  __device__ WeightRing(const FrontArguments& a, const Part& part, int cluster, uint32_t shared)
      : source_(a.w_iq + int64_t(warpgroup()) * 64 * a.q_lora + int64_t(part.first) * kNormBlock),
        shared_(shared + uint32_t(warpgroup()) * (kTileBytes / 2)),
        pitch_(a.q_lora),
        stages_(a.plan.stages),
        chunks_(part.blocks * kBlockChunks),
        cluster_(cluster),
        heads_(a.heads),
        head_step_(a.head_clusters),
        next_head_(cluster) {}

  static __device__ __forceinline__ int warpgroup() { return int(threadIdx.x) / 128; }
  __device__ __forceinline__ int chunks() const { return chunks_; }
  __device__ __forceinline__ bool may_request(int until) const {
    return requested_ < until && requested_ - taken_ < stages_;
  }

  /// Requests chunks up to `until` in all, as far as stages are free: all but those that `take` has yet to give out.
  __device__ __forceinline__ void request(int until) {
    for (; may_request(until); ++requested_) {
      const BFloat16* from = source_ + int64_t(next_head_) * kIndexDim * pitch_ + next_chunk_ * kChunkColumns;
      copy_tile(stage(requested_), from, pitch_, int(threadIdx.x) % 128);
      async_commit();
      if (++next_chunk_ == chunks_) {
        next_chunk_ = 0;
        next_head_ += head_step_;
        if (next_head_ >= heads_) next_head_ = cluster_;
      }
    }
  }
  /// Waits for this thread's copies of the next chunk.
  __device__ __forceinline__ void wait() const { async_wait_open(requested_ - taken_ - 1); }
  /// The next chunk's tile; its stage counts as free from now on.
  __device__ __forceinline__ uint32_t take() { return stage(taken_++); }

 private:
  __device__ __forceinline__ uint32_t stage(int chunk) const {
    return shared_ + uint32_t(chunk % stages_ * kTileBytes);
  }

  const BFloat16* source_;  ///< of head 0
  uint32_t shared_;
  int pitch_, stages_, chunks_;
  int cluster_, heads_, head_step_;
  int next_head_, next_chunk_ = 0;
  int requested_ = 0, taken_ = 0;
};

/// Asks L2 for the columns of a head that the ring has no room for yet; one warp 16 rows.
__device__ __forceinline__ void prefetch_beyond_ring(const FrontArguments& a, const Part& part, int head) {
  const int chunks = part.blocks * kBlockChunks;
  if (chunks <= a.plan.stages) return;
  const int first = part.first * kNormBlock + a.plan.stages * kChunkColumns;
  const uint32_t bytes = uint32_t((chunks - a.plan.stages) * kChunkColumns) * uint32_t(sizeof(BFloat16));
  const int warp_rows = kIndexDim / kFrontWarps;
  const BFloat16* from = a.w_iq + (int64_t(head) * kIndexDim + int(threadIdx.x) / 32 * warp_rows) * a.q_lora + first;
  if (elect_one()) {
    for (int row = 0; row < warp_rows; ++row) prefetch_l2(from + int64_t(row) * a.q_lora, bytes);
  }
}

/// Brings the activations of a tile of rows into shared memory. Half a warp has a block of a row at a time, always the
/// same block; NormHere: from q_a by the norm of step 1, else from q_c as it is.
template <int Tokens, bool NormHere>
class Activations {
  /// Then every CTA reads whole rows, and not its part alone.
  static constexpr bool kWholeRows = NormHere && Tokens == 8;
  static constexpr int kHalfWarps = kFrontThreads / 16;
  static constexpr int kPartBlocks = (most_q_lora(Tokens) / kNormBlock + kParts - 1) / kParts;
  static constexpr int kRowsATurn = kWholeRows ? 1 : kHalfWarps / kPartBlocks;  // at least
  static constexpr int kTurns = (Tokens + kRowsATurn - 1) / kRowsATurn;
  static_assert(kHalfWarps * kNormBlock == kMaxQLora);

 public:
  __device__ Activations(const FrontArguments& a, const Part& part, int cluster, std::byte* shared)
      : a_(a), cluster_(cluster), shared_(shared) {
    const int blocks = kWholeRows ? a.row_blocks() : part.blocks;
    const int half_warp = int(threadIdx.x) / 16;
    rows_a_turn_ = kHalfWarps / max(blocks, 1);
    first_row_ = half_warp / max(blocks, 1);
    works_ = blocks > 0 && first_row_ < rows_a_turn_;
    block_ = (kWholeRows ? 0 : part.first) + half_warp % max(blocks, 1);
    stored_ = works_ && block_ >= part.first && block_ < part.first + part.blocks;
    chunk_ = (block_ - part.first) * kBlockChunks + lane() / 8;
    if constexpr (NormHere) weight_ = __ldg(reinterpret_cast<const uint4*>(a.q_norm + column()));
  }

  /// Rows `first` to `first + live - 1`. The whole CTA may multiply when it returns.
  __device__ __forceinline__ void load(int first, int live) {
    uint4 values[kTurns];
    const BFloat16* from = a_.input.row(first + first_row_) + column();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn, from += rows_a_turn_ * a_.input.stride(0)) {
      values[turn] = {};
      if (has(turn, live)) values[turn] = load_bf16x8(from, a_.aligned16);
    }
    if constexpr (NormHere) find_factors(values, live);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!stored_ || row(turn) >= live) continue;
      if constexpr (NormHere) {
        values[turn] = normalised(values[turn], factors()[row(turn)], weight_);
        if (cluster_ == turn % kMinIndexHeads)
          keep_q_c(first + row(turn), values[turn]);  // the clusters share the rows
      }
      *reinterpret_cast<uint4*>(shared_ + a_.plan.activations_at + place(row(turn))) = values[turn];
    }
    fence_async_proxy();
    __syncthreads();
  }

 private:
  static __device__ __forceinline__ int lane() { return int(threadIdx.x) % 16; }
  __device__ __forceinline__ int row(int turn) const { return turn * rows_a_turn_ + first_row_; }
  __device__ __forceinline__ bool has(int turn, int live) const { return works_ && row(turn) < live; }
  __device__ __forceinline__ int column() const { return block_ * kNormBlock + lane() * 8; }
  __device__ __forceinline__ uint32_t place(int row) const {
    return uint32_t((chunk_ * Tokens + row) * 128 + (lane() % 8 ^ row % 8) * 16);
  }
  __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(shared_ + a_.plan.factors_at); }

  /// The blocks' sums of squares, in the other CTAs too where these do not read whole rows; then a factor for every
  /// row.
  __device__ __forceinline__ void find_factors(const uint4 (&values)[kTurns], int live) const {
    auto* sums = reinterpret_cast<float*>(shared_ + a_.plan.block_sums_at);
    const int row_blocks = a_.row_blocks();
    const uint32_t sums_there = address_in(shared_address(sums), uint32_t(lane()) % kParts);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn * rows_a_turn_ >= live) break;  // for all threads alike
      const float sum = block_sum(sum_of_squares(values[turn]));
      if (!has(turn, live) || lane() >= (kWholeRows ? 1 : kParts)) continue;
      const int at = row(turn) * row_blocks + block_;
      if constexpr (kWholeRows) {
        sums[at] = sum;
      } else {
        store_in_cluster(sums_there + uint32_t(at) * 4, sum);
      }
    }
    if constexpr (kWholeRows) {
      __syncthreads();
    } else {
      cluster_barrier();
    }
    if (int(threadIdx.x) < live) {
      factors()[threadIdx.x] = norm_factor(sums + int(threadIdx.x) * row_blocks, row_blocks, a_.eps);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void keep_q_c(int row, const uint4& values) const {
    if (!a_.q_c_out.empty()) *reinterpret_cast<uint4*>(a_.q_c_out.row(row) + column()) = values;
  }

  const FrontArguments& a_;
  int cluster_;
  std::byte* shared_;
  int block_, chunk_;  ///< the chunk in shared memory that this lane's values belong to
  int first_row_, rows_a_turn_;
  bool works_;   ///< this half of the warp has a block at all
  bool stored_;  ///< and it belongs to this CTA's part
  uint4 weight_{};
};

/// The sums of this CTA's part for one head, 64 rows of W_IQ a warpgroup. Requests the chunks up to `until` on the way.
template <int Tokens>
__device__ __forceinline__ void multiply_part(float (&sums)[Tokens / 2], WeightRing& ring, uint32_t activations,
                                              int until) {
#pragma unroll
  for (float& sum : sums) sum = 0;
  for (int chunk = 0; chunk < ring.chunks(); ++chunk) {
    ring.wait();
    fence_async_proxy();
    if (ring.may_request(until)) wgmma_wait<0>();
    warpgroup_barrier(1 + WeightRing::warpgroup());
    ring.request(until);  // into the stage of the chunk before, which all four warps have done with
    multiply_chunk<Tokens>(sums, ring.take(), activations + uint32_t(chunk * Tokens * 128), chunk > 0);
  }
  wgmma_wait<0>();
  wgmma_settle(sums);
}

/// Sends the sums of the live tokens to the CTAs that finish them: [rank of the sender][token / 4][128] there.
template <int Tokens>
__device__ __forceinline__ void send_sums(const float (&sums)[Tokens / 2], uint32_t exchange, uint32_t rank, int live) {
  const int thread = int(threadIdx.x), pair = thread % 4;
  const int value = thread / 32 * 16 + thread % 32 / 4;  // of 128, in the head
  const uint32_t at = ((rank * (Tokens / 4) + uint32_t(pair) / 2) * kIndexDim + uint32_t(value)) * 4;
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const uint32_t there = address_in(exchange, uint32_t(2 * pair + odd) % kParts) + at;
#pragma unroll
    for (int eight = 0; eight < Tokens / 8; ++eight) {  // token = 8 eight + 2 pair + odd
      if (8 * eight + 2 * pair + odd >= live) continue;
      store_in_cluster(there + uint32_t(eight * 2 * kIndexDim) * 4, sums[4 * eight + odd]);
      store_in_cluster(there + uint32_t(eight * 2 * kIndexDim + 8) * 4, sums[4 * eight + 2 + odd]);
    }
  }
}

/// The tokens that this CTA finishes, one a warp and turn.
template <int Tokens>
struct OwnTokens {
  static constexpr int kTurns = Tokens / 4 > kFrontWarps ? Tokens / 4 / kFrontWarps : 1;

  static __device__ __forceinline__ int turn_slot(int turn) { return turn * kFrontWarps + int(threadIdx.x) / 32; }
  static __device__ __forceinline__ int token(int turn, uint32_t rank) { return turn_slot(turn) * kParts + int(rank); }
};

template <int Tokens, bool NormHere>
__device__ __forceinline__ void project_heads(const FrontArguments& a, int cluster, std::byte* shared) {
  using Own = OwnTokens<Tokens>;
  constexpr bool kOverlay = exchange_overlays_ring(Tokens);
  const uint32_t rank = cluster_rank();
  const uint32_t base = fixed_shared_address(shared);
  const Part part = part_of(int(rank), a.row_blocks());
  const int lane = int(threadIdx.x) % 32;

  cluster_arrive();
  WeightRing ring(a, part, cluster, base);
  const int heads = (a.heads - cluster + a.head_clusters - 1) / a.head_clusters;  // of this cluster
  const int all_chunks = (a.rows + Tokens - 1) / Tokens * heads * ring.chunks();
  ring.request(kOverlay ? ring.chunks() : all_chunks);
  prefetch_beyond_ring(a, part, cluster);
  Activations<Tokens, NormHere> activations(a, part, cluster, shared);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  cluster_wait();  // the others run: their shared memory may be written

  int pass = 0;
  for (int first = 0; first < a.rows; first += Tokens) {
    const int live = min(Tokens, a.rows - first);
    activations.load(first, live);
    for (int head = cluster; head < a.heads; head += a.head_clusters, ++pass) {
      const int until = kOverlay ? (pass + 1) * ring.chunks() : all_chunks;
      if (kOverlay && pass > 0) {
        __syncthreads();  // the exchange has been read
        ring.request(until);
      }
      float sums[Tokens / 2];
      multiply_part<Tokens>(sums, ring, base + a.plan.activations_at, until);
      if (kOverlay || pass > 0) cluster_barrier();  // the others' exchange is free

      send_sums<Tokens>(sums, base + a.plan.exchange_at, rank, live);
      float wv[Own::kTurns];
#pragma unroll
      for (int turn = 0; turn < Own::kTurns; ++turn) {
        const int token = Own::token(turn, rank);
        wv[turn] = token < live ? a.output.wv(first + token, head) : 0;
      }
      cluster_barrier();
#pragma unroll
      for (int turn = 0; turn < Own::kTurns; ++turn) {
        const int token = Own::token(turn, rank);
        if (token >= live) continue;
        const auto* exchange =
            reinterpret_cast<const float4*>(shared + a.plan.exchange_at) + Own::turn_slot(turn) * 32 + lane;
        float4 sum = exchange[0];
#pragma unroll
        for (int sender = 1; sender < kParts; ++sender) {
          const float4 other = exchange[sender * (Tokens / 4) * 32];
          sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
        }
        a.output.finish(first + token, head, sum, wv[turn], lane);
      }
    }
  }
}

__device__ __forceinline__ void insert_keys(const FrontArguments& a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int warps = kParts * kFrontWarps;
  for (int row = int(cluster_rank()) * kFrontWarps + int(threadIdx.x) / 32; row < a.rows; row += warps) {
    a.keys.insert(row, int(threadIdx.x) % 32);
  }
}

template <int Tokens, bool NormHere>
__global__ void __launch_bounds__(kFrontThreads, 2) index_front(const __grid_constant__ FrontArguments a) {
  extern __shared__ __align__(1024) std::byte shared[];
  const int cluster = int(blockIdx.x) / kParts;
  if (cluster < a.head_clusters) {
    project_heads<Tokens, NormHere>(a, cluster, shared);
  } else {
    insert_keys(a);
  }
}

}  // namespace dsacore::cuda
