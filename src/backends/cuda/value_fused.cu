// value, `fused`: step 12 of the specification in one kernel.
// latent -> registers | W_UV slice, in registers since before the wait -> partial sums -> v, rounded -> gate -> out
//
// A CTA owns `Columns` of a head's 128 columns and a tile of rows. Its 8 warps split the 512 latent values, 64 each, so that
// every weight and every latent value enters the CTA once, straight into the fragments of mma.sync: a lane's 16 bytes are
// 8 neighbouring latent values, which two products take in the same order on both sides. No shared memory but for the
// 8 partial sums of an output, which are added in the order of the warps: a row's bits depend on neither the tile nor its
// neighbours.
//
// Bounds: few heads and rows (12 heads: 1.6 MB of weights, 0.35 us, fetched before the wait): the latency of one read from
// L2, 4 dependent products, one barrier, one store. 96 heads: the 12.6 MB of weights, 2.8 us. Many rows: the way from L2,
// (Columns + rows) KB a CTA, and the products.
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
constexpr int kGroup = 8;                 // rows of a product
constexpr int kAhead = 2;                 // groups of rows on their way; each has its own partial sums
static_assert(kAhead >= 2);
static_assert(kChunk == 32 * kHalves);

struct FusedParameters {
  View<const BFloat16, 3> latent;
  View<const BFloat16, 3> w_uv;
  View<const BFloat16, 2> gate;
  View<BFloat16, 2> out;
  LiveRows live;
  int rows;
  int tile_rows;
  int tiles;  // of rows
  bool gate_pairs;
  bool out_pairs;
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

/// One lane's share of 16 columns: rows `lane / 4` and 8 on of the product's left side.
struct ColumnTile {
  uint4 low[kHalves];
  uint4 high[kHalves];
};

/// One lane's share of 8 rows, and the gate of the pair of outputs that its thread finishes.
struct RowGroup {
  uint4 latent[kHalves];
  Bf16Pair gate;
};

/// The output pair that a thread finishes in each group of rows; only the first `4 * Columns` threads have one.
template <int Columns>
struct OutputPair {
  int row;     // of the group
  int column;  // of the slice, even

  __device__ __forceinline__ explicit OutputPair(int thread)
      : row(thread / (Columns / 2)), column(thread % (Columns / 2) * 2) {}
  __device__ __forceinline__ bool exists() const { return row < kGroup; }
};

/// Partial sums of one group of rows. The pitch spreads the 4 rows x 8 columns of a warp's store over all banks.
template <int Columns>
struct Partials {
  float sum[kWarps][kGroup][Columns + 4];
};

template <int Columns>
__device__ __forceinline__ void load_columns(ColumnTile (&tiles)[Columns / 16], const BFloat16* slice, int lane) {
  const BFloat16* at = slice + int64_t(lane / 4) * kLatent + lane % 4 * 8;
#pragma unroll
  for (int t = 0; t < Columns / 16; ++t) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      tiles[t].low[h] = load_weights(at + (t * 16) * kLatent + h * 32);
      tiles[t].high[h] = load_weights(at + (t * 16 + 8) * kLatent + h * 32);
    }
  }
}

/// Sums of this warp's 64 latent values for `Columns` columns and 8 rows, into its part of `partials`.
template <int Columns>
__device__ __forceinline__ void multiply(const ColumnTile (&tiles)[Columns / 16], const RowGroup& group,
                                         float (&partials)[kGroup][Columns + 4], int lane) {
  float sum[Columns / 16][4] = {};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const uint4 x = group.latent[h];
#pragma unroll
    for (int t = 0; t < Columns / 16; ++t) {
      const uint4 low = tiles[t].low[h];
      const uint4 high = tiles[t].high[h];
      mma_bf16(sum[t], {low.x, high.x, low.y, high.y}, x.x, x.y);
    }
#pragma unroll
    for (int t = 0; t < Columns / 16; ++t) {
      const uint4 low = tiles[t].low[h];
      const uint4 high = tiles[t].high[h];
      mma_bf16(sum[t], {low.z, high.z, low.w, high.w}, x.z, x.w);
    }
  }
#pragma unroll
  for (int t = 0; t < Columns / 16; ++t) {
    const int column = t * 16 + lane / 4;
    const int row = lane % 4 * 2;
    partials[row][column] = sum[t][0];
    partials[row + 1][column] = sum[t][1];
    partials[row][column + 8] = sum[t][2];
    partials[row + 1][column + 8] = sum[t][3];
  }
}

/// v of two neighbouring columns: the warps' sums in order, rounded.
template <int Columns>
__device__ __forceinline__ Bf16Pair finish(const Partials<Columns>& partials, OutputPair<Columns> output) {
  float2 sum = *reinterpret_cast<const float2*>(&partials.sum[0][output.row][output.column]);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    const float2 next = *reinterpret_cast<const float2*>(&partials.sum[w][output.row][output.column]);
    sum.x += next.x;
    sum.y += next.y;
  }
  return make_pair(to_bf16(sum.x), to_bf16(sum.y));
}

/// As many CTAs an SM as the registers of a slice allow.
constexpr int min_ctas(int columns) { return columns == 16 ? 4 : columns == 32 ? 3 : 2; }

