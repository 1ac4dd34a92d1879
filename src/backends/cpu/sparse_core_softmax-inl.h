// Logits -> p of a split, and the last arithmetic on latents of the sparse core.
//
// logits [keys, heads] FP32 -> largest of each head -> p = exp2((logit - largest) * scale) -> BF16 pairs of tokens
// -> p [heads, keys]. Heads are vector lanes, so a NaN stays with its head.

// Per-target include guard
#if defined(DSACORE_CPU_SPARSE_CORE_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_CPU_SPARSE_CORE_SOFTMAX_INL_H_
#undef DSACORE_CPU_SPARSE_CORE_SOFTMAX_INL_H_
#else
#define DSACORE_CPU_SPARSE_CORE_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "backends/cpu/numeric-inl.h"
#include "backends/cpu/sparse_core_keys-inl.h"
#include "backends/cpu/sparse_core_layout.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using CoreF = hn::CappedTag<float, kHeadStep>;
using CoreU = hn::RebindToUnsigned<CoreF>;
using CoreI = hn::RebindToSigned<CoreF>;
using CoreV = hn::Vec<CoreF>;

/// 2^x for x <= 0, to 3e-7 relative, exact for whole x; 0 below 2^-126, NaN for NaN.
HWY_INLINE CoreV exp2_negative(CoreV x) {
  const CoreF d;
  const CoreI di;
  const auto whole = hn::NearestInt(x);
  const auto f = hn::Sub(x, hn::ConvertTo(d, whole));
  // 2^f on [-1/2, 1/2], minimax in the relative error.
  auto y = hn::MulAdd(hn::Set(d, 0x1.5bba14p-10f), f, hn::Set(d, 0x1.3cea88p-7f));
  y = hn::MulAdd(y, f, hn::Set(d, 0x1.c6b752p-5f));
  y = hn::MulAdd(y, f, hn::Set(d, 0x1.ebf9bcp-3f));
  y = hn::MulAdd(y, f, hn::Set(d, 0x1.62e42ap-1f));
  y = hn::MulAdd(y, f, hn::Set(d, 1.0f));
  const auto power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(whole, hn::Set(di, 127))));
  const auto tiny = hn::Lt(x, hn::Set(d, -126.0f));
  return hn::IfThenElse(tiny, hn::Zero(d), hn::Mul(y, power));
}

/// What softmax does for one vector of heads.
struct SoftmaxColumn {
  float* logits;  ///< [keys, padded heads], from this vector on
  int64_t pitch;  ///< padded heads
  int keys;       ///< >= 1
};

HWY_INLINE CoreV column_max(const SoftmaxColumn& column) {
  const CoreF d;
  auto max = hn::Load(d, column.logits);
  for (int t = 1; t < column.keys; ++t) max = hn::Max(max, hn::Load(d, column.logits + t * column.pitch));
  return max;
}

/// p of all keys -> BF16 pairs `words` [packed keys / 2, padded heads], zero past the last key; sums of p and of
/// rounded p.
HWY_INLINE void column_pairs(const SoftmaxColumn& column, CoreV max, float scale, int packed_keys, uint32_t* words,
                             float* sum, float* rounded_sum) {
  const CoreF d;
  const CoreU du;
  const auto factor = hn::Set(d, scale);
  auto sums = hn::Zero(d), rounded_sums = hn::Zero(d);
  const auto next = [&](int t) {
    const auto p = exp2_negative(hn::Mul(hn::Sub(hn::Load(d, column.logits + t * column.pitch), max), factor));
    const auto rounded = bf16_upper(d, p);
    sums = hn::Add(sums, p);
    rounded_sums = hn::Add(rounded_sums, hn::BitCast(d, rounded));
    return rounded;
  };
  int t = 0;
  for (; t + 2 <= column.keys; t += 2) {
    const auto even = next(t);
    const auto odd = next(t + 1);
    hn::Store(hn::Or(hn::ShiftRight<16>(even), odd), du, words + t / 2 * column.pitch);
  }
  if (t < column.keys) {
    hn::Store(hn::ShiftRight<16>(next(t)), du, words + t / 2 * column.pitch);
    t += 2;
  }
  for (; t < packed_keys; t += 2) hn::Store(hn::Zero(du), du, words + t / 2 * column.pitch);
  hn::Store(sums, d, sum);
  hn::Store(rounded_sums, d, rounded_sum);
}

/// Pairs of tokens -> p [padded heads, kSplitKeys].
inline void transpose_p(const CoreScratch& s, int padded_heads, int packed_keys) {
  for (int pair = 0; pair < packed_keys / 2; pair += 4) {
    const uint16_t* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = reinterpret_cast<const uint16_t*>(s.words + (pair + i) * padded_heads);
    transpose_words(rows, padded_heads, &s.p[2 * pair].bits, kSplitKeys / 2);
  }
}

