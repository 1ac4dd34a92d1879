// Random numbers of the synthetic cases: integers by shifts and sums, floats by exactly rounded IEEE operations alone,
// so that a seed gives the same bytes on every machine. Not for anything that has to be unpredictable.
#pragma once

#include <algorithm>
#include <cstdint>

#include "format/numeric.h"
#include "memory/mixed_bits.h"

namespace dsacore {

/// One step of splitmix64: a good 64-bit mix of a counter.
constexpr uint64_t splitmix64(uint64_t& state) { return mixed_bits(state += 0x9E3779B97F4A7C15u); }

/// Seed of an independent stream: `part` says what it is for, `a` and `b` which of them.
constexpr uint64_t stream_seed(uint64_t seed, uint64_t part, uint64_t a = 0, uint64_t b = 0) {
  uint64_t state = seed;
  for (const uint64_t word : {part, a, b}) {
    state = splitmix64(state) ^ (word * 0xD6E8FEB86659FD93u);
  }
  return splitmix64(state);
}

/// xoshiro256** (Blackman, Vigna): one number at a time, for choices.
class Rng {
 public:
  explicit constexpr Rng(uint64_t seed) {
    for (uint64_t& word : state_) word = splitmix64(seed);
  }

  constexpr uint64_t next() {
    const uint64_t result = rotate(state_[1] * 5, 7) * 9;
    const uint64_t t = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= t;
    state_[3] = rotate(state_[3], 45);
    return result;
  }

  /// 0..n-1, for n of at most 32 bits.
  constexpr int64_t below(int64_t n) { return int64_t(((next() >> 32) * uint64_t(n)) >> 32); }
  /// [0, 1), a multiple of 2^-24.
  constexpr float unit() { return float(next() >> 40) * 0x1p-24f; }
  constexpr bool chance(float p) { return unit() < p; }

 private:
  static constexpr uint64_t rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

  uint64_t state_[4] = {};
};

/// Normal numbers in bulk: xoshiro128+ in 16 lanes, written so that compilers vectorise it. A number is the sum of four
/// 16-bit uniforms (Irwin-Hall: standard deviation 1, range +-3.46), exact in integers until its one multiplication.
class Noise {
 public:
  static constexpr int kLanes = 16;

  explicit Noise(uint64_t seed) {
    for (uint32_t(&word)[kLanes] : state_) {
      for (int lane = 0; lane < kLanes; lane += 2) {
        const uint64_t bits = splitmix64(seed);
        word[lane] = uint32_t(bits);
        word[lane + 1] = uint32_t(bits >> 32);
      }
    }
  }

  /// Writes `n` standard normals.
  void normal(float* out, int64_t n) {
    const int64_t whole = n / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) group(out + i);
    if (whole == n) return;
    float rest[kLanes];
    group(rest);
    std::copy_n(rest, n - whole, out + whole);
  }

  /// Normal in the middle, heavier than normal in the tails: up to +-9.
  void heavy(float* out, int64_t n) {
    normal(out, n);
    for (int64_t i = 0; i < n; ++i) out[i] *= 0.75f + 0.16f * out[i] * out[i];
  }

  /// Writes `n` random 32-bit words.
  void words(uint32_t* out, int64_t n) {
    uint32_t lanes[kLanes];
    for (int64_t i = 0; i < n; ++i) {
      if (i % kLanes == 0) step(lanes);
      out[i] = lanes[i % kLanes];
    }
  }

 private:
  void step(uint32_t (&out)[kLanes]) {
    auto& [s0, s1, s2, s3] = state_;
    for (int lane = 0; lane < kLanes; ++lane) {
      out[lane] = s0[lane] + s3[lane];
      const uint32_t t = s1[lane] << 9;
      s2[lane] ^= s0[lane];
      s3[lane] ^= s1[lane];
      s1[lane] ^= s2[lane];
      s0[lane] ^= s3[lane];
      s2[lane] ^= t;
      s3[lane] = (s3[lane] << 11) | (s3[lane] >> 21);
    }
  }

  void group(float* out) {
    uint32_t a[kLanes];
    uint32_t b[kLanes];
    step(a);
    step(b);
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t sum = (a[lane] >> 16) + (a[lane] & 0xFFFFu) + (b[lane] >> 16) + (b[lane] & 0xFFFFu);
      out[lane] = float(int32_t(sum) - 2 * 65535) * (1.0f / 37837.2f);  // 65536 * sqrt(4 / 12)
    }
  }

  uint32_t state_[4][kLanes];
};

}  // namespace dsacore
