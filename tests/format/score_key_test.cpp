// The order of score keys is the order of scores: NaN lowest, -0 equal to +0.
#include "format/score_key.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace dsacore {
namespace {

using Limits = std::numeric_limits<float>;

/// Whether score `a` is worse than `b` by spec 5, step 10.
bool worse(float a, float b) {
  if (std::isnan(a)) return !std::isnan(b);
  return !std::isnan(b) && a < b;
}

void expect_order(float a, float b) {
  ASSERT_EQ(score_key(a) < score_key(b), worse(a, b)) << a << " " << b;
  ASSERT_EQ(score_key(a) == score_key(b), !worse(a, b) && !worse(b, a)) << a << " " << b;
}

TEST(ScoreKey, OrdersSpecials) {
  const std::vector<float> scores = {Limits::quiet_NaN(),
                                     -Limits::quiet_NaN(),
                                     std::bit_cast<float>(0x7F800001u),
                                     std::bit_cast<float>(0xFFFFFFFFu),
                                     -Limits::infinity(),
                                     Limits::lowest(),
                                     -1.0f,
                                     -Limits::min(),
                                     -Limits::denorm_min(),
                                     -0.0f,
                                     0.0f,
                                     Limits::denorm_min(),
                                     Limits::min(),
                                     1.0f,
                                     std::nextafter(1.0f, 2.0f),
                                     Limits::max(),
                                     Limits::infinity()};
  for (const float a : scores) {
    for (const float b : scores) expect_order(a, b);
  }
}

TEST(ScoreKey, OrdersRandomFloats) {
  std::mt19937 bits(4);
  for (int i = 0; i < 1'000'000; ++i) {
    const float a = std::bit_cast<float>(uint32_t(bits())), b = std::bit_cast<float>(uint32_t(bits()));
    expect_order(a, b);
    expect_order(a, std::nextafter(a, Limits::infinity()));
  }
}

TEST(ScoreKey, Range) {
  EXPECT_EQ(score_key(Limits::quiet_NaN()), kNanScoreKey);
  EXPECT_EQ(score_key(-0.0f), score_key(0.0f));
  EXPECT_GT(score_key(-Limits::infinity()), kNanScoreKey);
  EXPECT_EQ(score_key(Limits::infinity()), 0xFF800000u);
}

}  // namespace
}  // namespace dsacore
