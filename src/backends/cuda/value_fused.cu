// value, `fused`: step 12 of the specification in one kernel.
// latent -> registers | W_UV slice, in registers since before the wait -> partial sums -> v, rounded -> gate -> out
//
// A CTA owns `Columns` of a head's 128 columns and a tile of rows. Its 8 warps split the 512 latent values, 64 each, so
// that every weight and every latent value enters the CTA once, straight into the fragments of mma.sync: a lane's 16
// bytes are 8 neighbouring latent values, which two products take in the same order on both sides. Shared memory holds
// only the 8 partial sums of an output, which are added in the order of the warps: a row's bits depend on neither the
// tile nor its neighbours.
//
// Bounds: few heads and rows (12 heads: 1.6 MB of weights, 0.35 us, fetched before the wait): the latency of one read
// from L2, 4 dependent products, one barrier, one store. 96 heads: the 12.6 MB of weights, 2.8 us. Many rows: the way
// from L2, (Columns + rows) KB a CTA, and the products.
#include <algorithm>

#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/value.h"
#include "backends/cuda/value_parts.cuh"

namespace dsacore::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = kLatent / kWarps;  // latent values that a warp sums
constexpr int kHalves = 2;                // of a chunk: 32 values, 8 a lane of a quad, two products
constexpr int kGroup = 16;                // rows of a product
constexpr int kStrip = 8;                 // columns of a product
static_assert(kChunk == 32 * kHalves);

/// Pitches in elements; 32 bits, which an offset in a batch of 256 rows fits.
struct FusedParameters {
  const BFloat16* latent;  // [rows, heads, 512]
  const BFloat16* w_uv;    // [heads, 128, 512]
  const BFloat16* gate;    // [rows, heads * 128], or null
  BFloat16* out;           // [rows, heads * 128]
  uint32_t latent_pitch;
  uint32_t head_pitch;  // of w_uv
  uint32_t gate_pitch;
  uint32_t out_pitch;
  LiveRows live;
  int rows;
  int tile_rows;
  int tiles;  // of rows
};

/// 16 bytes of weights, loaded before the wait. By a load that the assembler keeps there: it takes one through the
/// read-only path (ld.global.nc, __ldg) for free to move, and moves the wait ahead of it.
__device__ __forceinline__ uint4 load_weights(const BFloat16* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

/// One lane's share of 8 columns: column `lane / 4`, and of each half of the chunk the 8 values from `lane % 4 * 8` on.
struct Strip {
  uint4 weights[kHalves];
};

/// Partial sums of one group of rows. The pitch spreads the 4 rows x 8 columns of half a warp's store over all banks.
template <int Columns>
struct Partials {
  float sum[kWarps][kGroup][Columns + 8];
};

/// What a thread finishes of each group of rows: pairs of neighbouring columns, `kRowsApart` rows from each other.
template <int Columns>
struct OutputPairs {
  static constexpr int kPerRow = Columns / 2;
  static constexpr int kCount = (kGroup * kPerRow + kThreads - 1) / kThreads;
  static constexpr int kRowsApart = kThreads / kPerRow;
  static constexpr bool kAllThreads = kGroup * kPerRow >= kThreads;
  int row;     // of the group; past it where there is nothing to do
  int column;  // of the slice

  __device__ __forceinline__ explicit OutputPairs(int thread) : row(thread / kPerRow), column(thread % kPerRow * 2) {}
};

/// One lane's share of a group of rows, `lane / 4` and 8 on, and the gates of the pairs that its thread finishes.
/// Loaded a group ahead.
template <int Columns>
struct RowGroup {
  uint4 low[kHalves];
  uint4 high[kHalves];
  Bf16Pair gate[OutputPairs<Columns>::kCount];
};

/// Sums of this warp's 64 latent values for 16 rows and `Strips` strips of columns from `first` on.
template <int Strips, int Columns>
__device__ __forceinline__ void multiply(float (&sum)[Strips][4], const RowGroup<Columns>& rows,
                                         const Strip (&strips)[Columns / kStrip], int first) {
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const uint4 low = rows.low[h];
    const uint4 high = rows.high[h];
#pragma unroll
    for (int s = 0; s < Strips; ++s) {
      const uint4 weights = strips[first + s].weights[h];
      mma_bf16(sum[s], {low.x, high.x, low.y, high.y}, weights.x, weights.y);
    }
#pragma unroll
    for (int s = 0; s < Strips; ++s) {
      const uint4 weights = strips[first + s].weights[h];
      mma_bf16(sum[s], {low.z, high.z, low.w, high.w}, weights.z, weights.w);
    }
  }
}

