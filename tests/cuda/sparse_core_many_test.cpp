// The cuda backend's sparse core for many heads (spec 5, step 11) against the reference backend.
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/sparse_core_case.h"

namespace dsacore::test {
namespace {

constexpr std::string_view kKernel = "many_heads";
constexpr KvFormat kFormats[] = {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla};
constexpr double kUsual = 1.7e-3;  // e of the latents: their own rounding leaves 1.2e-3

std::string name_of_format(const testing::TestParamInfo<KvFormat>& param) { return std::string(name_of(param.param)); }
std::string name_of_shape(const testing::TestParamInfo<std::tuple<KvFormat, int>>& param) {
  return std::string(name_of(std::get<0>(param.param))) + "_heads" + std::to_string(std::get<1>(param.param));
}

/// Gives every selected row of an `fp8_ds_mla` cache other tile scales, and no pe.
void set_scales(CoreCase& c, const std::function<float()>& scale) {
  c.for_selected([&](std::byte* row) {
    for (int tile = 0; tile < KvFp8DsMla::kTiles; ++tile) {
      const float s = scale();
      std::memcpy(row + KvFp8DsMla::kScalesAt + tile * int(sizeof(float)), &s, sizeof(s));
    }
    std::memset(row + KvFp8DsMla::kPeAt, 0, kPe * sizeof(BFloat16));  // has no scale: would outweigh small ones
  });
}

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
  for (int head = 0; head < heads; ++head) {  // row 0 has no key
    EXPECT_EQ(got.lse[size_t(head)], -HUGE_VALF);
    for (int i = 0; i < kLatent; ++i) EXPECT_EQ(got.latent[size_t(head * kLatent + i)].bits, 0);
  }
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

TEST_P(ManyHeads, SmallTopk) {
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
  const CoreResult want = run_reference(c);
  DeviceCore device(c, kKernel);
  for (const int live : {1, 2, 3, 8, 13, 40}) {
    SCOPED_TRACE(live);
    CoreResult part = want;
    part.rows = live;
    part.latent.resize(size_t(live * c.heads() * kLatent));
    part.lse.resize(size_t(live * c.heads()));
    expect_agreement(device.run(live), part);
  }
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

// Every byte a key can have but NaN: all codes, all scale codes, subnormal ones too.
TEST_P(ManyHeads, EveryCode) {
  CoreCase c({.format = GetParam(), .heads = 24, .valid = {40, 2048}, .query_magnitude = 1e-2});
  c.for_selected([&](std::byte* row) {
    for (int i = 0; i < row_bytes(GetParam()); ++i) {
      if (GetParam() == KvFormat::kFp8DsMla && i >= kLatent) break;
      uint8_t code = uint8_t(c.random()());
      const bool nibbles = GetParam() == KvFormat::kNvfp4DsMla && i < KvNvfp4DsMla::kPeAt;
      if (!nibbles && (code & 0x7F) == 0x7F) code ^= 1;
      if (GetParam() == KvFormat::kNvfp4DsMla && i >= KvNvfp4DsMla::kScalesAt) code &= 0x7F;
      row[i] = std::byte(code);
    }
  });
  expect_device_agrees(c, kKernel);
}

// Keys and queries are small integers, so that logits of 1e4 are exact and spec 9's bound of the lse can be kept.
TEST_P(ManyHeads, LargeLogits) {
  CoreCase c({.format = GetParam(), .heads = 24, .valid = {2, 300, 2048}});
  c.model.config.softmax_scale = 0.6;
  c.model.q_scale = c.model.k_scale = 1;
  const auto small_integer = [&] { return float(int(c.random()() % 9) - 4); };
  c.for_selected([&](std::byte* row) {
    float latent[kLatent];
    BFloat16 pe[kPe];
    for (float& x : latent) x = 4 * small_integer();
    for (BFloat16& x : pe) x = to_bf16(4 * small_integer());
    encode_kv(GetParam(), latent, pe, 1.0f, row);
  });
  for (int b = 0; b < c.rows(); ++b) {
    for (int head = 0; head < c.heads(); ++head) {
      for (int i = 0; i < kQueryRow; ++i) {
        const float value = 8 * small_integer();
        if (c.query().element == 1) {
          c.query().e4m3(b, head)[i] = to_e4m3(value);
        } else {
          c.query().bf16(b, head)[i] = to_bf16(value);
        }
      }
    }
  }
  expect_device_agrees(c, kKernel);
}

// A single key, so p = 1: the latent is the dequantized value itself.
TEST_P(ManyHeads, OneKeyIsExact) {
  CoreCase c({.format = GetParam(), .heads = 24, .valid = {1}});
  c.model.k_scale = 1;
  const CoreResult got = DeviceCore(c, kKernel).run();
  for (int i = 0; i < kLatent; ++i) {
    const float want = with_layout(GetParam(), [&](auto layout) { return layout.value(c.row(c.selected(0)[0]), i); });
    ASSERT_EQ(to_float(got.latent[size_t(i)]), to_float(to_bf16(want))) << i;  // of either sign where it is 0
  }
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

TEST(ManyHeadsScales, PowersOfTwo) {
  for (const int exponent : {-110, -14, 0, 1, 20, 58, 100}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = 24, .valid = {1, 33, 700, 2048}, .query_magnitude = std::ldexp(0.01, -exponent)});
    set_scales(c, [&] { return std::ldexp(1.0f, exponent + int(c.random()() % 3)); });
    expect_device_agrees(c, kKernel);
  }
}

TEST(ManyHeadsScales, OneKeyIsExactAtAnyScale) {
  for (const int exponent : {-117, -14, 0, 58, 118, 119, 120, 126}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = 24, .valid = {1}, .query_magnitude = 0});
    set_scales(c, [&] { return std::ldexp(1.0f, exponent); });
    const std::byte* row = c.row(c.selected(0)[0]);
    const CoreResult got = DeviceCore(c, kKernel).run();
    for (int i = 0; i < kLatent; ++i) ASSERT_EQ(to_float(got.latent[size_t(i)]), KvFp8DsMla::value(row, i)) << i;
  }
}

