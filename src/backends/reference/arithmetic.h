// FP64 arithmetic that the reference stages share. Values are decoded from their codes where they are read.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "format/numeric.h"

namespace dsacore::reference {

/// Values of the 256 e4m3 codes.
inline constexpr std::array<double, 256> kE4m3 = [] {
  std::array<double, 256> values{};
  for (int code = 0; code < 256; ++code) values[size_t(code)] = double(e4m3_to_float(uint8_t(code)));
  return values;
}();

inline double value_of(double x) { return x; }
inline double value_of(BFloat16 x) { return double(to_float(x)); }

/// `sum_i a[i] * b[i]` for `n` a multiple of 8. The order of the sum depends on `n` alone.
template <class A, class B>
double dot(const A* a, const B* b, int n) {
  double sums[8] = {};
  for (int i = 0; i < n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += value_of(a[i + j]) * value_of(b[i + j]);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// `out = (x * rsqrt(mean(x^2) + eps) * weight) ->bf16`, steps 1 and 5.
inline void rms_norm(const BFloat16* x, const BFloat16* weight, int n, double eps, BFloat16* out) {
  const double factor = 1.0 / std::sqrt(dot(x, x, n) / n + eps);
  for (int i = 0; i < n; ++i) out[i] = to_bf16(value_of(x[i]) * factor * value_of(weight[i]));
}

}  // namespace dsacore::reference
