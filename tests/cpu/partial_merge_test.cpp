// The cpu backend's partial merge (spec 7, step 4) against the reference backend: ranks without rows, empty rows, far
// apart LSE, broken partials, threads. On every target that the machine runs.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "cpu/agreement.h"
#include "support/targets.h"

namespace dsacore::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct MergeCase {
  MergeCase(int ranks_, int rows_, int heads_, int width_) : ranks(ranks_), rows(rows_), heads(heads_), width(width_) {
    std::mt19937 random(uint32_t(ranks * 100 + rows));
    std::normal_distribution<float> normal;
    partials.resize(size_t(ranks) * size_t(items()) * size_t(width));
    for (BFloat16& x : partials) x = to_bf16(normal(random));
    lse.resize(size_t(ranks) * size_t(items()));
    for (float& x : lse) x = normal(random) * 3 + 10;
  }
  int64_t items() const { return int64_t(rows) * heads; }
  float& lse_of(int rank, int row, int head) { return lse[size_t((rank * rows + row) * heads + head)]; }
  BFloat16* partial(int rank, int row, int head) {
    return partials.data() + (int64_t(rank * rows + row) * heads + head) * width;
  }
  /// A rank that saw no rows: its partial holds NaN, which nobody may read.
  void empty(int rank, int row, int head) {
    lse_of(rank, row, head) = -kInfinity;
    std::fill_n(partial(rank, row, head), width, BFloat16{0xFFFF});
  }

  struct Output {
    std::vector<BFloat16> merged;
    std::vector<float> lse;
  };
  Output run(const Backend& backend, int threads_count = 2) const {
    Output out{std::vector<BFloat16>(size_t(items()) * size_t(width), BFloat16{0xFFFF}),
               std::vector<float>(size_t(items()), NAN)};
    Threads threads(threads_count);
    const PartialMergeArgs args{View<const BFloat16, 4>(partials.data(), ranks, rows, heads, width),
                                View<const float, 3>(lse.data(), ranks, rows, heads),
                                View<BFloat16, 3>(out.merged.data(), rows, heads, width),
                                View<float, 2>(out.lse.data(), rows, heads)};
    backend.partial_merge[0].run(args, {{}, &threads, backend.target_data});
    return out;
  }

  int ranks, rows, heads, width;
  std::vector<BFloat16> partials;
  std::vector<float> lse;
};

void expect_agreement(const MergeCase& c) {
  const MergeCase::Output want = c.run(reference_backend());
  for (const std::string_view target : tested_targets()) {
    SCOPED_TRACE(::testing::Message() << target << ", " << c.ranks << " ranks, width " << c.width);
    const MergeCase::Output got = c.run(*cpu_backend(target));
    int64_t near = 0;
    for (size_t i = 0; i < want.merged.size(); ++i) {
      const double x = double(to_float(got.merged[i])), y = double(to_float(want.merged[i]));
      // One BF16 unit, or the rounding of FP32 terms of size 4 that cancel.
      ASSERT_TRUE(std::abs(bf16_order(got.merged[i]) - bf16_order(want.merged[i])) <= 1 ||
                  std::abs(x - y) < 4 * 0x1p-23)
          << "merged[" << i << "] = " << x << ", must be " << y;
      near += got.merged[i].bits != want.merged[i].bits;
    }
    EXPECT_LE(near, 4 + int64_t(want.merged.size()) / 1000);
    for (size_t i = 0; i < want.lse.size(); ++i) {
      if (std::isinf(want.lse[i])) {
        ASSERT_EQ(got.lse[i], want.lse[i]) << "lse[" << i << "]";
      } else {
        ASSERT_NEAR(got.lse[i], want.lse[i], 1e-6 * std::abs(want.lse[i])) << "lse[" << i << "]";
      }
    }
  }
}

TEST(PartialMerge, AgreesWithReference) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int width : {512, 128}) {
      for (const auto& [rows, heads] : {std::pair{1, 1}, {3, 6}, {17, 12}})
        expect_agreement(MergeCase(ranks, rows, heads, width));
    }
  }
}

TEST(PartialMerge, RanksWithoutRowsAreNotRead) {
  MergeCase c(4, 3, 6, 512);
  for (int head = 0; head < 6; ++head) {
    c.empty(head % 4, 0, head);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank != head % 4) c.empty(rank, 1, head);  // one rank left
      c.empty(rank, 2, head);                        // none left
    }
  }
  expect_agreement(c);
  for (const std::string_view target : tested_targets()) {
    const MergeCase::Output got = c.run(*cpu_backend(target));
    for (int head = 0; head < 6; ++head) {
      for (int i = 0; i < 512; ++i) {
        ASSERT_EQ(got.merged[size_t((6 + head) * 512 + i)].bits, c.partial(head % 4, 1, head)[i].bits) << target;
        ASSERT_EQ(got.merged[size_t((12 + head) * 512 + i)].bits, 0) << target;
      }
      ASSERT_EQ(got.lse[size_t(6 + head)], c.lse_of(head % 4, 1, head)) << target;
      ASSERT_EQ(got.lse[size_t(12 + head)], -kInfinity) << target;
    }
  }
}

TEST(PartialMerge, FarApartLse) {
  MergeCase c(3, 4, 2, 128);
  for (int head = 0; head < 2; ++head) {
    c.lse_of(0, 0, head) = -3000;  // vanishes
    c.lse_of(1, 1, head) = 5000;   // takes all, without overflow
    for (int rank = 0; rank < 3; ++rank) c.lse_of(rank, 2, head) = -3e30f;
    for (int rank = 0; rank < 3; ++rank) c.lse_of(rank, 3, head) = 2e4f;
  }
  expect_agreement(c);
}

TEST(PartialMerge, BrokenPartialHarmsItsRowAndHead) {
  const MergeCase c(3, 5, 4, 128);
  for (const float broken : {float(NAN), kInfinity}) {
    for (const int rank : {0, 1, 2}) {
      MergeCase spoilt = c;
      spoilt.lse_of(rank, 2, 1) = broken;
      if (rank == 1) {  // the only one with rows
        spoilt.empty(0, 2, 1);
        spoilt.empty(2, 2, 1);
      }
      for (const std::string_view target : tested_targets()) {
        SCOPED_TRACE(target);
        const MergeCase::Output want = c.run(*cpu_backend(target));
        MergeCase::Output got = spoilt.run(*cpu_backend(target));
        const size_t at = 2 * 4 + 1;
        for (int i = 0; i < 128; ++i) ASSERT_TRUE(is_nan(to_float(got.merged[at * 128 + size_t(i)]))) << i;
        std::copy_n(want.merged.begin() + at * 128, 128, got.merged.begin() + at * 128);
        got.lse[at] = want.lse[at];
        EXPECT_TRUE(same_bytes(got.merged.data(), want.merged.data(), int64_t(want.merged.size()) * 2, "merged"));
        EXPECT_TRUE(same_bytes(got.lse.data(), want.lse.data(), int64_t(want.lse.size()) * 4, "lse"));
      }
    }
  }
}

TEST(PartialMerge, SameBitsWithAnyThreads) {
  const MergeCase c(3, 19, 5, 512);
  for (const std::string_view target : tested_targets()) {
    const MergeCase::Output one = c.run(*cpu_backend(target), 1);
    for (const int threads : {2, 3, 7}) {
      const MergeCase::Output other = c.run(*cpu_backend(target), threads);
      EXPECT_TRUE(same_bytes(other.merged.data(), one.merged.data(), int64_t(one.merged.size()) * 2, "merged"))
          << target << threads;
    }
  }
}

}  // namespace
}  // namespace dsacore::test
