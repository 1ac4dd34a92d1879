// The sparse core of the cpu backend (spec 5, step 11) on every target against the reference backend.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/sparse_core_contents.h"

namespace dsacore {
namespace {

class SparseCoreShapes : public testing::TestWithParam<std::tuple<KvFormat, int>> {};

TEST_P(SparseCoreShapes, EveryValidCount) {
  const auto [format, heads] = GetParam();
  CoreCase c({.format = format, .heads = heads, .valid = {0, 1, 31, 32, 33, 255, 256, 257, 2047, 2048}});
  const CoreResult want = run_reference(c);
  for_cpu_targets([&](const Backend& backend) {
    const CoreResult got = run_core(c, backend, 2);
    // What rounding p to BF16 leaves is 1.1e-3 to 1.3e-3; much more would be a fault.
    EXPECT_LT(expect_agreement(got, want), 1.6e-3);
    expect_no_keys(got, 0, heads);
  });
}

INSTANTIATE_TEST_SUITE_P(FormatsAndHeads, SparseCoreShapes,
                         testing::Combine(testing::ValuesIn(kFormats), testing::Values(1, 6, 12, 16, 17, 24, 96, 128)),
                         name_of_shape);

class SparseCore : public testing::TestWithParam<KvFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SparseCore, testing::ValuesIn(kFormats), name_of_format);

TEST_P(SparseCore, SmallTopk) {
  for (const int topk : {1, 16, 300}) {
    SCOPED_TRACE(topk);
    CoreCase c({.format = GetParam(), .topk = topk, .valid = {topk, 1, 0, topk}});
    expect_all_targets_agree(c);
  }
}

TEST_P(SparseCore, PagesBetweenOtherLayersPages) {
  for (const auto& [page, stride] : {std::pair{64, 64 + 17}, {2048, 2048}, {2048, 3 * 2048}}) {
    SCOPED_TRACE(page);
    CoreCase c({.format = GetParam(), .heads = 6, .valid = {1500, 2048}, .page = page, .stride_rows = stride});
    expect_all_targets_agree(c);
  }
}

TEST_P(SparseCore, PhysicalRowsAbove24Bits) {
  constexpr int32_t kFirst = (1 << 24) + 12345;
  CoreCase c({.format = GetParam(), .heads = 6, .valid = {100, 300}});
  int32_t last = 0;
  for (int b = 0; b < c.rows(); ++b) last = std::max(last, c.selected(b)[c.valid[size_t(b)] - 1]);
  // Address space alone: only pages that are written take memory.
  const size_t bytes = size_t(kFirst + last + 1) * size_t(c.kv.row_bytes);
  void* space = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(space, MAP_FAILED);
  std::memcpy(static_cast<std::byte*>(space) + int64_t(kFirst) * c.kv.row_bytes, c.kv.data,
              size_t(last + 1) * size_t(c.kv.row_bytes));
  const CoreResult want = run_reference(c);
  c.kv.data = static_cast<std::byte*>(space);
  for (int b = 0; b < c.rows(); ++b) {
    for (int t = 0; t < c.valid[size_t(b)]; ++t) c.selected(b)[t] += kFirst;
  }
  for_cpu_targets([&](const Backend& backend) { expect_agreement(run_core(c, backend, 2), want); });
  munmap(space, bytes);
}

TEST_P(SparseCore, SaturatedValues) {
  CoreCase c({.format = GetParam(), .valid = {1, 300, 2048}, .query_magnitude = 1e-3});
  saturate_values(c);
  expect_all_targets_agree(c);
}

TEST_P(SparseCore, LargeLogits) {
  CoreCase c({.format = GetParam(), .valid = {2, 300, 2048}});
  make_logits_large(c);
  const CoreResult want = run_reference(c);
  float largest = 0;
  for (const float lse : want.lse) largest = std::max(largest, std::abs(lse));
  EXPECT_GT(largest, 1e4f);
  for_cpu_targets([&](const Backend& backend) { expect_agreement(run_core(c, backend, 2), want); });
}

// Every key the same: the latent is the key, and the lse that of n equal logits, by a formula of its own.
TEST_P(SparseCore, EqualKeys) {
  CoreCase c({.format = GetParam(), .heads = 17, .valid = {1, 31, 257, 2048}});
  const std::byte* first = c.row(c.selected(0)[0]);
  const std::vector<std::byte> key(first, first + c.kv.row_bytes);
  c.for_selected([&](std::byte* row) { std::copy(key.begin(), key.end(), row); });
  double values[kQueryRow];
  with_layout(GetParam(), [&](auto layout) {
    for (int i = 0; i < kQueryRow; ++i) values[i] = double(layout.value(key.data(), i));
  });
  for_cpu_targets([&](const Backend& backend) {
    const CoreResult got = run_core(c, backend, 2);
    for (int b = 0; b < c.rows(); ++b) {
      for (int head = 0; head < c.heads(); ++head) {
        double logit = 0;
        for (int i = 0; i < kQueryRow; ++i) {
          const double q = double(c.query().element == 1 ? e4m3_to_float(c.query().e4m3(b, head)[i])
                                                         : to_float(c.query().bf16(b, head)[i]));
          logit += q * values[i] * double(c.model.attention_scale());
        }
        const size_t at = size_t(b * c.heads() + head);
        EXPECT_NEAR(double(got.lse[at]), logit + std::log(double(c.valid[size_t(b)])), 1e-4);
        for (int i = 0; i < kLatent; ++i) {
          const double want = values[i] * double(c.model.k_scale);
          EXPECT_NEAR(double(to_float(got.latent[at * kLatent + size_t(i)])), want, std::abs(want) * 0x1p-8);
        }
      }
    }
  });
}

// One key is best and all others have the p that BF16 rounds worst: the error must cancel in the latent and not show in
// the lse.
void expect_rounding_to_cancel(CoreCase& c) {
  const auto value = [&](int t) {
    return with_layout(c.kv.format, [&](auto layout) { return double(layout.value(c.row(c.selected(0)[t]), 0)); });
  };
  const double q = double(c.query().element == 1 ? e4m3_to_float(c.query().e4m3(0, 0)[0]) : 1.0f);
  const double gap = q * (value(0) - value(1));
  for (const double p : {0x1.01p-1, 0x1.00ffp-1, 0x1.0101p-1, 0x1.03p-3}) {
    SCOPED_TRACE(p);
    c.model.config.softmax_scale = -std::log(p) / gap / double(c.model.q_scale) / double(c.model.k_scale);
    const CoreResult want = run_reference(c);
    for_cpu_targets([&](const Backend& backend) { EXPECT_LT(expect_agreement(run_core(c, backend, 2), want), 1e-3); });
  }
}

TEST_P(SparseCore, RoundingOfPDoesNotAddUp) {
  CoreCase c({.format = GetParam(), .heads = 2, .valid = {200, 2048}});
  const auto set_key = [&](std::byte* row, float first) {
    float latent[kLatent] = {first};
    for (int i = 1; i < kLatent; ++i) latent[i] = float(1 + i % 3);
    const BFloat16 pe[kPe] = {};
    encode_kv(GetParam(), latent, pe, c.model.config.k_scale_inv, row);
  };
  c.for_selected([&](std::byte* row) { set_key(row, 0); });
  for (int b = 0; b < c.rows(); ++b) {
    set_key(c.row(c.selected(b)[0]), 1);
    for (int head = 0; head < c.heads(); ++head) {
      for (int i = 0; i < kQueryRow; ++i) c.set_query(b, head, i, i == 0 ? 1.0f : 0.0f);
    }
  }
  expect_rounding_to_cancel(c);
  if (GetParam() != KvFormat::kFp8DsMla) return;
  set_scales(c, [] { return 1.7f; });
  expect_rounding_to_cancel(c);
}

// ---- scales of fp8_ds_mla ----

TEST(SparseCoreScales, PowersOfTwo) {
  for (const int exponent : {-110, -14, 0, 1, 20, 58, 100}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = 6, .valid = {1, 33, 700}, .query_magnitude = std::ldexp(0.01, -exponent)});
    set_scales(c, [&] { return std::ldexp(1.0f, exponent + int(c.random()() % 3)); });
    expect_all_targets_agree(c);
  }
}

