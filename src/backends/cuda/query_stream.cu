// query_stream: one CTA takes one head, steps 2 to 4 of spec 4, for any number of heads.
//
//   q_c image -> ring in shared memory, weights -> registers | W_QB -> x -> nope tile in shared memory, pe to the query row
//   nope tile, weights -> registers | W_UK -> query row
//
// Three warpgroups with 64 of the head's 192 rows each, then with two or three of the eight 64-wide parts of the latent. The
// weights are wgmma's A operand, so each thread fetches what it multiplies, four items of 16 registers ahead (98 KB a CTA in
// flight); tokens are N. The first warp also copies the image of q_c. Bound by bytes: at 96 heads and q_lora 1536 69 MB of
// weights, 15.4 us at 4.5 TB/s, against 5.7 us of wgmma at 64 rows; above 64 rows the weights are read again.
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/global_memory.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/query.h"

namespace dsacore::cuda::query {
namespace {

constexpr int kGroups = 3;         // warpgroups
constexpr int kGroupThreads = 128;
constexpr int kThreads = kGroups * kGroupThreads;
constexpr int kChunk = 64;         // values of q_lora that are multiplied together: 128 bytes of BF16
constexpr int kPart = 64;          // rows of a warpgroup: wgmma's M
constexpr int kParts = kLatent / kPart;
constexpr int kAhead = 4;          // items of weights in a thread's registers
constexpr int kSteps = kChunk / 16;

// Named barriers: 1 + group for a warpgroup alone.
constexpr uint32_t kNopeWritten = 4, kNopeRead = 5;

template <int N>
struct StreamShape {
  static constexpr int kBlockBytes = N * 128;  // N tokens x 64 values
  static constexpr int kStages = 8;
  static constexpr int kCopiesAhead = 6;  // the other two stages give the warpgroups room to drift apart
  static constexpr int kNopeAt = kStages * kBlockBytes;
  static constexpr int kStagingAt = kNopeAt + kNope / kChunk * kBlockBytes;
  static constexpr int kBarriersAt = kStagingAt + kGroups * kBlockBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * kStages * 8;
};

/// An item of weights: 16 rows of a warp x 64 values, as wgmma's A of four k-steps but for the order of the registers.
using Item = uint4[kSteps];

template <int N>
class StreamKernel {
  using S = StreamShape<N>;
  using Mma = WgmmaShape<Operands::kBf16, N>;

 public:
  __device__ __forceinline__ StreamKernel(const Parameters& p, char* shared)
      : p_(p), shared_(shared), base_(fixed_shared_address(shared)), head_(int(blockIdx.x)), chunks_(p.q_lora / kChunk),
        warp_(int(threadIdx.x) / 32), lane_(int(threadIdx.x) % 32) {}

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < S::kStages; ++s) {
        full(s).init(1);
        empty(s).init(kThreads / 32);
      }
      publish_barriers();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run(const QcImage& image) {
    Item items[kAhead];
    fetch_first(items);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    for (int block = 0; block < S::kCopiesAhead; ++block) copy_block(image, block);
    for (int first = 0, block = 0; first < p_.rows; first += N, block += chunks_) {
      if (first > 0) {
        fetch_first(items);
        named_barrier(kNopeRead, kThreads);
      }
      project(items, image, first, block);
      if (group() < kNope / kPart) fence_async_proxy();
      named_barrier(kNopeWritten, kThreads);
      absorb(items, first);
    }
  }

 private:
  __device__ __forceinline__ Barrier full(int stage) const { return {base_ + S::kBarriersAt + uint32_t(stage) * 8}; }
  __device__ __forceinline__ Barrier empty(int stage) const { return full(S::kStages + stage); }
  __device__ __forceinline__ int group() const { return warp_ / 4; }
  __device__ __forceinline__ int r() const { return lane_ / 4; }
  __device__ __forceinline__ int c() const { return lane_ % 4; }
  /// Of the 64 rows of its group, this thread has `thread_row()` as row r of its fragments and the next one as row r + 8:
  /// so its results of two neighbouring rows make one word.
  __device__ __forceinline__ int thread_row() const { return warp_ % 4 * 16 + 2 * r(); }

