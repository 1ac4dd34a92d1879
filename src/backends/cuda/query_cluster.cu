// query_cluster: a cluster of CTAs takes one head, steps 2 to 4 of spec 4, and for few rows step 1 too.
//
//   q_a or q_c -> registers -> W_QB -> nope to every CTA of the cluster, pe to the query row | nope -> W_UK -> query row
//
// With C CTAs a head, one of them has 192/C rows of W_QB, fetched into registers, and 512/C columns of W_UK, fetched into
// shared memory, both before the wait for earlier kernels. A warp has one block of 128 of q_lora (the norm's block): its
// products are added over the warps in shared memory, in a fixed order. Tokens are the 16 rows of mma's A, so that a row's
// bits do not depend on the others. Bound by bytes: at 12 heads and q_lora 1536 8.7 MB of weights, 2.0 us of DRAM, which the
// kernel before hides in part; then by latency (norm 0.4 us, exchange 0.4 us); at 64 rows by the L2 reads of q_c, 196 KB a CTA.
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/global_memory.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/query_rows.cuh"

namespace dsacore::cuda::query {
namespace {

constexpr int kTile = 16;       // tokens multiplied together
constexpr int kPassRows = 64;   // tokens whose nope values lie in shared memory at once
constexpr int kUnits = 4;       // of 32 values, in a block of 128
constexpr int kTogether = 3;    // row tiles of mma's N whose sums a warp keeps at once: independent chains
constexpr int kGroup = 8;       // neighbouring outputs of a token: 16 bytes of BF16

template <int C>
struct ClusterShape {
  static constexpr int kNopeRows = kNope / C, kPeRows = kPe / C, kRows = kHeadQuery / C;
  static constexpr int kRowTiles = kRows / 8;  // of mma's N
  static constexpr int kLatents = kLatent / C;
  static constexpr int kUkPitch = kLatents * 2 + 16;  // bytes; 16 off a multiple of 128, for ldmatrix
  static constexpr int kNopePitch = kNope * 2 + 16;

  static constexpr int kBarrierAt = 0;
  static constexpr int kSumsAt = 16;  // [kTile][16] sums of blocks
  static constexpr int kNopeAt = kSumsAt + kTile * 16 * 4;
  static constexpr int kUkAt = kNopeAt + kPassRows * kNopePitch;
  static constexpr int kNormAt = kUkAt + kNope * kUkPitch;
  static constexpr int kPartsAt = kNormAt + kMaxQLora * 2;  // [warps][kTile][kRows] sums of the warps
  static constexpr int shared_bytes(int warps) { return kPartsAt + warps * kTile * kRows * 4; }
};

/// A block of up to 16 tokens, as mma's A: lane (r, c) has chunk c of each unit of tokens r and r + 8.
struct TokenBlock {
  uint4 low[kUnits], high[kUnits];

  /// From rows of `pitch` elements at multiples of 16 bytes; `rows` of them live. Tokens past them repeat the last one.
  __device__ __forceinline__ void load(const BFloat16* from, int64_t pitch, int rows, int r, int c) {
    const BFloat16* first = from + min(r, rows - 1) * pitch + 8 * c;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) low[u] = load_bf16x8(first + 32 * u, true);
    if (rows > 8) {
      const BFloat16* second = from + min(r + 8, rows - 1) * pitch + 8 * c;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) high[u] = load_bf16x8(second + 32 * u, true);
    } else {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) high[u] = {};
    }
  }

  /// Makes the compiler forget that it has unpacked the values once: it would keep both forms, and spill.
  __device__ __forceinline__ void keep_packed() {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      asm volatile("" : "+r"(low[u].x), "+r"(low[u].y), "+r"(low[u].z), "+r"(low[u].w));
      asm volatile("" : "+r"(high[u].x), "+r"(high[u].y), "+r"(high[u].z), "+r"(high[u].w));
    }
  }
};

template <int C, int Warps, bool Normalise>
class ClusterKernel {
  using S = ClusterShape<C>;

 public:
  __device__ __forceinline__ ClusterKernel(const Parameters& p, char* shared)
      : p_(p), shared_(shared), base_(fixed_shared_address(shared)), rank_(int(cluster_rank())), head_(int(blockIdx.x) / C),
        warp_(int(threadIdx.x) / 32), lane_(int(threadIdx.x) % 32), blocks_(p.q_lora / kNormBlock) {}

  /// Everything before the wait: barrier ready, weights on their way. The arrival releases, which waits for loads: it goes first.
  __device__ __forceinline__ void prepare() {
    if (threadIdx.x == 0) {
      arrived().init(1);
      publish_barriers();
    }
    cluster_arrive();
    fetch_w_qb();
    fetch_w_uk();
  }

