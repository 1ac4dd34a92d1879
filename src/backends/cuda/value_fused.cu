// value, `fused`: step 12 of the specification in one kernel.
// latent -> registers | W_UV slice, in registers since before the wait -> partial sums -> v, rounded -> gate -> out
//
// A CTA owns `Columns` of a head's 128 columns and a tile of rows. Its 8 warps split the 512 latent values, 64 each,
// so that every weight and every latent value enters the CTA once, straight into the fragments of mma.sync: a lane's
// 16 bytes are 8 neighbouring latent values, which two products take in the same order on both sides. Shared memory
// holds only the 8 partial sums of an output, which are added in the order of the warps: a row's bits depend on
// neither the tile nor its neighbours.
//
// Bounds: few heads and rows (12 heads: 1.6 MB of weights, 0.35 us, fetched before the wait): the latency of one read
// from L2, 4 dependent products, one barrier, one store. 96 heads: the 12.6 MB of weights, 2.8 us. Many rows: the
// latency of a group of rows, a CTA's groups following each other.
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

/// One lane's share of 8 columns: column `lane / 4`, and of each half of the chunk the 8 values from `lane % 4 * 8`
/// on.
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

  __device__ __forceinline__ explicit OutputPairs(uint32_t thread)
      : row(int(thread / kPerRow)), column(int(thread % kPerRow * 2)) {}
};

/// One lane's share of a group of rows, `lane / 4` and 8 on. Loaded a group ahead.
struct RowGroup {
  uint4 low[kHalves];
  uint4 high[kHalves];
};

/// Sums of this warp's 64 latent values for 16 rows and `Strips` strips of columns from `first` on.
template <int Strips, int All>
__device__ __forceinline__ void multiply(float (&sum)[Strips][4], const RowGroup& rows, const Strip (&strips)[All],
                                         int first) {
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

/// `Aligned`: the pairs of gate and out lie on words. `Gated`: there is a gate.
template <int Columns, bool Aligned, bool Gated>
__global__ void __launch_bounds__(kThreads, Gated ? min_ctas(Columns) : 2)
    value_fused(const __grid_constant__ FusedParameters p) {
  using Pairs = OutputPairs<Columns>;
  constexpr int kSlices = kValue / Columns;
  constexpr int kStrips = Columns / kStrip;
  constexpr int kAtOnce = 2;  // strips whose sums are in registers together
  __shared__ __align__(16) Partials<Columns> partials;
  __shared__ bool live[kMaxRows];  // the tile's rows are set
  const int warp = int(threadIdx.x / 32);
  const int lane_row = int(threadIdx.x % 32 / 4);
  const int lane_part = int(threadIdx.x % 4);
  const int slice = int(blockIdx.x) / p.tiles % kSlices;
  const int head = int(blockIdx.x) / p.tiles / kSlices;
  const int first_row = int(blockIdx.x) % p.tiles * p.tile_rows;
  const int end_row = min(first_row + p.tile_rows, p.rows);
  const uint32_t in_row = warp * kChunk + lane_part * 8;  // where a lane's 16 bytes lie in a latent row and in W_UV's
  const Pairs pairs(threadIdx.x);
  const int column = head * kValue + slice * Columns + pairs.column;

  // Long before the wait: the next layer's weights travel while the sparse core runs. Not where this kernel's own take
  // as long: they would travel at the same time.
  constexpr bool kEarly = Columns < 64;
  if constexpr (kEarly) let_next_kernel_start();

  Strip strips[kStrips];
  const BFloat16* weights = p.w_uv + int64_t(head) * p.head_pitch + (slice * Columns + lane_row) * kLatent + in_row;
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) strips[s].weights[h] = load_weights(weights + s * kStrip * kLatent + h * 32);
  }

  const uint32_t latent_at = uint32_t(head * kLatent) + in_row;
  wait_for_earlier_kernels();
  if constexpr (!kEarly) let_next_kernel_start();

  const auto fetch_rows = [&](int group_row) {
    RowGroup group;
    // Rows past the last one repeat it: nobody takes their sums.
    const uint32_t low = uint32_t(min(group_row + lane_row, end_row - 1)) * p.latent_pitch + latent_at;
    const uint32_t high = uint32_t(min(group_row + lane_row + kGroup / 2, end_row - 1)) * p.latent_pitch + latent_at;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      group.low[h] = *reinterpret_cast<const uint4*>(p.latent + low + h * 32);
      group.high[h] = *reinterpret_cast<const uint4*>(p.latent + high + h * 32);
    }
    return group;
  };
  Bf16Pair gates[Pairs::kCount];
  const auto fetch_gates = [&](int group_row) {
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) {
      const uint32_t row = uint32_t(min(group_row + pairs.row + i * Pairs::kRowsApart, end_row - 1));
      if constexpr (Gated) gates[i] = load_pair(p.gate + (row * p.gate_pitch + column), Aligned);
    }
  };

  RowGroup group = fetch_rows(first_row);
  fetch_gates(first_row);
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
        float* at = &partials.sum[warp][lane_row][(first + s) * kStrip + lane_part * 2];
        *reinterpret_cast<float2*>(at) = {sum[s][0], sum[s][1]};
        *reinterpret_cast<float2*>(at + kGroup / 2 * (Columns + 8)) = {sum[s][2], sum[s][3]};
      }
    }
    if (group_row + kGroup < end_row) group = fetch_rows(group_row + kGroup);
    __syncthreads();
    if (!Pairs::kAllThreads && pairs.row >= kGroup) continue;
    // Pairs past the last row are made too, from sums that nobody else takes, so that all of a thread's go side by
    // side.
    Bf16Pair result[Pairs::kCount];
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) {
      result[i] = add_up(partials, pairs.row + i * Pairs::kRowsApart, pairs.column);
    }
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) {
      if constexpr (Gated) result[i] = gated(result[i], gates[i]);
    }
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) {
      const int row = group_row + pairs.row + i * Pairs::kRowsApart;
      if (row >= end_row) continue;
      store_pair(p.out + (uint32_t(row) * p.out_pitch + column), live[row] ? result[i] : Bf16Pair{0}, Aligned);
    }
    fetch_gates(group_row + kGroup);
  }
}

