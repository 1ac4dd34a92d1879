// query_stream: steps 2 to 4 of spec 4 from q_c, for any number of heads and rows. One CTA takes one head, or three
// CTAs of a cluster where heads are few.
//
//   W_QB, q_c -> ring in shared memory -> wgmma -> x -> nope tile in shared memory, pe to the query row
//   W_UK      -> the same ring         -> wgmma with the nope tile -> query row
//
// Three warpgroups, of one CTA or of three, have 64 of the head's 192 rows of W_QB each, then two or three of the eight
// 64-wide parts of the latent; weights are wgmma's A, tokens N. One more warp fills the ring by tensor maps, weights
// before the wait for earlier kernels.
//
// Bound by bytes where heads are many: at 96 heads and q_lora 1536 69 MB of weights, 15.4 us at 4.5 TB/s (boxes by
// copies alone: 17), against 5.7 us of wgmma at 64 rows; above 128 rows the weights are read again. Where they are few,
// by what an SM takes from L2, about 50 bytes a clock: at 12 heads and 64 rows 437 KB of weights and q_c a CTA. More
// rows are divided among clusters there.
#include <algorithm>
#include <array>

#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/tensor_copy.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/query_rows.cuh"
#include "backends/cuda/tensor_map.h"
#include "backends/cuda/uniform.cuh"

namespace dsacore::cuda::query {
namespace {

constexpr int kParties = 3;  // warpgroups of a head
constexpr int kChunk = kBoxColumns;
constexpr int kPart = 64;  // rows of a warpgroup: wgmma's M
constexpr int kParts = kLatent / kPart;
constexpr int kLineBytes = 128;                     // of 64 values, swizzled
constexpr int kPartBytes = kNope * kLineBytes;      // 64 columns of W_UK
constexpr int kNopeReady = 1, kNopeFree = 2;        // named barriers
constexpr int kMoreThanHalf = kHalfOfShared + 128;  // two such CTAs find no room

struct StreamMaps {
  CUtensorMap w_qb, w_uk, q_c;
};

/// N tokens at once, `Ctas` CTAs a head. A CTA takes at most half of an SM, beside another one or one of the indexer.
template <int N, int Ctas>
struct StreamShape {
  static constexpr int kCtasAnSm = N <= 64 ? 2 : 1;  // there is no room for more tokens
  static constexpr int kGroups = kParties / Ctas;    // warpgroups of a CTA
  static constexpr int kMathThreads = kGroups * 128;
  static constexpr int kThreads = kMathThreads + 32;
  static constexpr int kWeightRows = kGroups * kPart;
  static constexpr int kWeightBytes = kWeightRows * kLineBytes;
  static constexpr int kTokenBytes = N * kLineBytes;
  static constexpr int kStageBytes =
      (kWeightBytes + kTokenBytes > kPartBytes ? kWeightBytes + kTokenBytes : kPartBytes);
  static constexpr int kNopeBytes = kNope / kChunk * kTokenBytes;
  static constexpr int kRoom = 224 / kCtasAnSm * 1024 - kNopeBytes;
  /// Whole heads beside the indexer ask for no more at once than keeps DRAM busy: it delays every load of theirs.
  static constexpr int kMostStages = Ctas == 1 && kCtasAnSm > 1 ? 3 : 12;
  static constexpr int kStages = kRoom / kStageBytes < kMostStages ? kRoom / kStageBytes : kMostStages;
  static_assert(kStages >= 3);
  static constexpr int kNopeAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kNopeAt + kNopeBytes;
  static constexpr int kUsedBytes = kBarriersAt + (2 * kStages + 2) * 8;
  /// CTAs of whole heads ask for so much that no two of them share an SM: the copy engine would bound them.
  static constexpr int kSharedBytes = Ctas == 1 && kUsedBytes < kMoreThanHalf ? kMoreThanHalf : kUsedBytes;
};

template <int N, int Ctas>
class StreamKernel {
  using S = StreamShape<N, Ctas>;
  using Mma = WgmmaShape<Operands::kBf16, N>;
  static constexpr bool kCluster = Ctas > 1;

