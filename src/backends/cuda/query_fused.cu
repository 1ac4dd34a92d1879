// query_fused: steps 1 to 5 of spec 4 in one launch, for few heads and up to 16 rows, by a cluster of eight CTAs a
// head.
//
//   q_a -> norm -> registers -> W_QB -> nope to every CTA of the cluster, pe to the query row
//   nope -> W_UK -> query row
//   kv_a -> norm -> quantise -> MLA cache row, by a warp each of one more cluster
//
// A CTA has 24 rows of W_QB (16 nope, 8 pe) and 64 columns of W_UK whole in shared memory, asked for before the wait
// for earlier kernels. A warp has one block of 128 of q_lora (the norm's block); the warps' sums are added in shared
// memory in a fixed order. Tokens are rows of mma's A, so that a row's bits do not depend on the others.
//
// Bound by bytes: at 12 heads and q_lora 1536 8.7 MB of weights, 1.9 us at 4.5 TB/s, in part hidden behind the kernel
// before (102 KB and 80 registers x 384 threads let two kernels share an SM); then by latency: tokens 0.5 us, norm 0.7,
// products 0.3, sums and exchange 0.6, absorption 0.2.
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/cache_policy.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/query_rows.cuh"

namespace dsacore::cuda::query {
namespace {

constexpr int kCluster = 8;
constexpr int kTile = kFusedMaxRows;  // tokens: mma's M
constexpr int kUnits = 4;             // of 32 values, in a block of 128
constexpr int kNopeRows = kNope / kCluster, kPeRows = kPe / kCluster, kRows = kHeadQuery / kCluster;  // of a CTA
constexpr int kRowTiles = kRows / 8;                                                                  // of mma's N
constexpr int kLatents = kLatent / kCluster;
constexpr int kGroup = 8;                // neighbouring outputs of a token: 16 bytes of BF16
constexpr int kGroups = kRows / kGroup;  // of a token

/// Shared memory, by byte offsets. Pitches of rows are off multiples of 128 so that loads have no bank conflicts.
struct SharedPlan {
  static constexpr int kNopePitch = kNope * 2 + 16;
  static constexpr int kUkPitch = kLatents * 2 + 16;
  static constexpr int kWeightsBarrierAt = 0, kNopeBarrierAt = 8;
  static constexpr int kSumsPitch = kMaxQLora / kNormBlock + 4;     // floats
  static constexpr int kSumsAt = 16;                                // [kTile][16] sums of the norm's blocks
  static constexpr int kNopeAt = kSumsAt + kTile * kSumsPitch * 4;  // [kTile][128] BF16
  static constexpr int kUkAt = kNopeAt + kTile * kNopePitch;
  static constexpr int kQbAt = kUkAt + kNope * kUkPitch;

  int qb_pitch, norm_at, bytes;

  __host__ __device__ explicit SharedPlan(int q_lora)
      : qb_pitch(q_lora * 2 + 64), norm_at(kQbAt + kRows * qb_pitch), bytes(norm_at + q_lora * 2) {}
  /// The warps' sums [warps][kTile][kRows] take the place of W_QB.
  static constexpr int kPartsAt = kQbAt;
};

/// This warp's block of eight or 16 tokens as mma's A: lane (r, c) has chunk c (eight values) of each unit, of token r,
/// and of token r + 8.
template <bool Sixteen>
struct TokenBlock {
  static constexpr int kHalves = Sixteen ? 2 : 1;
  uint4 values[kHalves][kUnits];

  /// Tokens past the live `rows` repeat the last one.
  __device__ __forceinline__ void load(const BFloat16* from, int64_t pitch, int rows, int r, int c) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const BFloat16* first = from + min(r + 8 * half, rows - 1) * pitch + 8 * c;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) values[half][u] = load_bf16x8(first + 32 * u, true);
    }
  }

  /// Makes the compiler forget that it has unpacked the values once: it would keep both forms, and spill.
  __device__ __forceinline__ void keep_packed() {
#pragma unroll
    for (int i = 0; i < kHalves * kUnits; ++i) {
      uint4& v = values[i / kUnits][i % kUnits];
      asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
    }
  }
};

/// `Warps` of the block; 0 where only the launch knows. `Sixteen`: more than eight rows.
template <int Warps, bool Sixteen>
class FusedKernel {
  using S = SharedPlan;
  using Tokens = TokenBlock<Sixteen>;
  using Weights = uint4[kUnits][kRowTiles];
  static constexpr int kMostWarps = Warps > 0 ? Warps : kMaxQLora / kNormBlock;

 public:
  __device__ __forceinline__ FusedKernel(const Parameters& p, char* shared)
      : p_(p),
        plan_(p.q_lora),
        shared_(shared),
        base_(fixed_shared_address(shared)),
        rank_(int(cluster_rank())),
        head_(int(blockIdx.x) / kCluster),
        warp_(int(threadIdx.x) / 32),
        lane_(int(threadIdx.x) % 32) {}