// A single key, so p = 1: the latent is the dequantized value itself, also where the key is too large to scale in
// advance.
TEST(SparseCoreScales, PowersOfTwoAreExact) {
  for (const int exponent : {-117, -14, 0, 58, 118, 119, 120, 126}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = 6, .valid = {1}, .query_magnitude = 0});
    set_scales(c, [&] { return std::ldexp(1.0f, exponent); });
    const std::byte* row = c.row(c.selected(0)[0]);
    for_cpu_targets([&](const Backend& backend) {
      const CoreResult got = run_core(c, backend, 1);
      for (int i = 0; i < kLatent; ++i) EXPECT_EQ(to_float(got.latent[size_t(i)]), KvFp8DsMla::value(row, i)) << i;
    });
  }
}

TEST(SparseCoreScales, AnyFinitePositiveScale) {
  for (const float magnitude : {0x1p-14f, 1.0f, 0x1p40f, 0x1p118f}) {
    SCOPED_TRACE(magnitude);
    CoreCase c({.heads = 6, .valid = {1, 33, 255, 2048}, .query_magnitude = 1 / double(magnitude)});
    set_scales(c, [&] { return magnitude * (1.0f + float(c.random()() % 100000) / 100000.0f) / 448.0f; });
    expect_all_targets_agree(c);
  }
}