 public:
  __device__ __forceinline__ StreamKernel(const Parameters& p, char* shared)
      : p_(p),
        shared_(shared),
        base_(shared_address(shared)),
        head_(int(blockIdx.x) / Ctas % p.heads),
        first_(int(blockIdx.x) / Ctas / p.heads * N),
        chunks_(p.q_lora / kChunk),
        warp_(uniform_warp()),
        lane_(int(threadIdx.x) % 32),
        party_(kCluster ? int(blockIdx.x) % Ctas : warp_ / 4) {}

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (Place at; at.turn == 0; at.advance()) {
        full(at).init(1);
        empty(at).init(S::kMathThreads / 32);
      }
      nope_arrived().init(1);
      nope_free().init(Ctas > 1 ? Ctas - 1 : 1);
      publish_barriers();
    }
    if constexpr (kCluster) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  /// The warp that fills the ring: for every tile of tokens the chunks of W_QB with those of q_c, then the parts of
  /// W_UK.
  __device__ __forceinline__ void fill(const StreamMaps& maps) const {
    const int early = min(chunks_, S::kStages);
    const bool elected = elect_one();
    if (elected) {
      Place at;
      for (int chunk = 0; chunk < early; ++chunk, at.advance()) {
        full(at).expect(S::kWeightBytes + S::kTokenBytes);
        copy_weights(maps, chunk, at);
      }
    }
    if (!p_.beside) wait_for_earlier_kernels();
    let_next_kernel_start();
    if (!elected) return;
    Place at;
    for (int first = first_; first < p_.rows; first = next_tile(first)) {
      for (int chunk = 0; chunk < chunks_; ++chunk, at.advance()) {
        if (first > first_ || chunk >= early) {
          claim(at, S::kWeightBytes + S::kTokenBytes);
          copy_weights(maps, chunk, at);
        }
        tensor_copy(stage(at) + S::kWeightBytes, maps.q_c, chunk * kChunk, first, full(at));
      }
      for (int part = first_part(); part < kParts; part += part_step(), at.advance()) {
        claim(at, kPartBytes);
        tensor_copy_once(stage(at), maps.w_uk, part * kPart, head_ * kKvB, full(at));
      }
    }
  }

  /// The warpgroups.
  __device__ __forceinline__ void multiply() const {
    if (!p_.beside) wait_for_earlier_kernels();
    Place at;
    for (int first = first_, tile = 0; first < p_.rows; first = next_tile(first), ++tile) {
      project(first, tile, at);
      absorb(first, at);
      if (next_tile(first) < p_.rows) free_nope();
    }
  }

 private:
  /// A place in the ring, and which turn of it.
  struct Place {
    uint32_t stage = 0, turn = 0;
    __device__ __forceinline__ void advance() {
      if (++stage == S::kStages) stage = 0, ++turn;
    }
  };
  __device__ __forceinline__ uint32_t stage(Place at) const { return base_ + at.stage * S::kStageBytes; }
  __device__ __forceinline__ Barrier full(Place at) const { return {base_ + S::kBarriersAt + at.stage * 8}; }
  __device__ __forceinline__ Barrier empty(Place at) const { return {full(at).address + S::kStages * 8}; }
  __device__ __forceinline__ Barrier nope_arrived() const { return {base_ + S::kBarriersAt + 2 * S::kStages * 8}; }
  __device__ __forceinline__ Barrier nope_free() const { return {nope_arrived().address + 8}; }
  __device__ __forceinline__ void wait_full(Place at) const { full(at).wait(at.turn & 1); }
  __device__ __forceinline__ void release(Place at) const {
    if (lane_ == 0) empty(at).arrive();
  }
  /// Waits until the stage is free and announces its bytes.
  __device__ __forceinline__ void claim(Place at, uint32_t bytes) const {
    if (at.turn > 0) empty(at).wait((at.turn - 1) & 1);
    full(at).expect(bytes);
  }
  __device__ __forceinline__ void copy_weights(const StreamMaps& maps, int chunk, Place at) const {
    const int row = head_ * kHeadQuery + (kCluster ? party_ * kPart : 0);
    tensor_copy_once(stage(at), maps.w_qb, chunk * kChunk, row, full(at));
  }
  __device__ __forceinline__ int next_tile(int first) const { return first + p_.tiles_at_once * N; }
  // Parts of the latent that pass through this CTA's ring.
  __device__ __forceinline__ int first_part() const { return kCluster ? party_ : 0; }
  __device__ __forceinline__ static constexpr int part_step() { return kCluster ? kParties : 1; }

  /// Step 2 of N tokens from `first` on: x of this warpgroup's rows.
  __device__ __forceinline__ void project(int first, int tile, Place& at) const {
    float sums[N / 2];
    const uint32_t own_rows = kCluster ? 0 : uint32_t(party_) * kPart * kLineBytes;
    Place before;
    for (int chunk = 0; chunk < chunks_; ++chunk, at.advance()) {
      wait_full(at);
      const uint64_t a = swizzled_tile(stage(at) + own_rows), b = swizzled_tile(stage(at) + S::kWeightBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) Mma::shared(sums, a + 2 * k, b + 2 * k, chunk > 0 || k > 0);
      wgmma_commit();
      if constexpr (kCluster) {  // one warpgroup an SM: its products must follow each other closely
        if (chunk > 0) {
          wgmma_wait<1>();
          release(before);
        }
        before = at;
      } else {  // three: the stage is worth more to the ring
        wgmma_wait<0>();
        release(at);
      }
    }
    if constexpr (kCluster) {
      wgmma_wait<0>();
      release(before);
    }
    if (party_ < kNope / kPart) {
      if (kCluster && tile > 0) nope_free().wait(uint32_t(tile - 1) & 1);
      write_nope(sums);
      fence_async_proxy();
    } else {
      store(sums, first, kLatent);
    }
    share_nope(tile);
  }

