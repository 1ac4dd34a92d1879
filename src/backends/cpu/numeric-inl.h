// Vector forms of src/format/numeric.h for the stages of the cpu backend, bit for bit the same results: BF16 and e4m3
// from FP32. Included once per Highway target, after hwy/highway.h.
#if defined(DSACORE_BACKENDS_CPU_NUMERIC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_BACKENDS_CPU_NUMERIC_INL_H_
#undef DSACORE_BACKENDS_CPU_NUMERIC_INL_H_
#else
#define DSACORE_BACKENDS_CPU_NUMERIC_INL_H_
#endif

#include "format/numeric.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Bits that `to_bf16` gives, in the upper half of each lane; the lower half is zero. BitCast to FP32 it is the rounded
/// value.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> bf16_upper(D, hn::Vec<D> x) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::And(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF))), hn::Set(du, 0xFFFF0000));
  const auto quiet_nan = hn::Or(hn::And(bits, hn::Set(du, 0x80000000)), hn::Set(du, 0x7FC00000));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), quiet_nan, rounded);
}

/// `to_float(to_bf16(x))`.
template <class D>
HWY_INLINE hn::Vec<D> round_bf16(D d, hn::Vec<D> x) {
  return hn::BitCast(d, bf16_upper(d, x));
}

/// BF16 values as FP32, `Lanes(d)` of them.
template <class D>
HWY_INLINE hn::Vec<D> load_bf16(D d, const BFloat16* p) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, &p->bits))));
}

/// Rounds to BF16 and stores `Lanes(d)` values.
template <class D>
HWY_INLINE void store_bf16(D d, hn::Vec<D> x, BFloat16* p) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits =
      hn::BitCast(di, hn::ShiftRight<16>(bf16_upper(d, x)));  // 0..65535: the saturating demotion is exact
  hn::StoreU(hn::DemoteTo(d16, bits), d16, &p->bits);
}

/// `to_e4m3(x)`, one code 0..255 a lane.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> e4m3_codes(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x);
  const auto sign = hn::BitCast(di, hn::And(hn::ShiftRight<24>(bits), hn::Set(du, 0x80)));
  const auto mag = hn::And(hn::BitCast(di, bits), hn::Set(di, 0x7FFFFFFF));
  const auto odd = hn::And(hn::ShiftRight<20>(mag), hn::Set(di, 1));
  // Without overflow: the mantissa of a NaN is cut first, and a NaN's code is replaced below.
  const auto capped = hn::Min(mag, hn::Set(di, 0x7F800000));
  const auto rounded = hn::ShiftRight<20>(hn::Add(capped, hn::Add(odd, hn::Set(di, 0x7FFFF))));
  const auto normal = hn::Min(hn::Sub(rounded, hn::Set(di, 120 << 3)), hn::Set(di, 0x7E));
  const auto magic = hn::Set(d, 0x1p14f);  // adding it leaves multiples of 2^-9, rounded to nearest even
  const auto subnormal = hn::Sub(hn::BitCast(di, hn::Add(hn::BitCast(d, mag), magic)), hn::BitCast(di, magic));
  const auto is_small = hn::Lt(mag, hn::Set(di, 0x3C800000));  // below 2^-6, the least normal code
  const auto code = hn::Or(hn::IfThenElse(is_small, subnormal, normal), sign);
  return hn::IfThenElse(hn::RebindMask(di, hn::IsNaN(x)), hn::Set(di, kE4m3Nan), code);
}

/// `to_bf16` of `n` values; `n` a multiple of 16.
HWY_INLINE void round_to_bf16(const float* x, BFloat16* out, int n) {
  const hn::CappedTag<float, 16> d;
  for (int i = 0; i < n; i += int(hn::Lanes(d))) store_bf16(d, hn::LoadU(d, x + i), out + i);
}

/// `to_e4m3(to_float(to_bf16(x)) * factor)` of `n` values; `n` a multiple of 16.
HWY_INLINE void round_to_e4m3(const float* x, float factor, uint8_t* out, int n) {
  const hn::CappedTag<float, 16> d;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto f = hn::Set(d, factor);
  for (int i = 0; i < n; i += int(hn::Lanes(d))) {
    const auto codes = e4m3_codes(d, hn::Mul(round_bf16(d, hn::LoadU(d, x + i)), f));
    hn::StoreU(hn::DemoteTo(d8, codes), d8, out + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