  __device__ __forceinline__ void run() {
    const int passes_end = Normalise ? 1 : p_.rows;  // up to kFusedMaxRows rows are one pass of one tile
    for (int first = 0, pass = 0; first < passes_end; first += kPassRows, ++pass) {
      const int rows = min(kPassRows, p_.rows - first);
      if (pass > 0) cluster_arrive(), cluster_wait();  // all have read the nope values of the pass before
      if (threadIdx.x == 0) arrived().expect(uint32_t(rows * kNope * 2));
      project(first, rows, pass == 0);
      wait_in_cluster(arrived(), pass & 1);
      absorb(first, rows);
    }
  }

 private:
  __device__ __forceinline__ Barrier arrived() const { return {base_ + S::kBarrierAt}; }
  __device__ __forceinline__ int r() const { return lane_ / 4; }
  __device__ __forceinline__ int c() const { return lane_ % 4; }

  /// This warp's block of the CTA's rows of W_QB, as mma's B: row tile t is 8 rows, lane (r, c) chunk c of row r.
  __device__ __forceinline__ void fetch_w_qb() {
#pragma unroll
    for (int t = 0; t < S::kRowTiles; ++t) {
      const int nope_tiles = S::kNopeRows / 8;
      const int row = t < nope_tiles ? rank_ * S::kNopeRows + 8 * t : kNope + rank_ * S::kPeRows + 8 * (t - nope_tiles);
      const BFloat16* from = p_.w_qb.row(int64_t(head_) * kHeadQuery + row + r()) + warp_ * kNormBlock + 8 * c();
#pragma unroll
      for (int u = 0; u < kUnits; ++u) w_qb_[t][u] = load_weights16(from + 32 * u);
    }
  }

  /// The CTA's columns of W_UK, and the norm's weights.
  __device__ __forceinline__ void fetch_w_uk() {
    constexpr int kRowPieces = S::kLatents / 8;
    for (int i = int(threadIdx.x); i < kNope * kRowPieces; i += int(blockDim.x)) {
      const int k = i / kRowPieces, piece = i % kRowPieces;
      async_copy16(base_ + S::kUkAt + k * S::kUkPitch + piece * 16, p_.kv_b.row(head_, k) + rank_ * S::kLatents + piece * 8);
    }
    if constexpr (Normalise) {
      for (int i = int(threadIdx.x); i < p_.q_lora / 8; i += int(blockDim.x)) {
        async_copy16(base_ + S::kNormAt + i * 16, p_.q_norm.data() + i * 8);
      }
    }
    async_commit();
  }

  __device__ __forceinline__ void load_tokens(TokenBlock& x, int first, int rows) const {
    if constexpr (Normalise) {
      x.load(p_.projected.row(first) + warp_ * kNormBlock, p_.projected.stride(0), rows, r(), c());
    } else {
      x.load(p_.q_c.row(first) + warp_ * kNormBlock, p_.q_c.stride(0), rows, r(), c());
    }
  }

