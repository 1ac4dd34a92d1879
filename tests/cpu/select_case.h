// Scores of any kind for the tests of step 10: the query and the keys are chosen so that a token's score is its FP32
// scale.
#pragma once

#include <functional>
#include <limits>

#include "cpu/indexer_case.h"

namespace dsacore::test {

inline constexpr uint8_t kOne = 0x38;  // 1.0 as e4m3

/// One request whose tokens score `scores`.
inline IndexerCase case_of(const std::vector<float>& scores, int topk) {
  IndexerCase c({.heads = 8, .topk = topk, .lengths = {}});
  c.options.lengths = {int(scores.size())};
  c.queries.assign(8 * kIndexDim, 0);
  c.queries[0] = kOne;
  c.weights.assign(8, 0.0f);
  c.weights[0] = 1.0f;
  std::vector<std::byte> keys(scores.size() * IndexFp8::kRowBytes);
  for (size_t t = 0; t < scores.size(); ++t) {
    std::byte* key = keys.data() + t * IndexFp8::kRowBytes;
    key[0] = std::byte(kOne);
    std::memcpy(key + IndexFp8::kValueBytes, &scores[t], sizeof(float));
  }
  c.keys = {keys};
  return c;
}

inline std::vector<int32_t> best_of(const std::vector<float>& scores, int topk) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = scores[size_t(a)], y = scores[size_t(b)];
    return std::isnan(x) ? false : std::isnan(y) || x > y;
  });
  order.resize(std::min(order.size(), size_t(topk)));
  std::sort(order.begin(), order.end());
  order.resize(size_t(topk), -1);
  return order;
}

using ScoreOf = std::function<float(int64_t t, int64_t n, std::mt19937_64& random)>;

struct Kind {
  const char* name;
  ScoreOf score;
};

inline float uniform(std::mt19937_64& random) { return float(random() >> 40) * 0x1p-24f; }
inline float next_after_one(int64_t steps) { return float_of(bits_of(1.0f) + uint32_t(steps)); }

inline const Kind kKinds[] = {
    {"normal", [](int64_t, int64_t, std::mt19937_64& r) { return std::normal_distribution<float>()(r); }},
    {"any bits", [](int64_t, int64_t, std::mt19937_64& r) { return float_of(uint32_t(r())); }},
    {"equal", [](int64_t, int64_t, std::mt19937_64&) { return 1.5f; }},
    {"zeros of both signs", [](int64_t, int64_t, std::mt19937_64& r) { return r() % 2 == 0 ? 0.0f : -0.0f; }},
    {"NaN", [](int64_t, int64_t, std::mt19937_64&) { return std::numeric_limits<float>::quiet_NaN(); }},
    {"mostly NaN", [](int64_t, int64_t, std::mt19937_64& r) { return r() % 50 == 0 ? uniform(r) - 0.5f : -NAN; }},
    {"infinities",
     [](int64_t, int64_t, std::mt19937_64& r) { return r() % 3 == 0   ? HUGE_VALF
                                                       : r() % 2 == 0 ? -HUGE_VALF
                                                                      : 1.0f; }},
    {"one far above", [](int64_t t, int64_t n, std::mt19937_64& r) { return t == n / 2 ? 3e38f : uniform(r); }},
    {"one far below", [](int64_t t, int64_t n, std::mt19937_64& r) { return t == n / 3 ? -3e38f : uniform(r); }},
    {"last bits", [](int64_t, int64_t, std::mt19937_64& r) { return next_after_one(int64_t(r() % 3)); }},
    {"last bits of many", [](int64_t t, int64_t n, std::mt19937_64&) { return next_after_one(t * 7919 % n); }},
    {"subnormal", [](int64_t, int64_t,
                     std::mt19937_64& r) { return float_of(uint32_t(r() % 5000) | (r() % 2 == 0 ? 0x80000000u : 0)); }},
    {"rising", [](int64_t t, int64_t, std::mt19937_64&) { return float(t); }},
    {"falling", [](int64_t t, int64_t, std::mt19937_64&) { return -float(t); }},
    {"all negative", [](int64_t, int64_t, std::mt19937_64& r) { return -1.0f - uniform(r); }},
    {"clusters", [](int64_t t, int64_t, std::mt19937_64& r) { return uniform(r) + (t / 40 % 50 == 7 ? 10.0f : 0.0f); }},
    {"one of each group", [](int64_t t, int64_t, std::mt19937_64& r) { return t % 16 == 5 ? 2.0f : uniform(r); }},
    {"two values, the larger late", [](int64_t t, int64_t n, std::mt19937_64&) { return t < n - 600 ? 1.0f : 2.0f; }},
    {"a ramp in a bin",
     [](int64_t t, int64_t, std::mt19937_64& r) {
       return t % 1000 == 0 ? uniform(r) * 1e9f : next_after_one(int64_t(r() % 100));
     }},
};

inline std::vector<float> scores_of(const Kind& kind, int64_t n) {
  std::mt19937_64 random{uint64_t(n)};
  std::vector<float> scores(static_cast<size_t>(n));
  for (int64_t t = 0; t < n; ++t) scores[size_t(t)] = kind.score(t, n, random);
  return scores;
}

}  // namespace dsacore::test
