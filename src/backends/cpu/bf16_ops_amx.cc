// Bf16Ops by AMX: TDPBF16PS multiplies a tile of 16 rows by 32 k with one of 16 pairs of k by 16 columns.
//
// An element's sum takes the products of 32 k at a time, k going upwards, in every arrangement of tiles, and rows_dot
// is the same product as block_dot: so an element is independent of its neighbours here too. A tile instruction costs
// 16 cycles but answers after 52, so four sums are kept going where the shape allows it.
//
// Tiles 0..3 hold sums; 4..7 what is multiplied. The numbers must be literals in the source: hence three arrangements
// by hand.
#include "backends/cpu/bf16_ops.h"

#if defined(__x86_64__)

#include <algorithm>

#include "backends/cpu/bf16_ops_avx512.h"
#include "backends/cpu/cpu_features.h"
#include "backends/cpu/x86_intrinsics.h"

// From here on functions may use these instructions; cpu_features.h says whether they may be called.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16"))), \
                                 apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16")
#endif

namespace dsacore::cpu {
namespace {

constexpr int kTile = 16;        // rows, and columns of FP32
constexpr int kTileDepth = 32;   // k of one instruction
constexpr int kMaxDepth = 2048;  // k of rows_dot: what is packed on the stack

/// What LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// Tiles as one operation uses them, given back at the end of its scope.
class Tiles {
 public:
  /// Sums of `rows` x `columns`: tiles 0..3. Tile 4 is the first of `a`, 7 the first of `b`; 5 and 6 are full.
  void configure(int rows, int columns) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = uint8_t(tile <= 4 ? rows : kTile);
      config.column_bytes[tile] = uint16_t(tile <= 3 || tile == 7 ? 4 * columns : 64);
    }
    // Not the intrinsic: GCC takes it to read eight bytes. "memory", as tile loads do not tell GCC what they read
    // either.
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  ~Tiles() { _tile_release(); }
};

// ---- products of tiles; the tiles are configured ----

/// Two tiles of rows from m, two of columns from n.
void square(const BlockDot& op, int m, int n) {
  const int64_t a_stride = 2 * op.a_pitch, b_stride = 2 * op.b_pitch, c_stride = 4 * op.c_pitch;
  const BFloat16* a0 = op.a + m * op.a_pitch;
  const BFloat16* a1 = a0 + kTile * op.a_pitch;
  const BFloat16* b = op.b + 2 * n;
  float* c0 = op.c + m * op.c_pitch + n;
  float* c1 = c0 + kTile * op.c_pitch;
  if (op.accumulate) {
    _tile_loadd(0, c0, c_stride);
    _tile_loadd(1, c0 + kTile, c_stride);
    _tile_loadd(2, c1, c_stride);
    _tile_loadd(3, c1 + kTile, c_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < op.k; k += kTileDepth, b += kTile * op.b_pitch) {
    _tile_loadd(4, a0 + k, a_stride);
    _tile_loadd(6, b, b_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 2 * kTile, b_stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + k, a_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c0, c_stride);
  _tile_stored(1, c0 + kTile, c_stride);
  _tile_stored(2, c1, c_stride);
  _tile_stored(3, c1 + kTile, c_stride);
}

/// One tile of rows from m, C of columns from n.
template <int C>
void across(const BlockDot& op, int m, int n) {
  const int64_t a_stride = 2 * op.a_pitch, b_stride = 2 * op.b_pitch, c_stride = 4 * op.c_pitch;
  const BFloat16* a = op.a + m * op.a_pitch;
  const BFloat16* b = op.b + 2 * n;
  float* c = op.c + m * op.c_pitch + n;
  if (op.accumulate) {
    _tile_loadd(0, c, c_stride);
    if constexpr (C > 1) _tile_loadd(1, c + kTile, c_stride);
    if constexpr (C > 2) _tile_loadd(2, c + 2 * kTile, c_stride);
    if constexpr (C > 3) _tile_loadd(3, c + 3 * kTile, c_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < op.k; k += kTileDepth, b += kTile * op.b_pitch) {
    _tile_loadd(4, a + k, a_stride);
    _tile_loadd(7, b, b_stride);
    _tile_dpbf16ps(0, 4, 7);
    if constexpr (C > 1) {
      _tile_loadd(6, b + 2 * kTile, b_stride);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (C > 2) {
      _tile_loadd(5, b + 4 * kTile, b_stride);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (C > 3) {
      _tile_loadd(7, b + 6 * kTile, b_stride);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, c, c_stride);
  if constexpr (C > 1) _tile_stored(1, c + kTile, c_stride);
  if constexpr (C > 2) _tile_stored(2, c + 2 * kTile, c_stride);
  if constexpr (C > 3) _tile_stored(3, c + 3 * kTile, c_stride);
}

/// R tiles of rows from m, one of columns from n.
template <int R>
void down(const BlockDot& op, int m, int n) {
  const int64_t a_stride = 2 * op.a_pitch, b_stride = 2 * op.b_pitch, c_stride = 4 * op.c_pitch;
  const BFloat16* a = op.a + m * op.a_pitch;
  const BFloat16* b = op.b + 2 * n;
  float* c = op.c + m * op.c_pitch + n;
  const int64_t a_step = kTile * op.a_pitch, c_step = kTile * op.c_pitch;
  if (op.accumulate) {
    _tile_loadd(0, c, c_stride);
    if constexpr (R > 1) _tile_loadd(1, c + c_step, c_stride);
    if constexpr (R > 2) _tile_loadd(2, c + 2 * c_step, c_stride);
    if constexpr (R > 3) _tile_loadd(3, c + 3 * c_step, c_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < op.k; k += kTileDepth, b += kTile * op.b_pitch) {
    _tile_loadd(7, b, b_stride);
    _tile_loadd(4, a + k, a_stride);
    _tile_dpbf16ps(0, 4, 7);
    if constexpr (R > 1) {
      _tile_loadd(5, a + k + a_step, a_stride);
      _tile_dpbf16ps(1, 5, 7);
    }
    if constexpr (R > 2) {
      _tile_loadd(6, a + k + 2 * a_step, a_stride);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (R > 3) {
      _tile_loadd(4, a + k + 3 * a_step, a_stride);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, c, c_stride);
  if constexpr (R > 1) _tile_stored(1, c + c_step, c_stride);
  if constexpr (R > 2) _tile_stored(2, c + 2 * c_step, c_stride);
  if constexpr (R > 3) _tile_stored(3, c + 3 * c_step, c_stride);
}

/// One tile of rows from m, columns n..end-1.
void across_all(const BlockDot& op, int m, int n, int end) {
  for (; n + 4 * kTile <= end; n += 4 * kTile) across<4>(op, m, n);
  switch ((end - n) / kTile) {
    case 1: return across<1>(op, m, n);
    case 2: return across<2>(op, m, n);
    case 3: return across<3>(op, m, n);
    default: return;
  }
}

/// `tiles` (1..4) tiles of rows from m, one of columns from n.
void down_all(const BlockDot& op, int m, int tiles, int n) {
  switch (tiles) {
    case 1: return down<1>(op, m, n);
    case 2: return down<2>(op, m, n);
    case 3: return down<3>(op, m, n);
    default: return down<4>(op, m, n);
  }
}

/// `tiles` (1..4) full tiles of rows from m.
void full_rows(const BlockDot& op, int m, int tiles) {
  const int pairs_end = op.n / (2 * kTile) * (2 * kTile);
  int tile = 0;
  for (; tile + 2 <= tiles; tile += 2) {
    for (int n = 0; n < pairs_end; n += 2 * kTile) square(op, m + tile * kTile, n);
  }
  if (tile < tiles) across_all(op, m + tile * kTile, 0, pairs_end);
  if (pairs_end < op.n) down_all(op, m, tiles, pairs_end);
}

void block_dot_amx(const BlockDot& op) {
  Tiles tiles;
  const int full_end = op.m / kTile * kTile;
  if (full_end > 0) tiles.configure(kTile, kTile);
  for (int m = 0; m < full_end; m += 4 * kTile) full_rows(op, m, std::min((full_end - m) / kTile, 4));
  if (full_end < op.m) {
    tiles.configure(op.m - full_end, kTile);
    across_all(op, full_end, 0, op.n);
  }
}

// ---- rows_dot: block_dot with the matrix as `a` and up to 16 vectors packed as `b` ----

/// Transposes 16 registers of 16 lanes.
inline void transpose(__m512 (&v)[16]) {
  __m512 quads[16];  // quads[4 i + j], block l: column 4 l + j of the rows 4 i..4 i + 3
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[i], v[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(v[i], v[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(v[i + 2], v[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[i + 2], v[i + 3]));
    quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    quads[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    quads[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    quads[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 16
  for (int j = 0; j < 4; ++j) {
    const __m512 even_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0xDD);
    const __m512 even_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0xDD);
    v[j] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    v[4 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    v[8 + j] = _mm512_shuffle_f32x4(even_low, even_high, 0xDD);
    v[12 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xDD);
  }
}

/// Vectors b..b+count-1 as [k/2][16][2], zero from `count` on.
void pack_vectors(const RowsDot& op, int b, int count, uint32_t* packed) {
  for (int k = 0; k < op.k; k += kTileDepth) {
    __m512 pairs[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
      pairs[i] = i < count ? _mm512_loadu_ps(op.x + (b + i) * op.x_pitch + k) : _mm512_setzero_ps();
    }
    transpose(pairs);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) _mm512_store_ps(packed + (k / 2 + i) * kTile, pairs[i]);
  }
}

/// Writes sums [rows][16] to y, rows n..n+rows-1 of `count` vectors from b. The buffer has whole tiles of rows.
void unpack_sums(const float* sums, int rows, const RowsDot& op, int n, int b, int count) {
  for (int row = 0; row < rows; row += kTile) {
    __m512 lanes[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) lanes[i] = _mm512_load_ps(sums + (row + i) * kTile);
    transpose(lanes);
    const __mmask16 written = __mmask16(0xFFFFu >> (kTile - std::min(kTile, rows - row)));
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
      if (i < count) _mm512_mask_storeu_ps(op.y + (b + i) * op.y_pitch + n + row, written, lanes[i]);
    }
  }
}

/// One vector: it is its own packed form, and its sums are stored in place.
void one_vector(const RowsDot& op, int b) {
  const BlockDot product{.a = op.w,
                         .a_pitch = op.w_pitch,
                         .m = op.n,
                         .b = op.x + b * op.x_pitch,
                         .b_pitch = 2,
                         .n = kTile,
                         .k = op.k,
                         .c = op.y + b * op.y_pitch,
                         .c_pitch = 1,
                         .accumulate = false};
  Tiles tiles;
  const int full_end = op.n / kTile * kTile;
  if (full_end > 0) tiles.configure(kTile, 1);
  for (int n = 0; n < full_end; n += 4 * kTile) down_all(product, n, std::min((full_end - n) / kTile, 4), 0);
  if (full_end < op.n) {
    tiles.configure(op.n - full_end, 1);
    across<1>(product, full_end, 0);
  }
}

/// Up to 16 vectors, packed; 64 rows of the matrix at a time.
void some_vectors(const RowsDot& op, int b, int count) {
  constexpr int kRows = 4 * kTile;
  alignas(64) uint32_t packed[kMaxDepth / 2 * kTile];
  alignas(64) float sums[kRows * kTile];
  pack_vectors(op, b, count, packed);
  BlockDot product{.a = op.w,
                   .a_pitch = op.w_pitch,
                   .m = op.n,
                   .b = reinterpret_cast<const BFloat16*>(packed),
                   .b_pitch = 2 * kTile,
                   .n = kTile,
                   .k = op.k,
                   .c = sums,
                   .c_pitch = kTile,
                   .accumulate = false};
  Tiles tiles;
  tiles.configure(kTile, kTile);
  for (int n = 0; n < op.n; n += kRows, product.a += kRows * op.w_pitch) {
    const int rows = std::min(op.n - n, kRows);
    if (rows >= kTile) down_all(product, 0, rows / kTile, 0);
    if (rows % kTile != 0) {
      tiles.configure(rows % kTile, kTile);
      across<1>(product, rows / kTile * kTile, 0);
    }
    unpack_sums(sums, rows, op, n, b, count);
  }
}

void rows_dot_amx(const RowsDot& op) {
  if (op.k > kMaxDepth) return rows_dot_avx512(op);
  // Sixteen vectors at a time. Where there are more, a chunk of rows comes back from L2 for each sixteen.
  const int chunk = op.b <= kTile ? op.n : 256;
  for (int n = 0; n < op.n; n += chunk) {
    RowsDot part = op;
    part.w += n * op.w_pitch;
    part.n = std::min(op.n - n, chunk);
    part.y += n;
    for (int b = 0; b < op.b; b += kTile) {
      const int count = std::min(op.b - b, kTile);
      if (count == 1) {
        one_vector(part, b);
      } else {
        some_vectors(part, b, count);
      }
    }
  }
}

}  // namespace
}  // namespace dsacore::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace dsacore::cpu {

const Bf16Ops* amx_ops() {
  if (!acquire_amx()) return nullptr;
  static const Bf16Ops ops{"amx", rows_dot_amx, block_dot_amx, avx512_bf16_ops()->decode_e4m3};
  return &ops;
}

}  // namespace dsacore::cpu

#else

namespace dsacore::cpu {

const Bf16Ops* amx_ops() { return nullptr; }

}  // namespace dsacore::cpu

#endif