  /// Step 1 of a tile of tokens: every warp its block. The first head's cluster writes q_c, each CTA some of the tokens.
  __device__ __forceinline__ void normalise(TokenBlock& x, int first, int rows) const {
    float* sums = reinterpret_cast<float*>(shared_ + S::kSumsAt);
    const auto block_of = [](const uint4(&v)[kUnits]) {
      float sum = (sum_of_squares(v[0]) + sum_of_squares(v[1])) + (sum_of_squares(v[2]) + sum_of_squares(v[3]));
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      return sum + __shfl_xor_sync(kAllLanes, sum, 2);
    };
    const float low = block_of(x.low), high = block_of(x.high);
    if (c() == 0) {
      sums[r() * 16 + warp_] = low;
      sums[(r() + 8) * 16 + warp_] = high;
    }
    x.keep_packed();
    async_wait<0>();  // the norm's weights are there
    __syncthreads();
    const uint4* weights = reinterpret_cast<const uint4*>(shared_ + S::kNormAt) + warp_ * (kNormBlock / 8) + c();
    const auto finish = [&](uint4(&v)[kUnits], int token) {
      const float factor = norm_factor(sums + token * 16, blocks_, p_.eps);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) v[u] = normalised(v[u], factor, weights[4 * u]);
      if (head_ != 0 || token >= rows || token % C != rank_) return;
      uint4* to = reinterpret_cast<uint4*>(p_.q_c.row(first + token) + warp_ * kNormBlock + 8 * c());
#pragma unroll
      for (int u = 0; u < kUnits; ++u) to[4 * u] = v[u];
    };
    finish(x.low, r());
    if (rows > 8) finish(x.high, r() + 8);
  }

  /// Steps 1 and 2 of up to kPassRows tokens from `first` on.
  __device__ __forceinline__ void project(int first, int rows, bool first_pass) {
    TokenBlock x;
    load_tokens(x, first, min(rows, kTile));
    const int end = Normalise ? kTile : rows;
    for (int at = 0; at < end; at += kTile) {
      const int tokens = min(kTile, rows - at);
      if constexpr (Normalise) normalise(x, first + at, tokens);
      if (at > 0) __syncthreads();  // the sums of the tile before have been read
#pragma unroll
      for (int t = 0; t < S::kRowTiles; t += kTogether) multiply(x, t);
      if (at + kTile < end) load_tokens(x, first + at + kTile, min(kTile, rows - at - kTile));
      async_wait<0>();  // W_UK is there
      __syncthreads();
      if (first_pass && at == 0) cluster_wait();  // all barriers are ready
      finish_tile(first, at, tokens);
    }
    if (end > kTile || !first_pass) __syncthreads();  // the last tile's sums have been read, before the next pass writes its own
  }

  /// This warp's sums of kTogether row tiles, into shared memory.
  __device__ __forceinline__ void multiply(const TokenBlock& x, int first_tile) const {
    float sums[kTogether][4] = {};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t even[4] = {x.low[u].x, x.high[u].x, x.low[u].y, x.high[u].y};
      const uint32_t odd[4] = {x.low[u].z, x.high[u].z, x.low[u].w, x.high[u].w};
#pragma unroll
      for (int t = 0; t < kTogether; ++t) mma_bf16(sums[t], even, w_qb_[first_tile + t][u].x, w_qb_[first_tile + t][u].y);
#pragma unroll
      for (int t = 0; t < kTogether; ++t) mma_bf16(sums[t], odd, w_qb_[first_tile + t][u].z, w_qb_[first_tile + t][u].w);
    }
    float* parts = reinterpret_cast<float*>(shared_ + S::kPartsAt) + warp_ * (kTile * S::kRows) + 8 * first_tile;
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      float* to = parts + r() * S::kRows + 8 * t + 2 * c();
      *reinterpret_cast<float2*>(to) = {sums[t][0], sums[t][1]};
      *reinterpret_cast<float2*>(to + 8 * S::kRows) = {sums[t][2], sums[t][3]};
    }
  }

  /// Adds the warps' sums of a tile; eight lanes have eight neighbouring outputs of a token: nope goes to every CTA of the
  /// cluster, pe to the query row.
  __device__ __forceinline__ void finish_tile(int first, int at, int tokens) const {
    constexpr int kGroups = S::kRows / kGroup;  // of a token
    const float* parts = reinterpret_cast<const float*>(shared_ + S::kPartsAt);
    const int warps = int(blockDim.x) / 32;
    for (int base = warp_ * 4; base < tokens * kGroups; base += warps * 4) {
      const int output = base * kGroup + lane_;
      float sum = parts[output];
      for (int w = 1; w < warps; ++w) sum += parts[w * (kTile * S::kRows) + output];
      const uint4 values = gather_eight(sum);
      const int token = output / S::kRows, group = output / kGroup % kGroups;
      if (token >= tokens) continue;
      if (group < S::kNopeRows / kGroup) {
        const int destination = lane_ % kGroup;
        const uint32_t to = base_ + S::kNopeAt + (at + token) * S::kNopePitch + (rank_ * S::kNopeRows + group * kGroup) * 2;
        if (destination < C) {
          store_remote16(address_in(to, uint32_t(destination)), values, address_in(arrived().address, uint32_t(destination)));
        }
      } else if (lane_ % kGroup == 0) {
        const int column = kLatent + rank_ * S::kPeRows + (group - S::kNopeRows / kGroup) * kGroup;
        if (p_.fp8_query) {
          *reinterpret_cast<uint2*>(p_.query.e4m3(first + at + token, head_) + column) = scaled_e4m3(values, p_.q_scale_inv);
        } else {
          *reinterpret_cast<uint4*>(p_.query.bf16(first + at + token, head_) + column) = values;
        }
      }
    }
  }

  /// The values of eight neighbouring lanes as BF16, in each of them.
  __device__ __forceinline__ uint4 gather_eight(float value) const {
    const auto other = [](uint32_t v, int lane_step) { return __shfl_xor_sync(kAllLanes, v, lane_step); };
    const float neighbour = __shfl_xor_sync(kAllLanes, value, 1);
    const uint32_t pair = lane_ & 1 ? pack_bf16(neighbour, value) : pack_bf16(value, neighbour);
    const uint32_t next = other(pair, 2);
    const uint2 four = lane_ & 2 ? uint2{next, pair} : uint2{pair, next};
    const uint2 rest = {other(four.x, 4), other(four.y, 4)};
    return lane_ & 4 ? uint4{rest.x, rest.y, four.x, four.y} : uint4{four.x, four.y, rest.x, rest.y};
  }

  /// Steps 3 and 4: tiles of 16 tokens x 8 latents, shared out over the warps.
  __device__ __forceinline__ void absorb(int first, int rows) const {
    constexpr int kColumnTiles = S::kLatents / 8;
    const int tiles = (rows + kTile - 1) / kTile * kColumnTiles;
    for (int tile = warp_; tile < tiles; tile += int(blockDim.x) / 32) {
      const int token = tile / kColumnTiles * kTile, column = tile % kColumnTiles * 8;
      const uint32_t x = base_ + S::kNopeAt + (token + lane_ % 16) * S::kNopePitch + lane_ / 16 * 16;
      const uint32_t w = base_ + S::kUkAt + lane_ * S::kUkPitch + column * 2;
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int k = 0; k < kNope; k += 32) {
        uint32_t b[4], a[4];
        load_matrices_transposed(b, w + k * S::kUkPitch);
        load_matrices(a, x + k * 2);
        mma_bf16(even, a, b[0], b[1]);
        load_matrices(a, x + k * 2 + 32);
        mma_bf16(odd, a, b[2], b[3]);
      }
      const int latent = rank_ * S::kLatents + column + 2 * c();
      store_pair(first + token + r(), latent, even[0] + odd[0], even[1] + odd[1]);
      store_pair(first + token + r() + 8, latent, even[2] + odd[2], even[3] + odd[3]);
    }
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
  char* shared_;
  uint32_t base_;
  int rank_, head_, warp_, lane_, blocks_;
  uint4 w_qb_[S::kRowTiles][kUnits];
};