TEST(ManyHeadsScales, AnyFinitePositiveScale) {
  for (const float magnitude : {0x1p-14f, 1.0f, 0x1p40f, 0x1p118f}) {
    SCOPED_TRACE(magnitude);
    CoreCase c({.heads = 24, .valid = {1, 33, 255, 2048}, .query_magnitude = 1 / double(magnitude)});
    set_scales(c, [&] { return magnitude * (1.0f + float(c.random()() % 100000) / 100000.0f) / 448.0f; });
    expect_device_agrees(c, kKernel);
  }
}

// Scales of a row's keys that lie up to 2^100 apart, and keys of huge scale that no head attends to.
TEST(ManyHeadsScales, FarApart) {
  for (const int spread : {6, 20, 50}) {
    SCOPED_TRACE(spread);
    CoreCase c({.heads = 24, .valid = {2, 300, 2048}, .query_magnitude = 0});  // p is the same for all keys
    set_scales(c, [&] { return std::ldexp(1.5f, int(c.random()() % uint64_t(2 * spread + 1)) - spread); });
    expect_device_agrees(c, kKernel);
  }
  CoreCase c({.heads = 24, .valid = {300, 2048}});
  for (int b = 0; b < c.rows(); ++b) {
    for (int head = 0; head < c.heads(); ++head) c.set_query(b, head, 0, -1);  // against code 0x7E below
  }
  int nth = 0;
  c.for_selected([&](std::byte* row) {
    if (nth++ % 53 != 17) return;
    row[0] = std::byte(0x7E);
    for (int i = 1; i < kLatent; ++i)
      row[i] = std::byte(uint8_t(row[i]) & 0x81);  // all but element 0 is next to nothing
    const float huge = 0x1p60f;
    for (int tile = 0; tile < KvFp8DsMla::kTiles; ++tile) {
      std::memcpy(row + KvFp8DsMla::kScalesAt + tile * int(sizeof(float)), &huge, sizeof(huge));
    }
  });
  expect_device_agrees(c, kKernel);
}

// The largest scale times the smallest code is finite in FP32 and must be here.
TEST(ManyHeadsScales, LargestScale) {
  CoreCase c({.heads = 24, .valid = {1, 2}, .query_magnitude = 0});
  set_scales(c, [] { return 0x1.fffffep127f; });
  c.for_selected([&](std::byte* row) {
    for (int i = 0; i < kLatent; ++i) row[i] = std::byte(i % 2 == 0 ? 0x01 : 0x81);
  });
  expect_device_agrees(c, kKernel);
}

// ---- independence ----

TEST_P(ManyHeads, NanAndInfinityStayInTheirRow) {
  CoreCase c({.format = GetParam(), .heads = 28, .valid = {300, 300, 40, 2048}});
  const CoreResult want = DeviceCore(c, kKernel).run();
  // Rows 0 and 1: head 5 of the query. Row 2: a key of its own.
  constexpr int kHead = 5;
  c.set_query(0, kHead, 77, float_of(0x7FFFFFFFu));
  if (c.query().element == 2) c.set_query(1, kHead, 3, HUGE_VALF);
  int32_t own = 0;
  while (c.selects(0, own) || c.selects(1, own) || c.selects(3, own)) ++own;
  c.selected(2)[17] = own;
  c.encode_random(own);
  // A latent's code, or a scale.
  c.row(own)[GetParam() == KvFormat::kNvfp4DsMla ? KvNvfp4DsMla::kRowBytes - 1 : 3] = std::byte(0xFF);
  const CoreResult got = DeviceCore(c, kKernel).run();
  for (int b = 0; b < c.rows(); ++b) {
    for (int head = 0; head < c.heads(); ++head) {
      const bool harmed = (b == 0 && head == kHead) || (b == 1 && head == kHead && c.query().element == 2) || b == 2;
      const size_t at = size_t(b * c.heads() + head);
      SCOPED_TRACE(place_in(got, at * kLatent));
      int finite = 0, changed = 0;
      for (size_t i = at * kLatent; i < (at + 1) * kLatent; ++i) {
        finite += std::isfinite(to_float(got.latent[i]));
        changed += got.latent[i].bits != want.latent[i].bits;
      }
      if (harmed) {
        EXPECT_TRUE(std::isnan(got.lse[at]));
        EXPECT_EQ(finite, 0);
      } else {
        EXPECT_EQ(bits_of(got.lse[at]), bits_of(want.lse[at]));
        EXPECT_EQ(changed, 0);
      }
    }
  }
}

// ---- time ----

TEST(CoreTime, ManyHeads) {
  CoreTimer timer;
  for (const KvFormat format : kFormats) {
    for (const int heads : {24, 48, 96}) {
      for (const int rows : {1, 8, 64}) timer.report(kKernel, format, heads, rows);
    }
  }
}

}  // namespace
}  // namespace dsacore::test