/// v of two neighbouring columns: the warps' sums in order, rounded.
template <int Columns>
__device__ __forceinline__ Bf16Pair add_up(const Partials<Columns>& partials, int row, int column) {
  float2 sum = *reinterpret_cast<const float2*>(&partials.sum[0][row][column]);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    const float2 next = *reinterpret_cast<const float2*>(&partials.sum[w][row][column]);
    sum.x += next.x;
    sum.y += next.y;
  }
  return round_pair(sum.x, sum.y);
}

/// As many CTAs an SM as the registers of a slice allow.
constexpr int min_ctas(int columns) { return columns == 16 ? 4 : columns == 32 ? 3 : 2; }

/// `Aligned`: the pairs of gate and out lie on words.
template <int Columns, bool Aligned>
__global__ void __launch_bounds__(kThreads, min_ctas(Columns)) value_fused(const __grid_constant__ FusedParameters p) {
  using Pairs = OutputPairs<Columns>;
  constexpr int kSlices = kValue / Columns;
  constexpr int kStrips = Columns / kStrip;
  constexpr int kAtOnce = 2;  // strips whose sums are in registers together
  __shared__ __align__(16) Partials<Columns> partials;
  __shared__ bool live[kMaxRows];  // the tile's rows are set
  const int lane = int(threadIdx.x) % 32;
  const int warp = int(threadIdx.x) / 32;
  const int slice = int(blockIdx.x) / p.tiles % kSlices;
  const int head = int(blockIdx.x) / p.tiles / kSlices;
  const int first_row = int(blockIdx.x) % p.tiles * p.tile_rows;
  const int end_row = min(first_row + p.tile_rows, p.rows);
  const uint32_t in_row = warp * kChunk + lane % 4 * 8;  // where a lane's 16 bytes lie in a latent row, weights and values
  const Pairs pairs(int(threadIdx.x));
  const int column = head * kValue + slice * Columns + pairs.column;

  Strip strips[kStrips];
  const BFloat16* weights = p.w_uv + int64_t(head) * p.head_pitch + (slice * Columns + lane / 4) * kLatent + in_row;
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) strips[s].weights[h] = load_weights(weights + s * kStrip * kLatent + h * 32);
  }

  const uint32_t latent_at = uint32_t(head * kLatent) + in_row;
  wait_for_earlier_kernels();
  let_next_kernel_start();

  const auto fetch = [&](int group_row) {
    RowGroup<Columns> group;
    // Rows past the last one repeat it: nobody takes their sums.
    const uint32_t low = uint32_t(min(group_row + lane / 4, end_row - 1)) * p.latent_pitch + latent_at;
    const uint32_t high = uint32_t(min(group_row + lane / 4 + kGroup / 2, end_row - 1)) * p.latent_pitch + latent_at;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      group.low[h] = *reinterpret_cast<const uint4*>(p.latent + low + h * 32);
      group.high[h] = *reinterpret_cast<const uint4*>(p.latent + high + h * 32);
    }
    if (p.gate != nullptr) {
#pragma unroll
      for (int i = 0; i < Pairs::kCount; ++i) {
        const uint32_t row = uint32_t(min(group_row + pairs.row + i * Pairs::kRowsApart, end_row - 1));
        group.gate[i] = load_pair(p.gate + (row * p.gate_pitch + column), Aligned);
      }
    }
    return group;
  };

  RowGroup<Columns> group = fetch(first_row);
  if (const int row = first_row + int(threadIdx.x); row < end_row) live[row] = p.live(row);