  /// Item `item`: the chunks of W_QB, then the halves (64 of 128 nope values) of the group's parts of W_UK.
  __device__ __forceinline__ void fetch(Item& to, int item) const {
    if (item < chunks_) {
      const BFloat16* from = p_.w_qb.row(int64_t(head_) * kHeadQuery + group() * kPart + thread_row()) + item * kChunk + 8 * c();
      const int64_t pitch = p_.w_qb.stride(0);
      to[0] = load_weights16(from);
      to[1] = load_weights16(from + pitch);
      to[2] = load_weights16(from + 32);
      to[3] = load_weights16(from + pitch + 32);
      return;
    }
    const int half = item - chunks_, part = group() + half / 2 * kGroups;
    if (part >= kParts) return;
    const BFloat16* from = p_.kv_b.row(head_, half % 2 * kChunk + 2 * c()) + part * kPart + thread_row();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const BFloat16* step = from + k * 16 * kLatent;
      to[k] = {load_weights4(step), load_weights4(step + kLatent), load_weights4(step + 8 * kLatent),
               load_weights4(step + 9 * kLatent)};
    }
  }
  /// The first warp copies a block of the image, once every warp is done with the one that had its stage.
  __device__ __forceinline__ void copy_block(const QcImage& image, int block) const {
    if (warp_ != 0 || block >= (p_.rows + N - 1) / N * chunks_) return;
    if (!elect_one()) return;
    const int stage = block % S::kStages, turn = block / S::kStages;
    if (turn > 0) empty(stage).wait(uint32_t(turn - 1) & 1);
    full(stage).expect(S::kBlockBytes);
    bulk_copy(base_ + uint32_t(stage) * S::kBlockBytes, image.data + int64_t(block) * S::kBlockBytes, S::kBlockBytes,
              full(stage));
    if (block == chunks_ / 2) prefetch_l2(p_.kv_b.row(head_, 0), kNope * kLatent * 2);
  }

  __device__ __forceinline__ void fetch_first(Item (&items)[kAhead]) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(items[i], i);
  }

  /// Step 2 of N tokens from `first` on; `block` counts the image's blocks. Leaves the first halves of W_UK in `items`.
  __device__ __forceinline__ void project(Item (&items)[kAhead], const QcImage& image, int first, int block) {
    float sums[N / 2];
    for (int base = 0; base < chunks_; base += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + i >= chunks_) break;
        const int at = block + base + i, stage = at % S::kStages;
        full(stage).wait(uint32_t(at / S::kStages) & 1);
        multiply_chunk(sums, items[i], base_ + uint32_t(stage) * S::kBlockBytes, base + i > 0);
        if (lane_ == 0) empty(stage).arrive();
        copy_block(image, at + S::kCopiesAhead);
        fetch(items[i], base + i + kAhead);
      }
    }
    if (chunks_ % kAhead != 0) {  // chunks are even: bring the first item of W_UK to the front
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        swap(items[0][i], items[2][i]);
        swap(items[1][i], items[3][i]);
      }
    }
    const int nope_groups = kNope / kPart;
    if (group() < nope_groups) {
      write_tile(sums, S::kNopeAt + group() * S::kBlockBytes);
    } else {
      write_tile(sums, staging());
      named_barrier(1 + group(), kGroupThreads);
      store_tile(first, kLatent);
    }
  }
  __device__ __forceinline__ static void swap(uint4& a, uint4& b) {
    const uint4 kept = a;
    a = b;
    b = kept;
  }

  /// Keeps the making of these registers ahead of the wgmma's that read them.
  template <int Steps>
  __device__ __forceinline__ static void settle(uint32_t (&a)[Steps][4]) {
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
      asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3])::"memory");
    }
  }

  /// Adds 64 rows x 64 values of W_QB times the tokens' block at `tokens`.
  __device__ __forceinline__ void multiply_chunk(float (&sums)[N / 2], const Item& w, uint32_t tokens, bool accumulate) const {
    const uint64_t b = swizzled_tile(tokens);
    uint32_t a[kSteps][4] = {{w[0].x, w[1].x, w[0].y, w[1].y},
                                   {w[0].z, w[1].z, w[0].w, w[1].w},
                                   {w[2].x, w[3].x, w[2].y, w[3].y},
                                   {w[2].z, w[3].z, w[2].w, w[3].w}};
    settle(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) Mma::registers(sums, a[k], b + 2 * k, accumulate || k > 0);
    wgmma_commit();
    wgmma_wait<0>();
  }

  /// Steps 3 and 4.
  __device__ __forceinline__ void absorb(Item (&items)[kAhead], int first) {
#pragma unroll
    for (int i = 0; i < (kParts + kGroups - 1) / kGroups; ++i) {
      const int part = group() + i * kGroups;
      if (part >= kParts) break;
      float sums[N / 2];
      multiply_part(sums, items[2 * i % kAhead], items[2 * i % kAhead + 1]);
      fetch(items[2 * i % kAhead], chunks_ + 2 * i + kAhead);
      fetch(items[2 * i % kAhead + 1], chunks_ + 2 * i + kAhead + 1);
      named_barrier(1 + group(), kGroupThreads);  // the staging tile has been read
      write_tile(sums, staging());
      named_barrier(1 + group(), kGroupThreads);
      store_tile(first, part * kPart);
    }
  }

  /// 64 latents x 128 nope values of W_UK times the nope tile.
  __device__ __forceinline__ void multiply_part(float (&sums)[N / 2], const Item& low, const Item& high) const {
    uint32_t a[2 * kSteps][4];
#pragma unroll
    for (int k = 0; k < 2 * kSteps; ++k) {
      const uint4& w = k < kSteps ? low[k] : high[k - kSteps];  // words: two latents of one nope value
      a[k][0] = __byte_perm(w.x, w.y, 0x5410);
      a[k][1] = __byte_perm(w.x, w.y, 0x7632);
      a[k][2] = __byte_perm(w.z, w.w, 0x5410);
      a[k][3] = __byte_perm(w.z, w.w, 0x7632);
    }
    settle(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 2 * kSteps; ++k) {
      const uint64_t b = swizzled_tile(base_ + S::kNopeAt + uint32_t(k / kSteps) * S::kBlockBytes) + 2 * (k % kSteps);
      Mma::registers(sums, a[k], b, k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  __device__ __forceinline__ uint32_t staging() const { return S::kStagingAt + uint32_t(group()) * S::kBlockBytes; }

  /// The group's results as BF16 into shared memory at `at`: a line of 128 bytes a token, 64 values, swizzled as wgmma's B.
  __device__ __forceinline__ void write_tile(const float (&sums)[N / 2], uint32_t at) const {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t token = uint32_t(8 * j + 2 * c() + e);
        const uint32_t byte = uint32_t(thread_row() * 2) ^ (token % 8 * 16);
        *reinterpret_cast<uint32_t*>(shared_ + at + token * 128 + byte) = pack_bf16(sums[4 * j + e], sums[4 * j + 2 + e]);
      }
    }
  }

  /// Step 4: the staged 64 values of every token to values `column`.. of its query row.
  __device__ __forceinline__ void store_tile(int first, int column) const {
    const int thread = int(threadIdx.x) % kGroupThreads, tokens = min(N, p_.rows - first);
    const auto piece_of = [&](int token, int piece) {
      return *reinterpret_cast<const uint4*>(shared_ + staging() + token * 128 + ((piece ^ token % 8) * 16));
    };
    if (p_.fp8_query) {
      for (int i = thread; i < tokens * 4; i += kGroupThreads) {
        const int token = i / 4, piece = i % 4 * 2;
        const uint2 low = scaled_e4m3(piece_of(token, piece), p_.q_scale_inv);
        const uint2 high = scaled_e4m3(piece_of(token, piece + 1), p_.q_scale_inv);
        *reinterpret_cast<uint4*>(p_.query.e4m3(first + token, head_) + column + piece * 8) = {low.x, low.y, high.x, high.y};
      }
    } else {
      for (int i = thread; i < tokens * 8; i += kGroupThreads) {
        const int token = i / 8, piece = i % 8;
        *reinterpret_cast<uint4*>(p_.query.bf16(first + token, head_) + column + piece * 8) = piece_of(token, piece);
      }
    }
  }

  const Parameters& p_;
  char* shared_;
  uint32_t base_;
  int head_, chunks_, warp_, lane_;
};