  /// This CTA is done with the nope tile: all its warps, then, for who sends, the others of the cluster.
  __device__ __forceinline__ void free_nope() const {
    barrier_meet(kNopeFree, S::kMathThreads);
    if constexpr (kCluster) {
      if (warp_ != 0 || !elect_one()) return;
      for (int sender = 0; sender < kNope / kPart; ++sender) {
        if (sender != party_) arrive_remote(address_in(nope_free().address, uint32_t(sender)));
      }
    }
  }

  /// Makes the nope tile complete for every warpgroup.
  __device__ __forceinline__ void share_nope(int tile) const {
    barrier_meet(kNopeReady, S::kMathThreads);
    if constexpr (kCluster) {
      const bool sender = party_ < kNope / kPart;
      const uint32_t half = S::kNopeAt + uint32_t(party_) * S::kTokenBytes;
      if (warp_ == 0 && elect_one()) {
        nope_arrived().expect(sender ? S::kTokenBytes : S::kNopeBytes);
        for (int other = 0; sender && other < Ctas; ++other) {
          if (other == party_) continue;
          copy_to_cta(address_in(base_ + half, uint32_t(other)), base_ + half, S::kTokenBytes,
                      address_in(nope_arrived().address, uint32_t(other)));
        }
      }
      wait_in_cluster(nope_arrived(), uint32_t(tile) & 1);
    }
  }

  /// Steps 3 and 4: this warpgroup's parts of the latent.
  __device__ __forceinline__ void absorb(int first, Place& at) const {
    for (int part = first_part(); part < kParts; part += part_step(), at.advance()) {
      wait_full(at);
      if (part % kParties == party_) {
        float sums[N / 2];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kNope / 16; ++k) {
          const uint64_t a = swizzled_tile(stage(at) + uint32_t(k) * 16 * kLineBytes);
          const uint64_t b = swizzled_tile(base_ + S::kNopeAt + uint32_t(k / 4) * S::kTokenBytes) + 2 * (k % 4);
          Mma::template shared<Major::kMn, Major::kK>(sums, a, b, k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        release(at);
        store(sums, first, part * kPart);
      } else {
        release(at);
      }
    }
  }

  /// The results of eight tokens as BF16, transposed: a lane gets token lane / 4, and of the warp's 16 rows the pairs
  /// 2 (lane % 4) and 8 further.
  __device__ __forceinline__ static uint2 token_pairs(const float* sums) {
    return {transposed_matrix(pack_bf16(sums[0], sums[1])), transposed_matrix(pack_bf16(sums[2], sums[3]))};
  }

  /// x of 64 nope rows into the nope tile: wgmma's B, a line a token.
  __device__ __forceinline__ void write_nope(const float (&sums)[N / 2]) const {
    char* half = shared_ + S::kNopeAt + party_ * S::kTokenBytes;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const uint2 pairs = token_pairs(sums + 4 * j);
      const int token = lane_ / 4;  // of the eight
      const int byte = (warp_ % 4 * 32 + lane_ % 4 * 4) ^ (token * 16);
      char* line = half + (8 * j + token) * kLineBytes;
      *reinterpret_cast<uint32_t*>(line + byte) = pairs.x;
      *reinterpret_cast<uint32_t*>(line + (byte ^ 16)) = pairs.y;
    }
  }

  /// Step 4: 64 values of N query rows, from value `column` on.
  __device__ __forceinline__ void store(const float (&sums)[N / 2], int first, int column) const {
    const int at = column + warp_ % 4 * 16 + lane_ % 2 * 8 + lane_ % 4 / 2 * 4;
    const int row = first + lane_ / 4, live = p_.rows - row;
    const int64_t eight_rows = 8 * int64_t(p_.query.heads) * kQueryRow;
    if (p_.fp8_query) {
      uint8_t* to = p_.query.e4m3(row, head_) + at;
      const auto codes = [&](uint32_t v) {
        return pack_e4m3(low_bf16(v) * p_.q_scale_inv, high_bf16(v) * p_.q_scale_inv);
      };
#pragma unroll
      for (int j = 0; j < N / 8; ++j, to += eight_rows) {
        const uint2 four = token_fours(sums + 4 * j);
        if (8 * j < live) *reinterpret_cast<uint32_t*>(to) = codes(four.x) | codes(four.y) << 16;
      }
    } else {
      BFloat16* to = p_.query.bf16(row, head_) + at;
#pragma unroll
      for (int j = 0; j < N / 8; ++j, to += eight_rows) {
        const uint2 four = token_fours(sums + 4 * j);
        if (8 * j < live) *reinterpret_cast<uint2*>(to) = four;
      }
    }
  }
  /// token_pairs after an exchange between neighbours: four neighbouring values, in odd lanes of the upper eight rows.
  __device__ __forceinline__ uint2 token_fours(const float* sums) const {
    const uint2 pairs = token_pairs(sums);
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, lane_ & 1 ? pairs.x : pairs.y, 1);
    return lane_ & 1 ? uint2{other, pairs.y} : uint2{pairs.x, other};
  }

