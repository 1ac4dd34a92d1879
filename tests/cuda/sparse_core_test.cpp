// The sparse core of the cuda backend (spec 5, step 11), each kernel by its name, against the reference backend.
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/sparse_core_case.h"

namespace dsacore::test {
namespace {

constexpr KvFormat kFormats[] = {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla};

struct Named {
  std::string_view kernel;
  int heads;
};

std::string name_of_format(const testing::TestParamInfo<KvFormat>& param) { return std::string(name_of(param.param)); }
std::string name_of_shape(const testing::TestParamInfo<std::tuple<KvFormat, Named>>& param) {
  const auto& [format, named] = param.param;
  return std::string(name_of(format)) + "_" + std::string(named.kernel) + std::to_string(named.heads);
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

class CoreShapes : public testing::TestWithParam<std::tuple<KvFormat, Named>> {};

TEST_P(CoreShapes, EveryValidCount) {
  const auto& [format, named] = GetParam();
  CoreCase c({.format = format, .heads = named.heads, .valid = {0, 1, 63, 64, 65, 127, 1000, 2047, 2048}});
  const CoreResult want = run_reference(c);
  DeviceCore device(c, named.kernel);
  const CoreResult got = device.run();
  EXPECT_LT(expect_agreement(got, want), 1.7e-3);  // the latent's own rounding leaves 1.2e-3
  expect_same_bits(device.run(), got, c.rows());
  for (int head = 0; head < named.heads; ++head) {  // row 0 has no key
    EXPECT_EQ(got.lse[size_t(head)], -HUGE_VALF);
    for (int i = 0; i < kLatent; ++i) EXPECT_EQ(got.latent[size_t(head * kLatent + i)].bits, 0);
  }
}

// One to eight rows are cut most finely, in clusters of 16.
TEST_P(CoreShapes, FewRows) {
  const auto& [format, named] = GetParam();
  for (const std::vector<int>& valid :
       {std::vector{2048}, {33}, {0}, {513, 2048}, {2047, 1025, 1}, {2048, 31, 1536, 64, 700}}) {
    SCOPED_TRACE(testing::PrintToString(valid));
    CoreCase c({.format = format, .heads = named.heads, .valid = valid});
    EXPECT_LT(expect_device_agrees(c, named.kernel), 1.7e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(FormatsAndHeads, CoreShapes,
                         testing::Combine(testing::ValuesIn(kFormats),
                                          testing::Values(Named{"few_heads", 1}, Named{"few_heads", 5},
                                                          Named{"few_heads", 6}, Named{"few_heads", 8},
                                                          Named{"few_heads", 12}, Named{"few_heads", 16})),
                         name_of_shape);

class FewHeads : public testing::TestWithParam<KvFormat> {
 protected:
  static constexpr std::string_view kKernel = "few_heads";
};
INSTANTIATE_TEST_SUITE_P(Formats, FewHeads, testing::ValuesIn(kFormats), name_of_format);

// Every way in which rows are cut: 1, 2, 4, 8, 16 CTAs a cluster, 1, 2, 4 clusters a row. A row's bits are its own.
TEST_P(FewHeads, AnyNumberOfRows) {
  for (const int rows : {1, 2, 3, 4, 6, 9, 16, 20, 33, 40, 66, 67, 132, 133, 256}) {
    SCOPED_TRACE(rows);
    std::vector<int> valid;
    for (int row = 0; row < rows; ++row) valid.push_back(row % 8 == 0 ? 2048 : 37 * row % 300);
    CoreCase c({.format = GetParam(), .heads = 3, .valid = valid, .seed = uint64_t(rows)});
    expect_device_agrees(c, kKernel);
    DeviceCore device(c, kKernel);
    const CoreResult alone = device.run();
    for (int row = 1; row < rows; ++row) c.valid[size_t(row)] /= 2;
    device.upload();
    expect_same_bits(device.run(), alone, 1);
  }
}

TEST_P(FewHeads, SmallTopk) {
  for (const int topk : {1, 16, 64, 65, 300, 512, 1024}) {
    SCOPED_TRACE(topk);
    CoreCase few({.format = GetParam(), .topk = topk, .valid = {topk, 1, 0, topk}});
    expect_device_agrees(few, kKernel);
    CoreCase one({.format = GetParam(), .topk = topk, .valid = {topk}});
    expect_device_agrees(one, kKernel);
    CoreCase many({.format = GetParam(), .heads = 2, .topk = topk, .valid = std::vector<int>(50, topk)});
    expect_device_agrees(many, kKernel);
  }
}

TEST_P(FewHeads, FewerLiveRowsThanPrepared) {
  CoreCase c({.format = GetParam(), .heads = 6, .valid = std::vector<int>(40, 1500)});
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

TEST_P(FewHeads, PagesBetweenOtherLayersPages) {
  for (const auto& [page, stride] : {std::pair{64, 64 + 17}, {2048, 2048}, {2048, 3 * 2048}}) {
    SCOPED_TRACE(page);
    CoreCase c({.format = GetParam(), .heads = 6, .valid = {1500, 2048}, .page = page, .stride_rows = stride});
    expect_device_agrees(c, kKernel);
  }
}

TEST_P(FewHeads, PhysicalRowsUpTo31Bits) {
  CoreCase c({.format = GetParam(), .heads = 6, .valid = {100, 2048}});
  const CoreResult want = run_reference(c);
  for (const int64_t first : {int64_t(1) << 24, int64_t(1) << 28, (int64_t(1) << 31) - 1 - 4096}) {
    SCOPED_TRACE(first);
    expect_device_agrees(c, kKernel, want, first);
  }
}

// ---- values ----

TEST_P(FewHeads, SaturatedValues) {
  CoreCase c({.format = GetParam(), .valid = {1, 300, 2048}, .query_magnitude = 1e-3});
  const int values = GetParam() == KvFormat::kNvfp4DsMla ? KvNvfp4DsMla::kRowBytes : kLatent;
  c.for_selected([&](std::byte* row) {
    for (int i = 0; i < values; ++i) {
      const bool negative = (c.random()() & 1) != 0;
      const bool scale = GetParam() == KvFormat::kNvfp4DsMla && i >= KvNvfp4DsMla::kScalesAt;
      const uint8_t largest = GetParam() == KvFormat::kNvfp4DsMla && i < KvNvfp4DsMla::kPeAt ? 0x77 : 0x7E;
      row[i] = std::byte(negative && !scale ? largest | 0x80 : largest);
    }
  });
  expect_device_agrees(c, kKernel);
}

// Every byte a key can have but NaN: all codes, all scale codes, subnormal ones too.
TEST_P(FewHeads, EveryCode) {
  CoreCase c({.format = GetParam(), .valid = {40, 2048}, .query_magnitude = 1e-2});
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
TEST_P(FewHeads, LargeLogits) {
  CoreCase c({.format = GetParam(), .valid = {2, 300, 2048}});
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
  const CoreResult want = run_reference(c);
  float largest = 0;
  for (const float lse : want.lse) largest = std::max(largest, std::abs(lse));
  EXPECT_GT(largest, 1e4f);
  expect_device_agrees(c, kKernel, want);
}

// A single key, so p = 1: the latent is the dequantized value itself.
TEST_P(FewHeads, OneKeyIsExact) {
  CoreCase c({.format = GetParam(), .valid = {1}});
  c.model.k_scale = 1;
  const CoreResult got = DeviceCore(c, kKernel).run();
  for (int i = 0; i < kLatent; ++i) {
    const float want = with_layout(GetParam(), [&](auto layout) { return layout.value(c.row(c.selected(0)[0]), i); });
    EXPECT_EQ(to_float(got.latent[size_t(i)]), to_float(to_bf16(want))) << i;
  }
}

// BF16 queries that FP16 cannot hold: each head has a magnitude of its own, and outliers.
TEST(FewHeadsQuery, BeyondHalfPrecision) {
  for (const int exponent : {-120, -60, -20, 0}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = 16, .valid = {500, 2048}});
    for (int b = 0; b < c.rows(); ++b) {
      for (int head = 0; head < c.heads(); ++head) {
        const float magnitude = std::ldexp(0.01f, exponent + head % 4);
        for (int i = 0; i < kQueryRow; ++i) {
          c.set_query(b, head, i, magnitude * float(c.normal()) * (i % 100 == 7 ? 300.0f : 1.0f));
        }
      }
    }
    c.model.config.softmax_scale = std::ldexp(1 / std::sqrt(192.0), -exponent);
    expect_device_agrees(c, "few_heads");
  }
}

// ---- scales of fp8_ds_mla ----

TEST(FewHeadsScales, PowersOfTwo) {
  for (const int exponent : {-110, -14, 0, 1, 20, 58, 100}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = 6, .valid = {1, 33, 700, 2048}, .query_magnitude = std::ldexp(0.01, -exponent)});
    set_scales(c, [&] { return std::ldexp(1.0f, exponent + int(c.random()() % 3)); });
    expect_device_agrees(c, "few_heads");
  }
}

TEST(FewHeadsScales, OneKeyIsExactAtAnyScale) {
  for (const int exponent : {-117, -14, 0, 58, 118, 119, 120, 126}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = 6, .valid = {1}, .query_magnitude = 0});
    set_scales(c, [&] { return std::ldexp(1.0f, exponent); });
    const std::byte* row = c.row(c.selected(0)[0]);
    const CoreResult got = DeviceCore(c, "few_heads").run();
    for (int i = 0; i < kLatent; ++i) EXPECT_EQ(to_float(got.latent[size_t(i)]), KvFp8DsMla::value(row, i)) << i;
  }
}

TEST(FewHeadsScales, AnyFinitePositiveScale) {
  for (const float magnitude : {0x1p-14f, 1.0f, 0x1p40f, 0x1p118f}) {
    SCOPED_TRACE(magnitude);
    CoreCase c({.heads = 6, .valid = {1, 33, 255, 2048}, .query_magnitude = 1 / double(magnitude)});
    set_scales(c, [&] { return magnitude * (1.0f + float(c.random()() % 100000) / 100000.0f) / 448.0f; });
    expect_device_agrees(c, "few_heads");
  }
}

// Scales of a row's keys that lie up to 2^100 apart, and keys of huge scale that no head attends to.
TEST(FewHeadsScales, FarApart) {
  for (const int spread : {6, 20, 50}) {
    SCOPED_TRACE(spread);
    CoreCase c({.heads = 12, .valid = {2, 300, 2048}, .query_magnitude = 0});  // p is the same for all keys
    set_scales(c, [&] { return std::ldexp(1.5f, int(c.random()() % uint64_t(2 * spread + 1)) - spread); });
    expect_device_agrees(c, "few_heads");
  }
  CoreCase c({.heads = 12, .valid = {300, 2048}});
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
  expect_device_agrees(c, "few_heads");
}

// The largest scale times the smallest code is finite in FP32 and must be here.
TEST(FewHeadsScales, LargestScale) {
  CoreCase c({.heads = 1, .valid = {1, 2}, .query_magnitude = 0});
  set_scales(c, [] { return 0x1.fffffep127f; });
  c.for_selected([&](std::byte* row) {
    for (int i = 0; i < kLatent; ++i) row[i] = std::byte(i % 2 == 0 ? 0x01 : 0x81);
  });
  expect_device_agrees(c, "few_heads");
}

// ---- independence ----

TEST_P(FewHeads, NanAndInfinityStayInTheirRow) {
  CoreCase c({.format = GetParam(), .heads = 12, .valid = {300, 300, 40, 2048}});
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

TEST(CoreTime, FewHeads) {
  CoreTimer timer;
  for (const KvFormat format : kFormats) {
    for (const int heads : {12, 6}) {
      for (const int rows : {1, 8, 64}) timer.report("few_heads", format, heads, rows);
    }
  }
  for (const int rows : {2, 4, 16, 32, 48, 96, 128}) timer.report("few_heads", KvFormat::kFp8DsMla, 12, rows);
}

}  // namespace
}  // namespace dsacore::test