/// Grid: a cluster a head, then clusters whose warps insert a row each. Block: a warp for every 128 of q_lora.
template <int C, int Warps, bool Normalise>
__global__ void __launch_bounds__(32 * Warps, 1) query_cluster(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(16) char shared[];
  if (Normalise && int(blockIdx.x) >= p.heads * C) {
    LatentRow weights;
    const int lane = int(threadIdx.x) % 32;
    weights.load(p.kv_norm.data(), kLatent, true, lane);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int row = int((blockIdx.x - unsigned(p.heads * C)) * blockDim.x + threadIdx.x) / 32;
    if (row < p.rows) insert_row(p, weights, row, lane);
    return;
  }
  ClusterKernel<C, Warps, Normalise> kernel(p, shared);
  kernel.prepare();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  kernel.run();
}

/// One size of cluster and block with its two kernels.
struct Variant {
  int cluster;
  void (*fused)(Parameters);
  void (*projection)(Parameters);
  int (*shared_bytes)(int warps);
};
template <int C, int Warps>
constexpr Variant kVariant = {C, query_cluster<C, Warps, true>, query_cluster<C, Warps, false>, ClusterShape<C>::shared_bytes};

// A CTA an SM, and a wave: 15 clusters of 8 fit the chip, 30 of 4. Blocks of 16 warps have registers for clusters of 8 only.
constexpr int kMaxHeadsOf8 = 14, kMaxWarpsOf4 = 12;

Variant variant_of(int heads, int q_lora) {
  if (q_lora / kNormBlock > kMaxWarpsOf4) return kVariant<8, kMaxQLora / kNormBlock>;
  return heads <= kMaxHeadsOf8 ? kVariant<8, kMaxWarpsOf4> : kVariant<4, kMaxWarpsOf4>;
}

}  // namespace

bool cluster_takes(const LayerSizes& sizes) {
  return sizes.heads <= (sizes.q_lora / kNormBlock > kMaxWarpsOf4 ? kMaxHeadsOf8 : kClusterMaxHeads);
}

void prepare_cluster(const LayerSizes& sizes) {
  const Variant v = variant_of(sizes.heads, sizes.q_lora);
  const size_t bytes = size_t(v.shared_bytes(sizes.q_lora / kNormBlock));
  allow_shared(v.fused, bytes);
  allow_shared(v.projection, bytes);
}

void enqueue_cluster(const Parameters& p, const Workspace& workspace, bool normalise) {
  const Variant v = variant_of(p.heads, p.q_lora);
  const int warps = p.q_lora / kNormBlock;
  const int rows_of_cluster = v.cluster * warps;
  const int inserting = normalise ? (p.rows + rows_of_cluster - 1) / rows_of_cluster : 0;
  launch(normalise ? v.fused : v.projection,
         {.grid = dim3(unsigned((p.heads + inserting) * v.cluster)),
          .block = dim3(unsigned(32 * warps)),
          .shared_bytes = size_t(v.shared_bytes(warps)),
          .cluster = v.cluster},
         workspace, p);
}

}  // namespace dsacore::cuda::query
