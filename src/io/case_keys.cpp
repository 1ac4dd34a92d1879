#include "io/case_keys.h"

#include <algorithm>
#include <cmath>

#include "format/numeric.h"

namespace dsacore {
namespace {

/// Rounds in place to BF16. None of the values is a NaN.
void round_to_bf16(float* x, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]);
    x[i] = float_of((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
  }
}

/// A sum in a fixed order that compilers can vectorise.
template <class F>
float sum_of(int n, F term) {
  float lanes[Noise::kLanes] = {};
  for (int i = 0; i < n; i += Noise::kLanes) {
    for (int lane = 0; lane < Noise::kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int width = Noise::kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

void scale_row(float* x, int n, float by) {
  for (int i = 0; i < n; ++i) x[i] *= by;
}

/// 10^-8 .. 1, evenly over the exponents.
float tiny_factor(Rng& rng) {
  const uint32_t exponent = uint32_t(127 - 26 + rng.below(27));
  return float_of(exponent << 23);
}

}  // namespace

KeySource::KeySource(uint64_t seed, const CaseKinds& kinds, float eps, const float* kv_norm, const float* k_norm)
    : seed_(seed), kinds_(kinds), eps_(eps) {
  std::copy_n(kv_norm, kLatent, kv_norm_.begin());
  std::copy_n(k_norm, kIndexDim, k_weight_.begin());
  std::copy_n(k_norm + kIndexDim, kIndexDim, k_bias_.begin());
  Noise noise(part_seed(seed, CasePart::kCentres));
  for (auto& centre : centres_) {
    noise.heavy(centre.data(), kInputs);
    scale_row(centre.data(), kQueryRow, 0.7f);
    scale_row(centre.data() + kQueryRow, kIndexDim, 0.6f);
  }
  Rng rng(part_seed(seed, CasePart::kCentres, 1));
  gain_.fill(1.0f);
  for (int i = 0; i < 4; ++i) gain_[size_t(rng.below(kLatent))] = 7.0f;
  for (int i = 0; i < 2; ++i) gain_[size_t(kQueryRow + rng.below(kIndexDim))] = 4.0f;

  if (!kinds.any()) return;
  pool_.resize(kPool);
  Noise pool_noise(part_seed(seed, CasePart::kPool));
  for (int i = 0; i < kPool; ++i) {
    float inputs[kInputs];
    draw(pool_noise, i, inputs);
    finish(inputs, pool_[size_t(i)]);
  }
}

void KeySource::draw(Noise& noise, int cluster, float* inputs) const {
  noise.heavy(inputs, kInputs);
  const float* centre = centres_[size_t(cluster)].data();
  for (int i = 0; i < kInputs; ++i) inputs[i] = (inputs[i] + centre[i]) * gain_[size_t(i)];
}

/// Steps 5 and 8 of the specification, in FP32: near enough for a key that some earlier step wrote.
void KeySource::finish(float* inputs, KeyRow& out) const {
  round_to_bf16(inputs, kInputs);
  const float* wk = inputs + kQueryRow;

  const float square = sum_of(kLatent, [&](int i) { return inputs[i] * inputs[i]; });
  const float rms = 1.0f / std::sqrt(square / float(kLatent) + eps_);
  for (int i = 0; i < kLatent; ++i) out.c[i] = inputs[i] * rms * kv_norm_[size_t(i)];
  round_to_bf16(out.c, kLatent);
  for (int i = 0; i < kPe; ++i) out.pe[i] = to_bf16(inputs[kLatent + i]);

  const float mean = sum_of(kIndexDim, [&](int i) { return wk[i]; }) / float(kIndexDim);
  const float variance = sum_of(kIndexDim, [&](int i) { return (wk[i] - mean) * (wk[i] - mean); }) / float(kIndexDim);
  const float deviation = 1.0f / std::sqrt(variance + eps_);
  for (int i = 0; i < kIndexDim; ++i) out.k[i] = (wk[i] - mean) * deviation * k_weight_[size_t(i)] + k_bias_[size_t(i)];
  round_to_bf16(out.k, kIndexDim);
}

void KeySource::old_keys(int request, int64_t run, std::array<KeyRow, kRun>& out) const {
  Noise noise(part_seed(seed_, CasePart::kKeys, uint64_t(request), uint64_t(run)));
  Rng rng(part_seed(seed_, CasePart::kKeys, ~uint64_t(request), uint64_t(run)));
  const int cluster = int(rng.below(kCentres));
  for (KeyRow& key : out) {
    float inputs[kInputs];
    draw(noise, cluster, inputs);
    if (kinds_.any()) spoil_inputs(rng, inputs);
    finish(inputs, key);
    if (kinds_.any()) spoil_key(rng, key);
  }
}

void KeySource::spoil_inputs(Rng& rng, float* inputs) const {
  if (kinds_.magnitude && rng.chance(0.2f)) {
    const float by = tiny_factor(rng);
    scale_row(inputs, kLatent, by);
    scale_row(inputs + kQueryRow, kIndexDim, by);
  }
  if (kinds_.negzero) {
    for (int i = 0; i < kQueryRow; ++i) inputs[i] = rng.chance(0.05f) ? -0.0f : inputs[i];
  }
}

void KeySource::spoil_key(Rng& rng, KeyRow& key) const {
  const auto scale_all = [&](float by) {
    scale_row(key.c, kLatent, by);
    round_to_bf16(key.c, kLatent);
    for (BFloat16& pe : key.pe) pe = to_bf16(to_float(pe) * by);
    scale_row(key.k, kIndexDim, by);
    round_to_bf16(key.k, kIndexDim);
  };
  if (kinds_.magnitude) {
    if (rng.chance(0.03f)) scale_row(key.c, kLatent, 8.0f);
    if (rng.chance(0.03f)) scale_row(key.k, kIndexDim, 64.0f);
    if (rng.chance(0.05f)) {
      scale_row(key.k, kIndexDim, 1e-6f);
      round_to_bf16(key.k, kIndexDim);
    }
  }
  if (kinds_.subnormal && rng.chance(0.06f)) scale_all(3e-39f);
  if (kinds_.zero && rng.chance(0.06f)) key = KeyRow{};
  if (kinds_.equal) {
    const KeyRow& same = pool_[size_t(rng.below(kPool))];
    std::copy_n(same.c, kLatent, key.c);
    std::copy_n(same.pe, kPe, key.pe);
  }
  if (kinds_.ties) {
    const int which = int(rng.below(7));
    if (which == kPool) {
      std::fill_n(key.k, kIndexDim, 0.0f);
    } else {
      std::copy_n(pool_[size_t(which % kPool)].k, kIndexDim, key.k);
    }
  }
}

}  // namespace dsacore