TEST(SparseCoreScales, FewKeysWithOtherScales) {
  CoreCase c({.heads = 17, .valid = {300, 2048}});
  int nth = 0;
  c.for_selected([&](std::byte* row) {
    if (nth++ % 97 != 0) return;
    for (int tile = 0; tile < KvFp8DsMla::kTiles; ++tile) {
      const float s = KvFp8DsMla::scale(row, tile) * (1 + 0.3f * float(tile));
      std::memcpy(row + KvFp8DsMla::kScalesAt + tile * int(sizeof(float)), &s, sizeof(s));
    }
  });
  expect_all_targets_agree(c);
}

TEST(SparseCoreScales, LargestScale) {
  CoreCase c({.heads = 1, .valid = {1, 2}, .query_magnitude = 0});
  set_largest_scale(c);
  expect_all_targets_agree(c);
}

// ---- independence ----

TEST_P(SparseCore, SameBitsForAnyThreadsAndRows) {
  for (const int heads : {12, 96}) {
    CoreCase c({.format = GetParam(), .heads = heads, .valid = {2048, 0, 257, 1000, 1, 512}});
    for_cpu_targets([&](const Backend& backend) {
      const CoreResult want = run_core(c, backend, 1);
      for (const int threads : {2, 3, 7}) expect_same_bits(run_core(c, backend, threads), want, c.rows());
      for (const int live : {1, 4}) expect_same_bits(run_core(c, backend, 2, live), want, live);
    });
  }
}

// More rows than a wave of tasks holds, each row by itself in a case of its own.
TEST(SparseCoreWaves, RowsOfManyWaves) {
  std::vector<int> valid;
  for (int i = 0; i < 20; ++i) valid.push_back(i % 3 == 0 ? 300 + i : 10 + i);
  CoreCase c({.format = KvFormat::kFp8, .heads = 128, .valid = valid});
  const CoreResult want = run_reference(c);
  for_cpu_targets([&](const Backend& backend) {
    const CoreResult all = run_core(c, backend, 2);
    expect_agreement(all, want);
    expect_same_bits(run_core(c, backend, 3, 13), all, 13);
  });
}

TEST_P(SparseCore, TopkAboveNIsDense) {
  for (const int n : {5, 300}) {
    CoreCase wide({.format = GetParam(), .topk = 2048, .valid = {n}});
    CoreCase tight({.format = GetParam(), .topk = n, .valid = {n}});
    for_cpu_targets(
        [&](const Backend& backend) { expect_same_bits(run_core(wide, backend, 2), run_core(tight, backend, 2), 1); });
  }
}

TEST_P(SparseCore, NanAndInfinityStayInTheirRow) {
  CoreCase c({.format = GetParam(), .heads = 12, .valid = {300, 300, 40, 2048}});
  std::vector<CoreResult> clean;  // of each target
  for_cpu_targets([&](const Backend& backend) { clean.push_back(run_core(c, backend, 2)); });
  break_values(c);
  size_t nth = 0;
  for_cpu_targets(
      [&](const Backend& backend) { expect_broken_values_stayed(c, run_core(c, backend, 2), clean[nth++]); });
}

}  // namespace
}  // namespace dsacore
