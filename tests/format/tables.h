// Number formats of spec 3 a second time, by other means than src/format: tables of all values, and rounding by search.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace dsacore::tables {

/// Values of a format's codes 0..n-1 in ascending order, and the rounding of any magnitude to them.
struct Magnitudes {
  std::vector<double> values;  ///< of the codes without a sign
  double end;  ///< where the code after the last would be; rounds to the last, or to `last + 1` if `overflows`
  bool overflows = false;

  /// Nearest code, ties to the even one, by search.
  int round(double magnitude) const {
    const auto above = std::upper_bound(values.begin(), values.end(), magnitude);
    const int code = int(above - values.begin()) - 1;
    const bool last = above == values.end();
    if (last && !overflows) return code;
    const double middle =
        (values[size_t(code)] + (last ? end : *above)) / 2;  // exact: neighbours share an exponent range
    return magnitude > middle || (magnitude == middle && code % 2 == 1) ? code + 1 : code;
  }
};

inline const Magnitudes& e4m3() {
  static const Magnitudes magnitudes = [] {
    Magnitudes m{{}, 480};
    for (int exponent = 0; exponent < 16; ++exponent) {
      for (int mantissa = 0; mantissa < 8; ++mantissa) {
        if (exponent == 15 && mantissa == 7) continue;  // NaN
        m.values.push_back(exponent == 0 ? mantissa / 512.0 : std::ldexp(1 + mantissa / 8.0, exponent - 7));
      }
    }
    return m;
  }();
  return magnitudes;
}

inline const Magnitudes& e2m1() {
  static const Magnitudes magnitudes{{0, 0.5, 1, 1.5, 2, 3, 4, 6}, 8};
  return magnitudes;
}

inline const Magnitudes& bf16() {
  static const Magnitudes magnitudes = [] {
    Magnitudes m{{}, std::ldexp(1, 128), true};
    for (int exponent = 0; exponent < 255; ++exponent) {
      for (int mantissa = 0; mantissa < 128; ++mantissa) {
        m.values.push_back(exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134));
      }
    }
    return m;
  }();
  return magnitudes;
}

inline uint8_t to_e4m3(double x) {
  if (std::isnan(x)) return 0x7F;
  return uint8_t(e4m3().round(std::fabs(x)) | (std::signbit(x) ? 0x80 : 0));
}
inline double from_e4m3(uint8_t code) {
  if ((code & 0x7F) == 0x7F) return std::numeric_limits<double>::quiet_NaN();
  return (code & 0x80 ? -1.0 : 1.0) * e4m3().values[code & 0x7F];
}

inline uint8_t to_e2m1(double x) {
  if (std::isnan(x)) return 7;
  return uint8_t(e2m1().round(std::fabs(x)) | (std::signbit(x) ? 8 : 0));
}
inline double from_e2m1(uint8_t code) { return (code & 8 ? -1.0 : 1.0) * e2m1().values[code & 7]; }

/// Bits of a number that is not NaN.
inline uint16_t to_bf16(double x) { return uint16_t(bf16().round(std::fabs(x)) | (std::signbit(x) ? 0x8000 : 0)); }

/// The least power of two, from 2^-127 on, that is not below `x` (finite, positive).
inline double power_of_two_from(double x) {
  double power = std::ldexp(1, -127);
  while (power < x) power *= 2;
  return power;
}

}  // namespace dsacore::tables
