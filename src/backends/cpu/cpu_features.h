// What Highway does not look for in a processor: AVX512-BF16, AVX512-VBMI and AMX, and that the system keeps their
// registers. All false on other architectures than x86-64.
#pragma once

namespace dsacore::cpu {

/// AVX-512 F, BW, VL, DQ and BF16, with the system saving zmm registers.
bool has_avx512_bf16();
/// AVX512-VBMI, on top of `has_avx512_bf16`.
bool has_avx512_vbmi();
/// AMX-TILE and AMX-BF16 on top of `has_avx512_bf16`. The first call asks the system, once and for the whole process,
/// for the right to use tile registers; false also where it refuses.
bool acquire_amx();

}  // namespace dsacore::cpu