  const Parameters& p_;
  char* shared_;
  uint32_t base_;
  int head_;
  int first_;  ///< row of the first tile of tokens
  int chunks_, warp_, lane_;
  int party_;  ///< which 64 rows of W_QB, and parts of the latent
};

template <int N, int Ctas>
__global__ void __launch_bounds__(StreamShape<N, Ctas>::kThreads, StreamShape<N, Ctas>::kCtasAnSm)
    query_stream(const __grid_constant__ Parameters p, const __grid_constant__ StreamMaps maps) {
  extern __shared__ __align__(1024) char shared[];
  const int first_inserting = p.heads * p.tiles_at_once * Ctas;
  if (int(blockIdx.x) >= first_inserting) {
    insert_rows(p, first_inserting);
  } else {
    const StreamKernel<N, Ctas> kernel(p, shared);
    kernel.init_barriers();
    if (threadIdx.x >= StreamShape<N, Ctas>::kMathThreads) {
      kernel.fill(maps);
    } else {
      kernel.multiply();
    }
    if constexpr (Ctas > 1) {
      __syncwarp();
      cluster_barrier();  // what this CTA sends has arrived, and what arrives at it has been sent
    }
  }
  if (p.beside) wait_for_earlier_kernels();
}

struct Variant {
  int tokens;
  void (*kernel)(Parameters, StreamMaps);
  int ctas, threads, weight_rows, shared_bytes;
};
template <int N, int Ctas, class S = StreamShape<N, Ctas>>
constexpr Variant kVariant = {N, query_stream<N, Ctas>, Ctas, S::kThreads, S::kWeightRows, S::kSharedBytes};

/// Kernels by their tokens.
using Variants = std::array<Variant, 5>;
template <int Ctas>
constexpr Variants kVariants = {kVariant<8, Ctas>, kVariant<16, Ctas>, kVariant<32, Ctas>, kVariant<64, Ctas>,
                                kVariant<128, Ctas>};

/// A CTA a head keeps DRAM busy from 65 heads on; below, three do.
const Variants& variants_of(int heads) { return heads > 64 ? kVariants<1> : kVariants<3>; }

/// How many tiles of tokens may be taken at once, each by clusters of its own: large ones only, since each reads all
/// weights.
int most_tiles(const Variant& v, int heads) {
  return v.ctas > 1 && v.tokens >= 64 ? std::max(1, kMultiprocessors / (heads * v.ctas)) : 1;
}

const Variant& variant_of(int heads, int rows) {
  const Variants& variants = variants_of(heads);
  for (const Variant& v : variants) {
    if (rows <= v.tokens * most_tiles(v, heads)) return v;
  }
  return variants.back();
}

}  // namespace

void prepare_stream(int heads) {
  for (const Variant& v : variants_of(heads)) {
    allow_shared(v.kernel, size_t(v.shared_bytes));
    prefer_shared(v.kernel);
  }
}

void enqueue_stream(Parameters p, const Workspace& workspace, bool insert) {
  const Variant& v = variant_of(p.heads, p.rows);
  p.tiles_at_once = std::min(most_tiles(v, p.heads), (p.rows + v.tokens - 1) / v.tokens);
  const int rows_of_cluster = v.ctas * v.threads / 32;
  const int inserting = insert ? (p.rows + rows_of_cluster - 1) / rows_of_cluster : 0;
  const StreamMaps maps = {
      .w_qb = tensor_map(p.w_qb.data(), p.w_qb.extent(0), p.q_lora, p.w_qb.stride(0), v.weight_rows),
      .w_uk = tensor_map(p.kv_b.data(), p.kv_b.extent(0) * kKvB, kLatent, kLatent, kNope),
      .q_c = tensor_map(p.q_c.data(), p.rows, p.q_lora, p.q_c.stride(0), v.tokens),
  };
  launch(v.kernel,
         {.grid = dim3(unsigned((p.heads * p.tiles_at_once + inserting) * v.ctas)),
          .block = dim3(unsigned(v.threads)),
          .shared_bytes = size_t(v.shared_bytes),
          .cluster = v.ctas},
         workspace, p, maps);
}

}  // namespace dsacore::cuda::query
