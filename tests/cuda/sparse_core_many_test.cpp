// The cuda backend's sparse core for many heads (spec 5, step 11) against the reference backend.
#include "backends/cuda/sparse_core_many.h"

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/sparse_core_case.h"

namespace dsacore::test {
namespace {

constexpr std::string_view kKernel = "many_heads";
constexpr double kUsual = 1.7e-3;  // e of the latents: their own rounding leaves 1.2e-3

// ---- shapes ----

class ManyHeadsShapes : public testing::TestWithParam<std::tuple<KvFormat, int>> {};

TEST_P(ManyHeadsShapes, EveryValidCount) {
  const auto [format, heads] = GetParam();
  CoreCase c({.format = format, .heads = heads, .valid = {0, 1, 63, 64, 65, 127, 2047, 2048}});
  const CoreResult want = run_reference(c);
  DeviceCore device(c, kKernel);
  const CoreResult got = device.run();
  EXPECT_LT(expect_agreement(got, want), kUsual);
  expect_same_bits(device.run(), got, c.rows());
  expect_no_keys(got, 0, heads);
}

// Rows cut into up to 32 parts, some of them empty.
TEST_P(ManyHeadsShapes, FewRows) {
  const auto [format, heads] = GetParam();
  for (const std::vector<int>& valid : {std::vector{2048}, {0}, {65, 1500, 2048}}) {
    SCOPED_TRACE(testing::PrintToString(valid));
    CoreCase c({.format = format, .heads = heads, .valid = valid});
    EXPECT_LT(expect_device_agrees(c, kKernel), kUsual);
  }
}

INSTANTIATE_TEST_SUITE_P(FormatsAndHeads, ManyHeadsShapes,
                         testing::Combine(testing::ValuesIn(kFormats),
                                          testing::Values(1, 12, 17, 24, 40, 48, 64, 96, 100, 128)),
                         name_of_shape);

class ManyHeads : public testing::TestWithParam<KvFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, ManyHeads, testing::ValuesIn(kFormats), name_of_format);

TEST_P(ManyHeads, AnyNumberOfRows) {
  for (const int rows : {2, 4, 9, 16, 33, 40, 67, 133, 256}) {
    SCOPED_TRACE(rows);
    std::vector<int> valid;
    for (int row = 0; row < rows; ++row) valid.push_back(row % 16 == 0 ? 2048 : 37 * row % 300);
    CoreCase c({.format = GetParam(), .heads = 20, .valid = valid, .seed = uint64_t(rows)});
    expect_device_agrees(c, kKernel);
  }
}

// For tools that take seconds a launch: 24 and 48 columns, more tiles than slots, a row alone and cut.
TEST_P(ManyHeads, SmallForTools) {
  const auto expect_plan = [](const CoreCase& c, int columns, bool cut) {
    const cuda::ManyHeadsPlan plan = cuda::many_heads_plan(c.rows(), c.heads(), c.model.config.topk);
    EXPECT_EQ(plan.columns, columns);
    EXPECT_EQ(plan.splits > 1, cut);
  };
  CoreCase cut({.format = GetParam(), .heads = 24, .topk = 200, .valid = {200, 65}});
  expect_plan(cut, 24, true);
  expect_device_agrees(cut, kKernel);
  std::vector<int> valid(133, 0);
  valid[0] = 400, valid[132] = 33;
  CoreCase alone({.format = GetParam(), .heads = 25, .topk = 400, .valid = valid});
  expect_plan(alone, 48, false);
  expect_device_agrees(alone, kKernel);
}

TEST_P(ManyHeads, OtherTopk) {
  for (const int topk : {1, 16, 64, 65, 300, 512, 1024}) {
    SCOPED_TRACE(topk);
    CoreCase few({.format = GetParam(), .heads = 24, .topk = topk, .valid = {topk, 1, 0, topk}});
    expect_device_agrees(few, kKernel);
    CoreCase one({.format = GetParam(), .heads = 40, .topk = topk, .valid = {topk}});
    expect_device_agrees(one, kKernel);
    CoreCase many({.format = GetParam(), .heads = 17, .topk = topk, .valid = std::vector<int>(150, topk / 2 + 1)});
    expect_device_agrees(many, kKernel);
  }
}

TEST_P(ManyHeads, FewerLiveRowsThanPrepared) {
  CoreCase c({.format = GetParam(), .heads = 18, .valid = std::vector<int>(40, 1500)});
  expect_live_rows_agree(c, kKernel);
}

TEST_P(ManyHeads, PagesBetweenOtherLayersPages) {
  for (const auto& [page, stride] : {std::pair{64, 64 + 17}, {2048, 3 * 2048}}) {
    SCOPED_TRACE(page);
    CoreCase c({.format = GetParam(), .heads = 24, .valid = {1500, 2048}, .page = page, .stride_rows = stride});
    expect_device_agrees(c, kKernel);
  }
}

TEST_P(ManyHeads, PhysicalRowsUpTo31Bits) {
  CoreCase c({.format = GetParam(), .heads = 24, .valid = {100, 2048}});
  const CoreResult want = run_reference(c);
  for (const int64_t first : {int64_t(1) << 24, (int64_t(1) << 31) - 1 - 4096}) {
    SCOPED_TRACE(first);
    expect_device_agrees(c, kKernel, want, first);
  }
}

// ---- values ----

TEST_P(ManyHeads, EveryCode) {
  CoreCase c({.format = GetParam(), .heads = 24, .valid = {40, 2048}, .query_magnitude = 1e-2});
  write_every_code(c);
  expect_device_agrees(c, kKernel);
}

TEST_P(ManyHeads, LargeLogits) {
  CoreCase c({.format = GetParam(), .heads = 24, .valid = {2, 300, 2048}});
  make_logits_large(c);
  expect_device_agrees(c, kKernel);
}

// Logits of next to nothing or nothing: all keys count the same, and what stands where there is none does not.
TEST_P(ManyHeads, ScaleOfZero) {
  for (const double scale : {0.0, 1e-30}) {
    SCOPED_TRACE(scale);
    CoreCase c({.format = GetParam(), .heads = 24, .valid = {3, 100, 2047}});
    c.model.config.softmax_scale = scale;
    expect_device_agrees(c, kKernel);
  }
}

TEST_P(ManyHeads, OneKeyIsExact) {
  CoreCase c({.format = GetParam(), .heads = 24, .valid = {1}});
  c.model.k_scale = 1;
  expect_one_key_exact(c, kKernel);
}

// BF16 queries that FP16 cannot hold: each head has a magnitude of its own, and outliers.
TEST(ManyHeadsQuery, BeyondHalfPrecision) {
  CoreCase c({.heads = 24, .valid = {500, 2048}});
  for (int b = 0; b < c.rows(); ++b) {
    for (int head = 0; head < c.heads(); ++head) {
      const float magnitude = std::ldexp(1.0f, 6 * head - 120);
      for (int i = 0; i < kQueryRow; ++i)
        c.set_query(b, head, i, magnitude * float(c.normal()) * (i % 100 == 7 ? 300.0f : 1.0f));
    }
  }
  // Some heads' logits are near 1; those of the others are far below, or have one best key. Lse of 1e17 have no bound.
  const CoreResult want = run_reference(c);
  CoreResult got = DeviceCore(c, kKernel).run();
  for (size_t i = 0; i < want.lse.size(); ++i) {
    if (std::abs(want.lse[i]) < 1e3f) continue;
    EXPECT_NEAR(double(got.lse[i]), double(want.lse[i]), std::abs(double(want.lse[i])) * 1e-6);
    got.lse[i] = want.lse[i];
  }
  expect_agreement(got, want);
}

// ---- scales of fp8_ds_mla ----

TEST(ManyHeadsScales, PowersOfTwo) { expect_powers_of_two_agree(24, kKernel); }

TEST(ManyHeadsScales, OneKeyIsExactAtAnyScale) { expect_one_key_exact_at_any_scale(24, kKernel); }

TEST(ManyHeadsScales, AnyFinitePositiveScale) { expect_any_scale_agrees(24, kKernel); }

TEST(ManyHeadsScales, FarApart) { expect_scales_far_apart_agree(24, kKernel); }

TEST(ManyHeadsScales, LargestScale) {
  CoreCase c({.heads = 24, .valid = {1, 2}, .query_magnitude = 0});
  set_largest_scale(c);
  expect_device_agrees(c, kKernel);
}

// ---- independence ----

TEST_P(ManyHeads, NanAndInfinityStayInTheirRow) {
  CoreCase c({.format = GetParam(), .heads = 28, .valid = {300, 300, 40, 2048}});
  expect_broken_values_stay(c, kKernel);
}

// ---- time ----

TEST(CoreTime, ManyHeads) {
  CoreTimer timer;
  for (const KvFormat format : kFormats) {
    for (const int heads : {24, 48, 96}) {
      for (const int rows : {1, 8, 16, 32, 64}) timer.report(kKernel, format, heads, rows);
    }
  }
}

}  // namespace
}  // namespace dsacore::test