/// Softmax of a split's logits: p in `s.p`, largest logits and sums in `out`.
inline void softmax(const CoreScratch& s, int padded_heads, int keys, int packed_keys, float scale,
                    const SplitPartial& out) {
  const CoreF d;
  for (int h = 0; h < padded_heads; h += int(hn::Lanes(d))) {
    const SoftmaxColumn column{s.logits + h, padded_heads, keys};
    const auto max = column_max(column);
    hn::Store(max, d, out.max + h);
    column_pairs(column, max, scale, packed_keys, s.words + h, out.sum + h, out.rounded_sum + h);
  }
  transpose_p(s, padded_heads, packed_keys);
}

/// The same where tile scales are still to be folded in: p stays in `s.logits`, FP32.
inline void softmax_unrounded(const CoreScratch& s, int padded_heads, int keys, float scale, const SplitPartial& out) {
  const CoreF d;
  const auto factor = hn::Set(d, scale);
  for (int h = 0; h < padded_heads; h += int(hn::Lanes(d))) {
    const SoftmaxColumn column{s.logits + h, padded_heads, keys};
    const auto max = column_max(column);
    auto sum = hn::Zero(d);
    for (int t = 0; t < keys; ++t) {
      float* at = column.logits + t * column.pitch;
      const auto p = exp2_negative(hn::Mul(hn::Sub(hn::Load(d, at), max), factor));
      sum = hn::Add(sum, p);
      hn::Store(p, d, at);
    }
    hn::Store(max, d, out.max + h);
    hn::Store(sum, d, out.sum + h);
    hn::Store(sum, d, out.rounded_sum + h);
  }
}

/// p times the scales of one tile, as the sum of two BF16 numbers -> `s.p`: the first of them, or the second.
inline void scaled_p(const CoreScratch& s, int padded_heads, int keys, int packed_keys, int tile, bool second) {
  const CoreF d;
  const CoreU du;
  const auto largest = hn::Set(d, 0x1.FEp127f);  // of BF16
  for (int pair = 0; pair < packed_keys / 2; ++pair) {
    for (int h = 0; h < padded_heads; h += int(hn::Lanes(d))) {
      const auto half = [&](int t) {
        if (t >= keys) return hn::Zero(du);
        const auto x =
            hn::Mul(hn::Load(d, s.logits + t * padded_heads + h), hn::Set(d, s.scales[t * kScaleTiles + tile]));
        const auto first = bf16_upper(d, hn::Min(x, largest));
        return second ? bf16_upper(d, hn::Sub(x, hn::BitCast(d, first))) : first;
      };
      const auto even = half(2 * pair);
      const auto odd = half(2 * pair + 1);
      hn::Store(hn::Or(hn::ShiftRight<16>(even), odd), du, s.words + pair * padded_heads + h);
    }
  }
  transpose_p(s, padded_heads, packed_keys);
}

/// logits += sum over tiles of scale * part, for `keys` keys from `first` on; `s.parts` holds those keys alone.
inline void add_scaled_parts(const CoreScratch& s, int padded_heads, int first, int keys) {
  const CoreF d;
  for (int t = 0; t < keys; ++t) {
    const float* scales = s.scales + (first + t) * kScaleTiles;
    for (int h = 0; h < padded_heads; h += int(hn::Lanes(d))) {
      float* at = s.logits + (first + t) * padded_heads + h;
      auto logit = hn::Load(d, at);
      for (int tile = 0; tile < kScaleTiles; ++tile) {
        const auto part = hn::Load(d, s.parts + (tile * kKeyBlock + t) * padded_heads + h);
        logit = hn::MulAdd(hn::Set(d, scales[tile]), part, logit);
      }
      hn::Store(logit, d, at);
    }
  }
}

/// One head: (sum over splits of weight * latent) * factor -> BF16 [512], in the order of the columns again.
inline void store_latent(const SplitPartial* partials, int splits, int head, const float* weights, float factor,
                         BFloat16* out) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Repartition<int16_t, decltype(d)> di16;
  const hn::Repartition<uint16_t, decltype(d)> du16;
  const int lanes = int(hn::Lanes(d));
  const auto merged = [&](int column) {
    auto sum = hn::Zero(d);
    for (int split = 0; split < splits; ++split) {
      const float* latent = partials[split].latent + int64_t(head) * kLatent + column;
      sum = hn::MulAdd(hn::Set(d, weights[split]), hn::LoadU(d, latent), sum);
    }
    return hn::ShiftRight<16>(hn::BitCast(di, bf16_upper(d, hn::Mul(sum, hn::Set(d, factor)))));
  };
  for (int i = 0; i < kLatent; i += 2 * lanes) {
    // Packing joins the lanes of each 128-bit block, which undoes the order of `pack_values`.
    const auto columns = hn::ReorderDemote2To(di16, merged(i), merged(i + lanes));
    hn::StoreU(hn::BitCast(du16, columns), du16, &out[i].bits);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // DSACORE_CPU_SPARSE_CORE_SOFTMAX_INL_H_