template <int Columns>
__global__ void __launch_bounds__(kThreads, min_ctas(Columns))
    value_fused(const __grid_constant__ FusedParameters p) {
  constexpr int kSlices = kValue / Columns;
  __shared__ __align__(16) Partials<Columns> partials[kAhead];
  const int lane = int(threadIdx.x) % 32;
  const int warp = int(threadIdx.x) / 32;
  const int slice = int(blockIdx.x) / p.tiles % kSlices;
  const int head = int(blockIdx.x) / p.tiles / kSlices;
  const int first_row = int(blockIdx.x) % p.tiles * p.tile_rows;
  const int end_row = min(first_row + p.tile_rows, p.rows);
  const OutputPair<Columns> output(int(threadIdx.x));
  const int column = head * kValue + slice * Columns + output.column;

  ColumnTile columns[Columns / 16];
  load_columns<Columns>(columns, p.w_uv.row(head, slice * Columns) + warp * kChunk, lane);

  const BFloat16* latent_at = p.latent.row(first_row + lane / 4, head) + warp * kChunk + lane % 4 * 8;
  const BFloat16* gate_at = p.gate.row(first_row + output.row) + column;
  wait_for_earlier_kernels();
  let_next_kernel_start();

  /// The next group of rows; called once for each, in order.
  const auto fetch = [&](int group_row) {
    RowGroup group{};
    if (group_row + lane / 4 < end_row) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) group.latent[h] = *reinterpret_cast<const uint4*>(latent_at + h * 32);
    }
    if (output.exists() && group_row + output.row < end_row && !p.gate.empty()) {
      group.gate = load_pair(gate_at, p.gate_pairs);
    }
    latent_at += kGroup * p.latent.stride(0);
    gate_at += kGroup * p.gate.stride(0);
    return group;
  };
  RowGroup ahead[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) ahead[a] = fetch(first_row + a * kGroup);

  for (int base = first_row; base < end_row; base += kAhead * kGroup) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int group_row = base + a * kGroup;
      if (group_row >= end_row) break;
      const bool finishes = output.exists() && group_row + output.row < end_row;
      const bool live = finishes && p.live(group_row + output.row);
      multiply<Columns>(columns, ahead[a], partials[a].sum[warp], lane);
      const Bf16Pair gate = ahead[a].gate;
      ahead[a] = fetch(group_row + kAhead * kGroup);
      __syncthreads();  // one a group: the next one has the other partials
      if (finishes) {
        Bf16Pair v = finish(partials[a], output);
        if (!p.gate.empty()) v = gated(v, gate);
        store_pair(p.out.row(group_row + output.row) + column, live ? v : Bf16Pair{0}, p.out_pairs);
      }
    }
  }
}

// ---- choice of the tile ----

struct Tile {
  int columns;
  int rows;
};

/// The tile with the shortest time on the busiest SM, counting 16 clocks a KB from L2 (64 bytes a clock) for the slice of
/// W_UV and the rows, and 6 clocks a product on each of the 4 tensor cores. Square tiles move the least; few heads and
/// rows take the narrowest slice, so that they reach every SM.
Tile choose_tile(int64_t heads, int64_t rows) {
  constexpr int64_t kSms = 132;
  constexpr Tile kTiles[] = {{16, 8},  {16, 16}, {16, 32}, {16, 64}, {32, 8},  {32, 16},  {32, 32},
                             {32, 64}, {64, 8},  {64, 16}, {64, 32}, {64, 64}, {64, 128}, {64, 256}};
  const auto clocks = [&](Tile t) {
    const int64_t ctas = heads * (kValue / t.columns) * ((rows + t.rows - 1) / t.rows);
    const int64_t tile_rows = std::min<int64_t>(t.rows, rows);
    const int64_t groups = (tile_rows + kGroup - 1) / kGroup;
    return (ctas + kSms - 1) / kSms * (16 * (t.columns + tile_rows) + t.columns / 16 * groups * (kLatent / 16) * 6 / 4);
  };
  return *std::min_element(std::begin(kTiles), std::end(kTiles),
                           [&](Tile a, Tile b) { return clocks(a) < clocks(b); });
}

}  // namespace

void run_fused_value(const ValueArgs& args, const Workspace& workspace) {
  const int64_t rows = args.latent.extent(0);
  const int64_t heads = args.latent.extent(1);
  if (rows == 0) return;
  const Tile tile = choose_tile(heads, rows);
  const int tiles = int((rows + tile.rows - 1) / tile.rows);
  const FusedParameters parameters{.latent = args.latent,
                                   .w_uv = args.w_uv,
                                   .gate = args.gate,
                                   .out = args.out,
                                   .live = {args.seq_lens, args.q},
                                   .rows = int(rows),
                                   .tile_rows = tile.rows,
                                   .tiles = tiles,
                                   .gate_pairs = has_aligned_pairs(args.gate),
                                   .out_pairs = has_aligned_pairs(args.out)};
  const auto kernel = tile.columns == 16   ? value_fused<16>
                      : tile.columns == 32 ? value_fused<32>
                                           : value_fused<64>;
  launch(kernel, {.grid = dim3(unsigned(heads * (kValue / tile.columns) * tiles)), .block = dim3(kThreads)}, workspace,
         parameters);
}

}  // namespace dsacore::cuda
