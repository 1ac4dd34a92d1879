// Number formats of spec 3, bit for bit, for host and device code: BF16, e4m3, e2m1, ue8m0. Plain bit arithmetic, so
// that the compiler's rounding mode and the hardware's conversions play no part; kernels that use hardware conversions
// are tested against these.
#pragma once

#include <cstdint>

#include "dsacore/formats.h"
#include "dsacore/host_device.h"

namespace dsacore {

DSACORE_HD constexpr uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
DSACORE_HD constexpr uint64_t bits_of(double x) { return __builtin_bit_cast(uint64_t, x); }
DSACORE_HD constexpr float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
DSACORE_HD constexpr bool is_nan(float x) { return (bits_of(x) & 0x7FFFFFFFu) > 0x7F800000u; }
DSACORE_HD constexpr float magnitude(float x) { return float_of(bits_of(x) & 0x7FFFFFFFu); }

// ---- BF16 ----

DSACORE_HD constexpr float to_float(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }

/// To nearest even; NaN becomes a quiet NaN of its sign.
DSACORE_HD constexpr BFloat16 to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if (is_nan(x)) return {uint16_t(((bits >> 16) & 0x8000u) | 0x7FC0u)};
  return {uint16_t((uint64_t(bits) + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

/// One rounding from FP64: a float that lands on the midpoint of two BF16 values is first moved to the side it came
/// from.
DSACORE_HD constexpr BFloat16 to_bf16(double x) {
  const float f = float(x);
  uint32_t bits = bits_of(f);
  if ((bits & 0xFFFFu) == 0x8000u && !is_nan(f)) {
    const double exact = x < 0 ? -x : x;
    const double rounded = double(magnitude(f));
    if (exact > rounded) ++bits;
    if (exact < rounded) --bits;
  }
  return to_bf16(float_of(bits));
}

// ---- e4m3 ----

inline constexpr float kE4m3Max = 448.0f;
inline constexpr uint8_t kE4m3Nan = 0x7F;

/// Both 0x7F and 0xFF are NaN.
DSACORE_HD constexpr float e4m3_to_float(uint8_t code) {
  const uint32_t sign = uint32_t(code & 0x80) << 24;
  const uint32_t mag = code & 0x7F;
  if (mag == 0x7F) return float_of(sign | 0x7FC00000u);
  if (mag < 8) {  // subnormal: mag * 2^-9
    const float value = float(mag) * 0x1p-9f;
    return float_of(bits_of(value) | sign);
  }
  return float_of(sign | ((mag << 20) + (120u << 23)));
}

/// To nearest even, saturated to +-448, infinities too; NaN becomes 0x7F; subnormals and the sign of zero are kept.
DSACORE_HD constexpr uint8_t to_e4m3(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t mag = bits & 0x7FFFFFFFu;
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (mag > 0x7F800000u) return kE4m3Nan;
  if (mag < 0x3C800000u) {  // below 2^-6: adding 2^14 leaves multiples of 2^-9, rounded to nearest even
    const float shifted = float_of(mag) + 0x1p14f;
    return uint8_t(sign | (bits_of(shifted) - bits_of(0x1p14f)));
  }
  const uint32_t code = ((mag + 0x7FFFFu + ((mag >> 20) & 1u)) >> 20) - (120u << 3);
  return uint8_t(sign | (code < 0x7Eu ? code : 0x7Eu));
}

// ---- e2m1 ----

/// Of the low nibble.
DSACORE_HD constexpr float e2m1_to_float(uint8_t code) {
  const uint32_t sign = uint32_t(code & 8) << 28;
  const uint32_t mag = code & 7;
  const float value = mag < 2 ? float(mag) * 0.5f : float_of((mag << 22) + (126u << 23));
  return float_of(bits_of(value) | sign);
}

/// To nearest, ties to the even code, saturated; the sign of zero is kept; NaN becomes 7.
DSACORE_HD constexpr uint8_t to_e2m1(float x) {
  if (is_nan(x)) return 7;
  const float mag = magnitude(x);
  const uint8_t code = uint8_t((mag > 0.25f) + (mag >= 0.75f) + (mag > 1.25f) + (mag >= 1.75f) + (mag > 2.5f) +
                               (mag >= 3.5f) + (mag > 5.0f));
  return uint8_t(code | (bits_of(x) >> 31 << 3));
}

// ---- ue8m0 ----

/// Biased exponent of 2^ceil(log2 x), from the bits of x >= 0; infinity and NaN give 255.
DSACORE_HD constexpr uint8_t ue8m0_ceil(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t exponent = ((bits >> 23) & 0xFFu) + ((bits & 0x7FFFFFu) != 0 ? 1u : 0u);
  return uint8_t(exponent < 255u ? exponent : 255u);
}

/// 2^(byte - 127); 255 is NaN.
DSACORE_HD constexpr float ue8m0_to_float(uint8_t byte) {
  if (byte == 0) return float_of(0x00400000u);
  return byte == 255 ? float_of(0x7FC00000u) : float_of(uint32_t(byte) << 23);
}

}  // namespace dsacore