  /// Everything before the wait: barriers ready, weights on their way.
  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == 0) {
      weights_arrived().init(1);
      nope_arrived().init(1);
      publish_barriers();
      weights_arrived().expect(uint32_t(kRows * p_.q_lora * 2));
      nope_arrived().expect(uint32_t(p_.rows * kNope * 2));
    }
    __syncthreads();
    cluster_arrive_relaxed();
    fetch_w_qb();
    fetch_norm();
    fetch_w_uk();
  }

  __device__ __forceinline__ void run() const {
    float sums[kRowTiles][4] = {};
    {
      Tokens x;
      x.load(p_.projected.row(0) + warp_ * kNormBlock, p_.projected.stride(0), p_.rows, r(), c());
      Weights w;
      constexpr int kEarly = Sixteen ? 0 : 3;  // while the tokens travel, as many as there are registers for
      if constexpr (kEarly > 0) load_weights<0, kEarly>(w);
      normalise(x);
      load_weights<kEarly, kUnits>(w);
      multiply(x, w, sums);
    }
    __syncthreads();  // W_QB has been read
    write_parts(sums);
    async_wait<0>();  // W_UK is there
    __syncthreads();
    cluster_wait();  // all barriers are ready
    finish();
    absorb();
  }

 private:
  __device__ __forceinline__ Barrier weights_arrived() const { return {base_ + S::kWeightsBarrierAt}; }
  __device__ __forceinline__ Barrier nope_arrived() const { return {base_ + S::kNopeBarrierAt}; }
  __device__ __forceinline__ int r() const { return lane_ / 4; }
  __device__ __forceinline__ int c() const { return lane_ % 4; }
  __device__ __forceinline__ int warps() const { return Warps > 0 ? Warps : int(blockDim.x) / 32; }

  /// The CTA's rows of W_QB: nope, then pe. Every warp asks for some.
  __device__ __forceinline__ void fetch_w_qb() const {
    if (!elect_one()) return;
    const uint32_t row_bytes = uint32_t(p_.q_lora) * 2;
    for (int i = warp_; i < kRows; i += warps()) {
      const int row = i < kNopeRows ? rank_ * kNopeRows + i : kNope + rank_ * kPeRows + i - kNopeRows;
      bulk_copy_once(base_ + uint32_t(S::kQbAt + i * plan_.qb_pitch), p_.w_qb.row(int64_t(head_) * kHeadQuery + row),
                     row_bytes, weights_arrived());
    }
  }

  /// The norm's weights.
  __device__ __forceinline__ void fetch_norm() const {
    for (int i = int(threadIdx.x); i < p_.q_lora / 8; i += int(blockDim.x)) {
      async_copy16(base_ + uint32_t(plan_.norm_at + i * 16), p_.q_norm.data() + i * 8);
    }
    async_commit();
  }

  /// The CTA's columns of W_UK.
  __device__ __forceinline__ void fetch_w_uk() const {
    constexpr int kRowPieces = kLatents / 8;
    for (int i = int(threadIdx.x); i < kNope * kRowPieces; i += int(blockDim.x)) {
      const int k = i / kRowPieces, piece = i % kRowPieces;
      async_copy16_once(base_ + uint32_t(S::kUkAt + k * S::kUkPitch + piece * 16),
                        p_.kv_b.row(head_, k) + rank_ * kLatents + piece * 8);
    }
    async_commit();
  }

  /// Step 1: every warp its block. The first head's cluster writes q_c, each CTA some of the tokens.
  __device__ __forceinline__ void normalise(Tokens& x) const {
    float* sums = reinterpret_cast<float*>(shared_ + S::kSumsAt);
    const auto block_of = [](const uint4(&v)[kUnits]) {
      float sum = (sum_of_squares(v[0]) + sum_of_squares(v[1])) + (sum_of_squares(v[2]) + sum_of_squares(v[3]));
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      return sum + __shfl_xor_sync(kAllLanes, sum, 2);
    };
#pragma unroll
    for (int half = 0; half < Tokens::kHalves; ++half) {
      const float block = block_of(x.values[half]);
      if (c() == 0) sums[(r() + 8 * half) * S::kSumsPitch + warp_] = block;
    }
    x.keep_packed();
    async_wait<1>();  // the norm's weights are there
    __syncthreads();
    // Each lane has one token's factor.
    const float factor = norm_factor<kMostWarps>(sums + lane_ % kTile * S::kSumsPitch, warps(), p_.eps);
#pragma unroll
    for (int half = 0; half < Tokens::kHalves; ++half) {
      const int token = r() + 8 * half;
      finish_norm(x.values[half], __shfl_sync(kAllLanes, factor, token), token);
    }
  }
  __device__ __forceinline__ void finish_norm(uint4 (&v)[kUnits], float factor, int token) const {
    const uint4* weights = reinterpret_cast<const uint4*>(shared_ + plan_.norm_at) + warp_ * (kNormBlock / 8) + c();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) v[u] = normalised(v[u], factor, weights[4 * u]);
    if (head_ != 0 || token >= p_.rows || token % kCluster != rank_) return;
    uint4* to = reinterpret_cast<uint4*>(p_.q_c.row(token) + warp_ * kNormBlock + 8 * c());
