// RMS norm of steps 1 and 5 of spec 4. Sums and products are FP64, so that the result is the correctly rounded BF16 but
// for ties of a double rounding; the sum has a fixed order for each instruction set.
#if defined(DSACORE_BACKENDS_CPU_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_BACKENDS_CPU_NORM_INL_H_
#undef DSACORE_BACKENDS_CPU_NORM_INL_H_
#else
#define DSACORE_BACKENDS_CPU_NORM_INL_H_
#endif

#include <cmath>

#include "backends/cpu/numeric-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

using NormTag = hn::CappedTag<double, 8>;

/// FP64 values of `Lanes(NormTag())` BF16 numbers.
HWY_INLINE hn::Vec<NormTag> load_f64(const BFloat16* p) {
  return hn::PromoteTo(NormTag(), load_bf16(hn::Rebind<float, NormTag>(), p));
}

inline double sum_of_squares(const BFloat16* x, int n) {
  const NormTag d;
  const int lanes = int(hn::Lanes(d));
  auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
  for (int i = 0; i < n; i += 4 * lanes) {
    const auto x0 = load_f64(x + i), x1 = load_f64(x + i + lanes);
    const auto x2 = load_f64(x + i + 2 * lanes), x3 = load_f64(x + i + 3 * lanes);
    s0 = hn::MulAdd(x0, x0, s0);
    s1 = hn::MulAdd(x1, x1, s1);
    s2 = hn::MulAdd(x2, x2, s2);
    s3 = hn::MulAdd(x3, x3, s3);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

/// `out = (x * rsqrt(mean(x^2) + eps) * w) ->bf16`; `n` a multiple of 128.
inline void rms_norm(const BFloat16* x, const BFloat16* w, int n, double eps, BFloat16* out) {
  const NormTag d;
  const hn::Rebind<float, NormTag> df;
  const auto r = hn::Set(d, 1.0 / std::sqrt(sum_of_squares(x, n) / n + eps));
  for (int i = 0; i < n; i += int(hn::Lanes(d))) {
    const auto y = hn::Mul(hn::Mul(load_f64(x + i), r), load_f64(w + i));
    store_bf16(df, hn::DemoteTo(df, y), out + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