using FusedKernel = void (*)(FusedParameters);

template <int Columns>
FusedKernel kernel_of_slice(bool aligned, bool gated) {
  if (gated) return aligned ? value_fused<Columns, true, true> : value_fused<Columns, false, true>;
  return aligned ? value_fused<Columns, true, false> : value_fused<Columns, false, false>;
}
FusedKernel kernel_of(int columns, bool aligned, bool gated) {
  return columns == 16   ? kernel_of_slice<16>(aligned, gated)
         : columns == 32 ? kernel_of_slice<32>(aligned, gated)
                         : kernel_of_slice<64>(aligned, gated);
}

// ---- choice of the tile ----

struct Tile {
  int columns;
  int rows;
};

/// The shortest tile of rows with which all CTAs of a slice's width are on the chip together; nothing where there is
/// none.
Tile resident_tile(int columns, int64_t heads, int64_t rows) {
  for (int tile_rows = kGroup; tile_rows <= kMaxRows; tile_rows *= 2) {
    const int64_t ctas = heads * (kValue / columns) * ((rows + tile_rows - 1) / tile_rows);
    if (ctas <= kMultiprocessors * min_ctas(columns)) return {columns, tile_rows};
  }
  return {};
}

/// A group of 16 rows takes a CTA 0.5, 0.6 or 1.0 us (16, 32, 64 columns; measured on an H200), most of it latency, so
/// that rows go to different CTAs before they follow each other in one. Wide slices read the rows less often and are
/// taken where they still reach most SMs; where many rows follow each other, 32 columns let more warps hide the
/// latency.
Tile choose_tile(int64_t heads, int64_t rows) {
  constexpr int64_t kEnoughCtas = 96;
  constexpr int kManyRows = 64;
  constexpr Tile kManyHeads = {64, 64};  // several waves
  const Tile wide = resident_tile(64, heads, rows);
  const Tile half = resident_tile(32, heads, rows);
  if (wide.columns == 0) return kManyHeads;
  if (wide.rows >= kManyRows) return half.columns != 0 && half.rows <= wide.rows ? half : wide;
  const auto ctas = [&](Tile t) { return heads * (kValue / t.columns) * ((rows + t.rows - 1) / t.rows); };
  if (ctas(wide) >= kEnoughCtas) return wide;
  if (half.columns != 0 && ctas(half) >= kEnoughCtas) return half;
  return resident_tile(16, heads, rows);
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
  const FusedKernel kernel = kernel_of(tile.columns, aligned, !args.gate.empty());
  launch(kernel, {.grid = dim3(unsigned(heads * (kValue / tile.columns) * tiles)), .block = dim3(kThreads)}, workspace,
         parameters);
}

}  // namespace dsacore::cuda
