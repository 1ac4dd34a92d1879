// Bf16Ops by AVX512-BF16: VDPBF16PS multiplies 16 pairs of BF16 and adds both products to 16 FP32 sums.
//
// Every element of a result has one register lane (block_dot) or one register (rows_dot) as its sum, and k goes
// upwards, in every register tile: that is what makes an element independent of its neighbours. Tiles differ in size
// only.
#include "backends/cpu/bf16_ops_avx512.h"

#if defined(__x86_64__)

#include <algorithm>
#include <array>
#include <cstring>

#include "backends/cpu/cpu_features.h"
#include "backends/cpu/x86_intrinsics.h"
#include "format/numeric.h"

namespace dsacore::cpu {
namespace {

/// The low (`byte` 0) or high (`byte` 1) bytes of the BF16 values of the codes 0..127.
constexpr std::array<uint8_t, 128> decode_table(int byte) {
  std::array<uint8_t, 128> table{};
  for (int code = 0; code < 128; ++code) {
    table[size_t(code)] = uint8_t(to_bf16(e4m3_to_float(uint8_t(code))).bits >> (8 * byte));
  }
  return table;
}
alignas(64) constexpr std::array<uint8_t, 128> kDecodeLow = decode_table(0);
alignas(64) constexpr std::array<uint8_t, 128> kDecodeHigh = decode_table(1);

}  // namespace
}  // namespace dsacore::cpu

// From here on functions may use these instructions; cpu_features.h says whether they may be called.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), \
                                 apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif

namespace dsacore::cpu {
namespace {

inline __m512bh load(const BFloat16* p) { return __m512bh(_mm512_loadu_si512(p)); }
inline __m512bh broadcast_pair(const BFloat16* p) {
  int pair;
  std::memcpy(&pair, p, sizeof(pair));
  return __m512bh(
      _mm512_broadcastd_epi32(_mm_cvtsi32_si128(pair)));  // Clang 16 does not survive _mm512_set1_epi32 here
}

// GCC keeps an array of sums in registers only where every loop over it is unrolled early: hence the pragmas.

/// Sums the lanes of 16 registers: lane i of the result is the sum of v[i]. The order within a register is the same for
/// all.
inline __m512 sum_lanes(const __m512 (&v)[16]) {
  __m512 quads[4];
#pragma GCC unroll 32
  for (int i = 0; i < 4; ++i) {
    const __m512 ab =
        _mm512_add_ps(_mm512_unpacklo_ps(v[4 * i], v[4 * i + 1]), _mm512_unpackhi_ps(v[4 * i], v[4 * i + 1]));
    const __m512 cd =
        _mm512_add_ps(_mm512_unpacklo_ps(v[4 * i + 2], v[4 * i + 3]), _mm512_unpackhi_ps(v[4 * i + 2], v[4 * i + 3]));
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  __m512 halves[2];
#pragma GCC unroll 32
  for (int i = 0; i < 2; ++i) {
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xDD));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                       _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
}

// ---- rows_dot ----

/// R rows of the matrix with B vectors, R * B <= 16. `ahead` elements further on lie the rows of the next tile, which
/// are asked for meanwhile: a tile's rows are short streams, over before the hardware's prefetcher has found its
/// stride.
template <int R, int B>
void rows_tile(const RowsDot& op, int n, int b, int64_t ahead) {
  const BFloat16* w = op.w + n * op.w_pitch;
  const BFloat16* x = op.x + b * op.x_pitch;
  __m512 sums[16];
#pragma GCC unroll 32
  for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
  for (int k = 0; k < op.k; k += 32) {
    __m512bh rows[R];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
      rows[r] = load(w + r * op.w_pitch + k);
      _mm_prefetch(reinterpret_cast<const char*>(w + r * op.w_pitch + k + ahead), _MM_HINT_T1);
    }
#pragma GCC unroll 32
    for (int i = 0; i < B; ++i) {
      const __m512bh vector = load(x + i * op.x_pitch + k);
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) sums[i * R + r] = _mm512_dpbf16_ps(sums[i * R + r], rows[r], vector);
    }
  }
  alignas(64) float sum[16];
  _mm512_store_ps(sum, sum_lanes(sums));
#pragma GCC unroll 32
  for (int i = 0; i < B; ++i) std::copy_n(sum + i * R, R, op.y + (b + i) * op.y_pitch + n);
}

/// Rows n..end-1 with B vectors.
template <int R, int B>
void rows_tiles(const RowsDot& op, int n, int end, int b) {
  for (; n + R <= end; n += R) rows_tile<R, B>(op, n, b, n + 2 * R <= op.n ? R * op.w_pitch : 0);
  if constexpr (R > 1) {
    if (n < end) rows_tiles<R / 2, B>(op, n, end, b);
  }
}

void rows_pass(const RowsDot& op, int n, int end, int b) {
  switch (op.b - b) {
    case 1: return rows_tiles<16, 1>(op, n, end, b);
    case 2: return rows_tiles<8, 2>(op, n, end, b);
    case 3: return rows_tiles<5, 3>(op, n, end, b);
    case 4: return rows_tiles<4, 4>(op, n, end, b);
    case 5: return rows_tiles<3, 5>(op, n, end, b);
    case 6: return rows_tiles<2, 6>(op, n, end, b);
    case 7: return rows_tiles<2, 7>(op, n, end, b);
    default: return rows_tiles<2, 8>(op, n, end, b);
  }
}

// ---- block_dot ----

