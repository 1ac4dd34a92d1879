// Spec 7, step 4: partials merged by lse.
#include <cmath>

#include "reference/fixture.h"

namespace dsacore::test {
namespace {

constexpr int kWidth = 128;

/// One row and head with `ranks` partials, each of one value throughout.
class Merge {
 public:
  explicit Merge(int ranks)
      : partials(ranks, 1, 1, kWidth), partial_lse(ranks, 1, 1), merged(1, 1, kWidth), lse(1, 1) {}

  void set(int rank, float value, float lse_ln) {
    for (int i = 0; i < kWidth; ++i) partials(rank, 0, 0, i) = bf16(value);
    partial_lse(rank, 0, 0) = lse_ln;
  }
  void run() {
    const PartialMergeArgs args{partials.view(), partial_lse.view(), merged.view(), lse.view()};
    run_stage(reference_backend().partial_merge, args, {});
    for (int i = 1; i < kWidth; ++i) ASSERT_EQ(merged(0, 0, i).bits, merged(0, 0, 0).bits) << i;
  }
  float value() const { return to_float(merged(0, 0, 0)); }

  Tensor<BFloat16, 4> partials;
  Tensor<float, 3> partial_lse;
  Tensor<BFloat16, 3> merged;
  Tensor<float, 2> lse;
};

TEST(ReferencePartialMerge, EqualWeightsAverage) {
  Merge m(2);
  m.set(0, 1, 5);
  m.set(1, 3, 5);
  m.run();
  EXPECT_EQ(m.value(), 2);
  EXPECT_FLOAT_EQ(m.lse(0, 0), 5 + std::log(2.0f));
}

TEST(ReferencePartialMerge, WeighsByExpOfLse) {
  Merge m(2);
  m.set(0, 1, 0);
  m.set(1, 5, std::log(3.0f));
  m.run();
  EXPECT_EQ(m.value(), 4) << "1/4 and 3/4";
  EXPECT_FLOAT_EQ(m.lse(0, 0), std::log(4.0f));
}

TEST(ReferencePartialMerge, LargeLseDoesNotOverflow) {
  Merge m(3);
  m.set(0, 1, 1e4f);
  m.set(1, 7, 1e4f);
  m.set(2, 100, -1e4f);
  m.run();
  EXPECT_EQ(m.value(), 4);
  EXPECT_FLOAT_EQ(m.lse(0, 0), 1e4f + std::log(2.0f));
}

TEST(ReferencePartialMerge, EmptySourceWeighsNothingAndIsNotRead) {
  for (const int empty : {0, 1}) {
    Merge m(2);
    m.set(empty, kNan, -kInf);
    m.set(1 - empty, 2.5f, -3);
    m.run();
    EXPECT_EQ(m.value(), 2.5f);
    EXPECT_EQ(m.lse(0, 0), -3);
  }
}

TEST(ReferencePartialMerge, AllEmptyGivesZero) {
  Merge m(8);
  for (int rank = 0; rank < 8; ++rank) m.set(rank, kNan, -kInf);
  m.run();
  EXPECT_EQ(m.merged(0, 0, 0).bits, 0);
  EXPECT_EQ(m.lse(0, 0), -kInf);
}

TEST(ReferencePartialMerge, NanHarmsItsHead) {
  Merge m(2);
  m.set(0, 1, kNan);
  m.set(1, 1, -kInf);
  m.run();
  EXPECT_TRUE(std::isnan(m.value()));
  EXPECT_TRUE(std::isnan(m.lse(0, 0)));
}

TEST(ReferencePartialMerge, EachRowAndHeadIsItsOwn) {
  constexpr int kRanks = 4, kRows = 3, kHeads = 2, kLatentWidth = kLatent;
  Tensor<BFloat16, 4> partials(kRanks, kRows, kHeads, kLatentWidth);
  Tensor<float, 3> lse(kRanks, kRows, kHeads);
  Tensor<BFloat16, 3> merged(kRows, kHeads, kLatentWidth);
  Tensor<float, 2> merged_lse(kRows, kHeads);
  for (int d = 0; d < kRanks; ++d) {
    for (int b = 0; b < kRows; ++b) {
      for (int h = 0; h < kHeads; ++h) {
        lse(d, b, h) = float(d) * 0.3f - float(b) + float(h) * 0.7f;
        for (int i = 0; i < kLatentWidth; ++i) partials(d, b, h, i) = bf16(std::sin(d + 10 * b + 100 * h + 1000 * i));
      }
    }
  }
  run_stage(reference_backend().partial_merge,
            PartialMergeArgs{partials.view(), lse.view(), merged.view(), merged_lse.view()}, {});
  for (int b = 0; b < kRows; ++b) {
    for (int h = 0; h < kHeads; ++h) {
      double total = 0;
      for (int d = 0; d < kRanks; ++d) total += std::exp(double(lse(d, b, h)));
      ASSERT_NEAR(merged_lse(b, h), std::log(total), 1e-6) << b << " " << h;
      for (int i = 0; i < kLatentWidth; ++i) {
        double want = 0;
        for (int d = 0; d < kRanks; ++d)
          want += std::exp(double(lse(d, b, h))) / total * double(to_float(partials(d, b, h, i)));
        ASSERT_NEAR(to_float(merged(b, h, i)), want, std::fabs(want) * 0x1p-8 + 1e-12) << b << " " << h << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace dsacore::test