#pragma unroll 1
  for (int group_row = first_row; group_row < end_row; group_row += kGroup) {
    __syncthreads();  // the last group's sums have been added up
#pragma unroll
    for (int first = 0; first < kStrips; first += kAtOnce) {
      float sum[kAtOnce][4] = {};
      multiply(sum, group, strips, first);
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        float* at = &partials.sum[warp][lane / 4][(first + s) * kStrip + lane % 4 * 2];
        *reinterpret_cast<float2*>(at) = {sum[s][0], sum[s][1]};
        *reinterpret_cast<float2*>(at + kGroup / 2 * (Columns + 8)) = {sum[s][2], sum[s][3]};
      }
    }
    const RowGroup<Columns> done = group;
    if (group_row + kGroup < end_row) group = fetch(group_row + kGroup);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) {
      const int in_group = pairs.row + i * Pairs::kRowsApart;
      const int row = group_row + in_group;
      if ((!Pairs::kAllThreads && in_group >= kGroup) || row >= end_row) continue;
      Bf16Pair v = add_up(partials, in_group, pairs.column);
      if (p.gate != nullptr) v = gated(v, done.gate[i]);
      store_pair(p.out + (uint32_t(row) * p.out_pitch + column), live[row] ? v : Bf16Pair{0}, Aligned);
    }
  }
}

using FusedKernel = void (*)(FusedParameters);

template <bool Aligned>
FusedKernel kernel_of(int columns) {
  return columns == 16 ? value_fused<16, Aligned> : columns == 32 ? value_fused<32, Aligned> : value_fused<64, Aligned>;
}

// ---- choice of the tile ----

struct Tile {
  int columns;
  int rows;
};

/// The tile with the shortest time on the busiest SM, counting 16 clocks a KB from L2 (64 bytes a clock) for the slice
/// of W_UV and the rows, 6 clocks a product on each of the 4 tensor cores, and 300 clocks a group of rows for its way
/// through the barriers. Square tiles move the least; few heads and rows take the narrowest slice, so that they reach
/// every SM.
Tile choose_tile(int64_t heads, int64_t rows) {
  constexpr int64_t kSms = 132;
  constexpr Tile kTiles[] = {{16, 16}, {16, 32}, {16, 64}, {32, 16},  {32, 32}, {32, 64},
                             {64, 16}, {64, 32}, {64, 64}, {64, 128}, {64, 256}};
  const auto clocks = [&](Tile t) {
    const int64_t ctas = heads * (kValue / t.columns) * ((rows + t.rows - 1) / t.rows);
    const int64_t tile_rows = std::min<int64_t>(t.rows, rows);
    const int64_t groups = (tile_rows + kGroup - 1) / kGroup;
    const int64_t on_busiest = (ctas + kSms - 1) / kSms;
    const int64_t waves = (on_busiest + min_ctas(t.columns) - 1) / min_ctas(t.columns);
    return on_busiest * std::max<int64_t>(16 * (t.columns + tile_rows), groups * t.columns * 4) +
           waves * (1000 + 300 * groups);
  };
  return *std::min_element(std::begin(kTiles), std::end(kTiles), [&](Tile a, Tile b) { return clocks(a) < clocks(b); });
}

}  // namespace

void run_fused_value(const ValueArgs& args, const Workspace& workspace) {
  const int64_t rows = args.latent.extent(0);
  const int64_t heads = args.latent.extent(1);
  if (rows == 0) return;
  const Tile tile = choose_tile(heads, rows);
  const int tiles = int((rows + tile.rows - 1) / tile.rows);
  const FusedParameters parameters{
      .latent = args.latent.data(),
      .w_uv = args.w_uv.data(),
      .gate = args.gate.data(),
      .out = args.out.data(),
      .latent_pitch = uint32_t(args.latent.stride(0)),
      .head_pitch = uint32_t(args.w_uv.stride(0)),
      .gate_pitch = uint32_t(args.gate.stride(0)),
      .out_pitch = uint32_t(args.out.stride(0)),
      .live = live_rows(args.seq_lens, args.q),
      .rows = int(rows),
      .tile_rows = tile.rows,
      .tiles = tiles,
  };
  const bool aligned = has_aligned_pairs(args.gate) && has_aligned_pairs(args.out);
  const FusedKernel kernel = aligned ? kernel_of<true>(tile.columns) : kernel_of<false>(tile.columns);
  launch(kernel, {.grid = dim3(unsigned(heads * (kValue / tile.columns) * tiles)), .block = dim3(kThreads)}, workspace,
         parameters);
}

}  // namespace dsacore::cuda