/// R rows from m with C vectors of columns from n.
template <int R, int C>
void block_tile(const BlockDot& op, int m, int n) {
  const BFloat16* a = op.a + m * op.a_pitch;
  const BFloat16* b = op.b + 2 * n;
  float* c = op.c + m * op.c_pitch + n;
  __m512 sums[R][C];
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
    for (int i = 0; i < C; ++i)
      sums[r][i] = op.accumulate ? _mm512_loadu_ps(c + r * op.c_pitch + 16 * i) : _mm512_setzero_ps();
  }
  for (int k = 0; k < op.k; k += 2, b += op.b_pitch) {
    __m512bh columns[C];
#pragma GCC unroll 32
    for (int i = 0; i < C; ++i) columns[i] = load(b + 32 * i);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = broadcast_pair(a + r * op.a_pitch + k);
#pragma GCC unroll 32
      for (int i = 0; i < C; ++i) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], pair, columns[i]);
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
    for (int i = 0; i < C; ++i) _mm512_storeu_ps(c + r * op.c_pitch + 16 * i, sums[r][i]);
  }
}

/// R rows from m with the columns from n on, C vectors at a time, then fewer.
template <int R, int C>
void block_columns(const BlockDot& op, int m, int n) {
  for (; n + 16 * C <= op.n; n += 16 * C) block_tile<R, C>(op, m, n);
  if constexpr (C > 1) {
    if (n < op.n) block_columns<R, C / 2>(op, m, n);
  }
}

void block_dot_avx512(const BlockDot& op) {
  // Up to 24 sums of the 32 registers: the more, the fewer loads each product needs and the better its latency is
  // hidden.
  int m = 0;
  if (op.n == 16) {
    for (; m + 24 <= op.m; m += 24) block_columns<24, 1>(op, m, 0);
  }
  for (; m + 12 <= op.m; m += 12) block_columns<12, 2>(op, m, 0);
  if (m + 8 <= op.m) block_columns<8, 2>(op, m, 0), m += 8;
  if (m + 6 <= op.m) block_columns<6, 4>(op, m, 0), m += 6;
  if (m + 4 <= op.m) block_columns<4, 4>(op, m, 0), m += 4;
  if (m + 2 <= op.m) block_columns<2, 8>(op, m, 0), m += 2;
  if (m < op.m) block_columns<1, 8>(op, m, 0);
}

}  // namespace

void rows_dot_avx512(const RowsDot& op) {
  // Eight vectors at a time. Where there are more, a chunk of rows comes back from L2 for each eight.
  const int chunk = op.b <= 8 ? op.n : 32;
  for (int n = 0; n < op.n; n += chunk) {
    for (int b = 0; b < op.b; b += 8) rows_pass(op, n, std::min(n + chunk, op.n), b);
  }
}

void decode_e4m3_avx512bw(const uint8_t* codes, BFloat16* values, int64_t n) {
  // BF16 of 0..7 times 2^-9: what codes below 8 are.
  const __m512i subnormals =
      _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
  const __m512i low7 = _mm512_set1_epi16(0x7F);
  for (int64_t i = 0; i < n; i += 32) {
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
    const __m512i magnitude = _mm512_and_si512(code, low7);
    const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(low7, code), 8);
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 is_subnormal = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
    // Bytes 2m and 2m + 1 of the table.
    const __m512i bytes =
        _mm512_add_epi16(_mm512_mullo_epi16(magnitude, _mm512_set1_epi16(0x0202)), _mm512_set1_epi16(0x0100));
    const __m512i subnormal = _mm512_shuffle_epi8(subnormals, bytes);
    value = _mm512_mask_mov_epi16(value, is_subnormal, subnormal);
    value = _mm512_mask_mov_epi16(value, _mm512_cmpeq_epi16_mask(magnitude, low7), _mm512_set1_epi16(0x7FC0));
    _mm512_storeu_si512(values + i, _mm512_or_si512(value, sign));
  }
}

__attribute__((target("avx512vbmi"))) void decode_e4m3_vbmi(const uint8_t* codes, BFloat16* values, int64_t n) {
  const __m512i low0 = _mm512_load_si512(kDecodeLow.data()), low1 = _mm512_load_si512(kDecodeLow.data() + 64);
  const __m512i high0 = _mm512_load_si512(kDecodeHigh.data()), high1 = _mm512_load_si512(kDecodeHigh.data() + 64);
  // Unpacking works within 16 bytes, so the first half of the codes goes to the lower eight bytes of each 16.
  const __m512i halves = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i sign_bit = _mm512_set1_epi8(char(0x80));
  for (int64_t i = 0; i < n; i += 64) {
    const __m512i code = _mm512_permutexvar_epi64(halves, _mm512_loadu_si512(codes + i));
    const __m512i low = _mm512_permutex2var_epi8(low0, code, low1);  // by the code without its sign
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, code, high1);
    const __m512i high = _mm512_or_si512(magnitude, _mm512_and_si512(code, sign_bit));
    _mm512_storeu_si512(values + i, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(values + i + 32, _mm512_unpackhi_epi8(low, high));
  }
}

}  // namespace dsacore::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace dsacore::cpu {

const Bf16Ops* avx512_bf16_ops() {
  static const Bf16Ops ops{"avx512_bf16", rows_dot_avx512, block_dot_avx512,
                           has_avx512_vbmi() ? decode_e4m3_vbmi : decode_e4m3_avx512bw};
  return has_avx512_bf16() ? &ops : nullptr;
}

}  // namespace dsacore::cpu

#else

namespace dsacore::cpu {

const Bf16Ops* avx512_bf16_ops() { return nullptr; }

}  // namespace dsacore::cpu

#endif