#pragma unroll
    for (int u = 0; u < kUnits; ++u) to[4 * u] = v[u];
  }

  /// This warp's block of W_QB, as mma's B: row tile t is eight rows, in lane (r, c) chunk c of row r.
  template <int Begin, int End>
  __device__ __forceinline__ void load_weights(Weights& w) const {
    weights_arrived().wait(0);
    const char* w_qb = shared_ + S::kQbAt + r() * plan_.qb_pitch + warp_ * (kNormBlock * 2) + c() * 16;
#pragma unroll
    for (int u = Begin; u < End; ++u) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
        w[u][t] = *reinterpret_cast<const uint4*>(w_qb + 8 * t * plan_.qb_pitch + 64 * u);
    }
  }

  /// Step 2 over this warp's block.
  __device__ __forceinline__ void multiply(const Tokens& x, const Weights& w, float (&sums)[kRowTiles][4]) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint4& low = x.values[0][u];
      const uint4 high = Sixteen ? x.values[Tokens::kHalves - 1][u] : uint4{};
      const uint32_t even[4] = {low.x, high.x, low.y, high.y};
      const uint32_t odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) mma_bf16(sums[t], even, w[u][t].x, w[u][t].y);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) mma_bf16(sums[t], odd, w[u][t].z, w[u][t].w);
    }
  }

  __device__ __forceinline__ void write_parts(const float (&sums)[kRowTiles][4]) const {
    float* parts = reinterpret_cast<float*>(shared_ + S::kPartsAt) + warp_ * (kTile * kRows) + r() * kRows + 2 * c();
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      *reinterpret_cast<float2*>(parts + 8 * t) = {sums[t][0], sums[t][1]};
      *reinterpret_cast<float2*>(parts + 8 * t + 8 * kRows) = {sums[t][2], sums[t][3]};
    }
  }

  /// Adds the warps' sums; eight lanes have eight neighbouring outputs of a token: nope goes to every CTA of the
  /// cluster, pe to the query row.
  __device__ __forceinline__ void finish() const {
    const float* parts = reinterpret_cast<const float*>(shared_ + S::kPartsAt);
    for (int base = warp_ * 4; base < p_.rows * kGroups; base += warps() * 4) {
      const int output = base * kGroup + lane_;
      const uint4 values = gather_eight(sum_of_parts(parts + output));
      const int token = output / kRows, group = output / kGroup % kGroups;
      if (token >= p_.rows) continue;
      if (group < kNopeRows / kGroup) {
        const uint32_t to =
            base_ + uint32_t(S::kNopeAt + token * S::kNopePitch + (rank_ * kNopeRows + group * kGroup) * 2);
        const uint32_t destination = uint32_t(lane_ % kCluster);
        send_to_cluster(address_in(to, destination), values, address_in(nope_arrived().address, destination));
      } else if (lane_ % kGroup == 0) {
        const int column = kLatent + rank_ * kPeRows;
        if (p_.fp8_query) {
          *reinterpret_cast<uint2*>(p_.query.e4m3(token, head_) + column) = scaled_e4m3(values, p_.q_scale_inv);
        } else {
          *reinterpret_cast<uint4*>(p_.query.bf16(token, head_) + column) = values;
        }
      }
    }
  }
  static_assert(kCluster == kGroup && kPeRows == kGroup);

  __device__ __forceinline__ float sum_of_parts(const float* first) const {
    if constexpr (Warps % 4 == 0 && Warps > 0) {
      float sums[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = first[i * (kTile * kRows)];
#pragma unroll
      for (int w = 4; w < Warps; ++w) sums[w % 4] += first[w * (kTile * kRows)];
      return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    float sum = 0;
    for (int w = 0; w < warps(); ++w) sum += first[w * (kTile * kRows)];
    return sum;
  }

  /// The values of eight neighbouring lanes as BF16, in each of them.
  __device__ __forceinline__ uint4 gather_eight(float value) const {
    const float neighbour = __shfl_xor_sync(kAllLanes, value, 1);
    const uint32_t pair = lane_ & 1 ? pack_bf16(neighbour, value) : pack_bf16(value, neighbour);
    const uint32_t next = __shfl_xor_sync(kAllLanes, pair, 2);
    const uint2 four = lane_ & 2 ? uint2{next, pair} : uint2{pair, next};
    const uint2 rest = {__shfl_xor_sync(kAllLanes, four.x, 4), __shfl_xor_sync(kAllLanes, four.y, 4)};
    return lane_ & 4 ? uint4{rest.x, rest.y, four.x, four.y} : uint4{four.x, four.y, rest.x, rest.y};
  }

  /// Steps 3 and 4: a warp takes eight latents of all tokens.
  __device__ __forceinline__ void absorb() const {
    for (int column = warp_ * 8; column < kLatents; column += warps() * 8) {
      const uint32_t x = base_ + uint32_t(S::kNopeAt + lane_ % 16 * S::kNopePitch + lane_ / 16 * 16);
      const uint32_t w = base_ + uint32_t(S::kUkAt + lane_ * S::kUkPitch + column * 2);
      uint32_t b[kNope / 32][4];
#pragma unroll
      for (int k = 0; k < kNope / 32; ++k) load_matrices_transposed(b[k], w + uint32_t(k * 32 * S::kUkPitch));
      wait_in_cluster(nope_arrived(), 0);
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int k = 0; k < kNope / 32; ++k) {
        uint32_t a[4];
        load_matrices(a, x + uint32_t(k * 64));
        mma_bf16(even, a, b[k][0], b[k][1]);
        load_matrices(a, x + uint32_t(k * 64 + 32));
        mma_bf16(odd, a, b[k][2], b[k][3]);
      }
      const int latent = rank_ * kLatents + column + 2 * c();
      store_pair(r(), latent, even[0] + odd[0], even[1] + odd[1]);
      store_pair(r() + 8, latent, even[2] + odd[2], even[3] + odd[3]);
    }
    wait_in_cluster(nope_arrived(), 0);  // also warps without a column: nothing may arrive after the CTA's end
  }
  __device__ __forceinline__ void store_pair(int row, int column, float low, float high) const {
    if (row >= p_.rows) return;
    const uint32_t pair = pack_bf16(low, high);
    if (p_.fp8_query) {
      *reinterpret_cast<uint16_t*>(p_.query.e4m3(row, head_) + column) =
          uint16_t(pack_e4m3(low_bf16(pair) * p_.q_scale_inv, high_bf16(pair) * p_.q_scale_inv));
    } else {
      *reinterpret_cast<uint32_t*>(p_.query.bf16(row, head_) + column) = pair;
    }
  }

  const Parameters& p_;
  SharedPlan plan_;
  char* shared_;
  uint32_t base_;
  int rank_, head_, warp_, lane_;
};

