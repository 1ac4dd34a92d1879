// Bf16Ops: the three inner operations that every stage of the cpu backend is built from. The stages around them
// (decoding, norms, epilogues) are Highway; these are what an instruction set can do much better than Highway's common
// denominator, so each instruction set brings its own table: Highway targets (bf16_ops.cc), AVX512-BF16
// (bf16_ops_avx512.cc), AMX (bf16_ops_amx.cc).
//
// Sums are FP32 with an order that is fixed by the operation's sizes alone: element (m, n) depends on row m of `a` and
// column n of `b` only, never on its neighbours, on m, on n, on alignment or on threads. NaN and infinity in a row stay
// in that row.
#pragma once

#include <cstdint>
#include <string_view>

#include "dsacore/formats.h"

namespace dsacore::cpu {

/// Vectors against the rows of a matrix: `y[b][n] = sum_k x[b][k] * w[n][k]`. For few vectors and a matrix that is read
/// once.
struct RowsDot {
  const BFloat16* w;  ///< [n, k], row-major, `w_pitch` elements apart
  int64_t w_pitch;
  int n;              ///< >= 1
  const BFloat16* x;  ///< [b, k]
  int64_t x_pitch;
  int b;     ///< >= 1; tuned to 16
  int k;     ///< multiple of 128
  float* y;  ///< out [b, n]
  int64_t y_pitch;
};

/// Matrix product `c[m][n] (+)= sum_k a[m][k] * b[k][n]` with `b` packed in pairs along k.
struct BlockDot {
  const BFloat16* a;  ///< [m, k], row-major, `a_pitch` elements apart; 4-byte aligned rows
  int64_t a_pitch;
  int m;              ///< >= 1
  const BFloat16* b;  ///< [k/2][n][2], `b_pitch` elements between k pairs (>= 2n); 64-byte aligned rows
  int64_t b_pitch;
  int n;     ///< multiple of 16
  int k;     ///< multiple of 32
  float* c;  ///< [m, n], `c_pitch` elements apart
  int64_t c_pitch;
  bool accumulate;  ///< add to c (else overwrite)
};

struct Bf16Ops {
  std::string_view name;
  void (*rows_dot)(const RowsDot&);
  void (*block_dot)(const BlockDot&);
  /// e4m3 codes to BF16, exact, NaN codes to NaN; `n` a multiple of 64; no alignment needed.
  void (*decode_e4m3)(const uint8_t* codes, BFloat16* values, int64_t n);
};

/// Of the Highway target in force (hwy::SetSupportedTargetsForTest), see targets.cpp.
const Bf16Ops& highway_ops();
/// Null where the compiler, or the machine, lacks them.
const Bf16Ops* avx512_bf16_ops();
const Bf16Ops* amx_ops();

}  // namespace dsacore::cpu
