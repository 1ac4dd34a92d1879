// What the AMX operations take from the AVX512-BF16 ones, and the two ways to decode e4m3, for their test. x86-64 only.
#pragma once

#include "backends/cpu/bf16_ops.h"

namespace dsacore::cpu {

/// By AVX512-BF16.
void rows_dot_avx512(const RowsDot& op);
/// By arithmetic, AVX512-BW.
void decode_e4m3_avx512bw(const uint8_t* codes, BFloat16* values, int64_t n);
/// By table, AVX512-VBMI.
void decode_e4m3_vbmi(const uint8_t* codes, BFloat16* values, int64_t n);

}  // namespace dsacore::cpu