template <int N>
__global__ void __launch_bounds__(kThreads, 1) query_stream(const __grid_constant__ Parameters p,
                                                            const __grid_constant__ QcImage image) {
  extern __shared__ __align__(1024) char shared[];
  StreamKernel<N> kernel(p, shared);
  kernel.init_barriers();
  kernel.run(image);
}

struct Variant {
  int tile;
  void (*kernel)(Parameters, QcImage);
  int shared_bytes;
};
template <int N>
constexpr Variant kVariant = {N, query_stream<N>, StreamShape<N>::kSharedBytes};
constexpr Variant kVariants[] = {kVariant<8>, kVariant<16>, kVariant<32>, kVariant<64>};

const Variant& variant_of(int rows) {
  for (const Variant& v : kVariants) {
    if (rows <= v.tile) return v;
  }
  return kVariants[3];
}

}  // namespace

int stream_tile(int rows) { return variant_of(rows).tile; }

void prepare_stream() {
  for (const Variant& v : kVariants) allow_shared(v.kernel, size_t(v.shared_bytes));
}

void enqueue_stream(const Parameters& p, const Workspace& workspace, QcImage image) {
  const Variant& v = variant_of(p.rows);
  launch(v.kernel,
         {.grid = dim3(unsigned(p.heads)), .block = dim3(kThreads), .shared_bytes = size_t(v.shared_bytes)}, workspace, p,
         image);
}

}  // namespace dsacore::cuda::query