/// Grid: a cluster a head, then clusters whose warps insert a row each. Block: a warp for every 128 of q_lora.
template <int Warps, bool Sixteen, int MaxWarps, int CtasAnSm>
__global__ void __launch_bounds__(32 * MaxWarps, CtasAnSm) query_fused(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(16) char shared[];
  if (int(blockIdx.x) >= p.heads * kCluster) {
    insert_rows(p, p.heads * kCluster);
  } else {
    const FusedKernel<Warps, Sixteen> kernel(p, shared);
    kernel.prepare();
    if (!p.beside) wait_for_earlier_kernels();
    let_next_kernel_start();
    kernel.run();
  }
  if (p.beside) wait_for_earlier_kernels();
}

using Kernel = void (*)(Parameters);

/// q_lora 1536 lets two CTAs share an SM.
template <bool Sixteen>
Kernel kernel_of(int q_lora) {
  constexpr int kMaxWarps = kMaxQLora / kNormBlock;
  return q_lora == 1536 ? query_fused<12, Sixteen, 12, 2> : query_fused<0, Sixteen, kMaxWarps, 1>;
}

}  // namespace

void prepare_fused(int q_lora) {
  for (const Kernel kernel : {kernel_of<false>(q_lora), kernel_of<true>(q_lora)}) {
    allow_shared(kernel, size_t(SharedPlan(q_lora).bytes));
  }
}

void enqueue_fused(const Parameters& p, const Workspace& workspace) {
  const int warps = p.q_lora / kNormBlock;
  const int rows_of_cluster = kCluster * warps;
  const int inserting = (p.rows + rows_of_cluster - 1) / rows_of_cluster;
  launch(p.rows > 8 ? kernel_of<true>(p.q_lora) : kernel_of<false>(p.q_lora),
         {.grid = dim3(unsigned((p.heads + inserting) * kCluster)),
          .block = dim3(unsigned(32 * warps)),
          .shared_bytes = size_t(SharedPlan(p.q_lora).bytes),
          .cluster = kCluster},
         workspace, p);
}

}  // namespace dsacore::cuda::query
