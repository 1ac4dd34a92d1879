// Keys of synthetic cases: what earlier steps would have written into the caches, and the statistics that this step's
// rows share with them. Part of generate.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "dsacore/problem.h"
#include "io/random.h"

namespace dsacore {

/// Adversarial kinds of `CaseOptions::adversarial`.
struct CaseKinds {
  bool ties = false, equal = false, magnitude = false, subnormal = false;
  bool zero = false, negzero = false, nan = false, inf = false;

  constexpr bool any() const { return ties || equal || magnitude || subnormal || zero || negzero || nan || inf; }
};

/// What each random stream of a case is for: the second argument of `stream_seed`.
enum class CasePart : uint64_t {
  kWeights,
  kNorms,
  kScales,
  kLengths,
  kTables,
  kSlots,
  kCentres,
  kKeys,
  kRows,
  kPool,
  kGarbage
};

constexpr uint64_t part_seed(uint64_t seed, CasePart part, uint64_t a = 0, uint64_t b = 0) {
  return stream_seed(seed, uint64_t(part), a, b);
}

/// A token as an earlier step would have left it (spec 4, steps 5 and 8), before packing: BF16 values.
struct KeyRow {
  float c[kLatent];
  BFloat16 pe[kPe];
  float k[kIndexDim];
};

/// Hidden statistics of a case: neighbouring tokens share one of a few centres, and some channels are much larger than
/// others.
class KeySource {
 public:
  static constexpr int kRun = 16;                        ///< tokens in a row that share a centre
  static constexpr int kInputs = kQueryRow + kIndexDim;  ///< kv_a, then wk
  static constexpr int kCentres = 12;
  static constexpr int kPool = 5;

  /// The norms' weights as values: `kv_norm` [512]; `k_norm` [2, 128], weight and bias.
  KeySource(uint64_t seed, const CaseKinds& kinds, float eps, const float* kv_norm, const float* k_norm);

  /// One token's inputs `[kv_a 576 | wk 128]` around the centre `cluster`, not yet rounded.
  void draw(Noise& noise, int cluster, float* inputs) const;

  /// Tokens `kRun * run` and on of a request, with the adversarial kinds of the case.
  void old_keys(int request, int64_t run, std::array<KeyRow, kRun>& out) const;

  uint64_t seed() const { return seed_; }

 private:
  void finish(float* inputs, KeyRow& out) const;
  void spoil_inputs(Rng& rng, float* inputs) const;
  void spoil_key(Rng& rng, KeyRow& key) const;

  uint64_t seed_;
  CaseKinds kinds_;
  float eps_;
  std::array<float, kLatent> kv_norm_;
  std::array<float, kIndexDim> k_weight_;
  std::array<float, kIndexDim> k_bias_;
  std::array<std::array<float, kInputs>, kCentres> centres_;  ///< already damped
  std::array<float, kInputs> gain_;
  std::vector<KeyRow> pool_;  ///< for ties and equal
};

}  // namespace dsacore
