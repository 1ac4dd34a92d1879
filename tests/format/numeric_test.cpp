// src/format/numeric.h against tables: every code, every midpoint and its neighbours, random floats.
#include "format/numeric.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "format/tables.h"

namespace dsacore {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kInf64 = std::numeric_limits<double>::infinity();

static_assert(to_e4m3(1.0f) == 0x38 && e4m3_to_float(0x38) == 1.0f, "usable in constant expressions");
static_assert(to_e2m1(-6.0f) == 0xF && to_bf16(1.0f).bits == 0x3F80 && ue8m0_ceil(3.0f) == 129);

/// Every value of `magnitudes`, every midpoint of neighbours, the floats next to them, and specials; both signs.
std::vector<float> edges(const tables::Magnitudes& magnitudes) {
  std::vector<double> exact;
  for (size_t i = 0; i < magnitudes.values.size(); ++i) {
    const double next = i + 1 < magnitudes.values.size() ? magnitudes.values[i + 1] : magnitudes.end;
    exact.push_back(magnitudes.values[i]);
    exact.push_back((magnitudes.values[i] + next) / 2);
  }
  std::vector<float> out = {kInf, -kInf, kNan, -kNan, std::numeric_limits<float>::max(), 1e30f, 1e-30f, 0x1p-149f};
  for (const double x : exact) {
    const float f = float(x);
    EXPECT_EQ(double(f), x) << "midpoints must be floats for this test";
    for (const float each : {f, std::nextafter(f, kInf), std::nextafter(f, -kInf)}) {
      out.push_back(each);
      out.push_back(-each);
    }
  }
  return out;
}

/// Floats with random bits, and floats of ordinary size.
std::vector<float> random_floats(int n) {
  std::mt19937 bits(1);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-14, 12);
  std::vector<float> out;
  for (int i = 0; i < n; ++i) {
    out.push_back(std::bit_cast<float>(uint32_t(bits())));
    out.push_back(normal(bits) * std::exp2(exponent(bits)));
  }
  return out;
}

std::vector<float> every_bf16() {
  std::vector<float> out;
  for (uint32_t bits = 0; bits < 65536; ++bits) out.push_back(std::bit_cast<float>(bits << 16));
  return out;
}

TEST(E4m3, DecodesEveryCode) {
  for (int code = 0; code < 256; ++code) {
    const float got = e4m3_to_float(uint8_t(code));
    const double want = tables::from_e4m3(uint8_t(code));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << code;
    } else {
      EXPECT_EQ(double(got), want) << code;
      EXPECT_EQ(std::signbit(got), code >= 128) << code;
    }
  }
  EXPECT_EQ(e4m3_to_float(0x7E), 448.0f);
  EXPECT_EQ(e4m3_to_float(0x01), 0x1p-9f);
  EXPECT_EQ(e4m3_to_float(0x08), 0x1p-6f);
}

TEST(E4m3, EncodesItsOwnValues) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7F) != 0x7F) {
      EXPECT_EQ(to_e4m3(e4m3_to_float(uint8_t(code))), code);
    }
  }
  EXPECT_EQ(to_e4m3(e4m3_to_float(0xFF)), 0x7F) << "the negative NaN becomes 0x7F";
}

TEST(E4m3, RoundsEdgesToNearestEven) {
  for (const float x : edges(tables::e4m3())) ASSERT_EQ(int(to_e4m3(x)), int(tables::to_e4m3(x))) << x;
}

TEST(E4m3, RoundsEveryBf16AndRandomFloats) {
  for (const float x : every_bf16()) ASSERT_EQ(int(to_e4m3(x)), int(tables::to_e4m3(x))) << x;
  for (const float x : random_floats(1'000'000)) ASSERT_EQ(int(to_e4m3(x)), int(tables::to_e4m3(x))) << x;
}

TEST(E4m3, Specials) {
  EXPECT_EQ(to_e4m3(kInf), 0x7E);
  EXPECT_EQ(to_e4m3(-kInf), 0xFE);
  EXPECT_EQ(to_e4m3(464.0f), 0x7E) << "the midpoint to what would be 480 saturates";
  EXPECT_EQ(to_e4m3(1e30f), 0x7E);
  EXPECT_EQ(to_e4m3(kNan), 0x7F);
  EXPECT_EQ(to_e4m3(-kNan), 0x7F);
  EXPECT_EQ(to_e4m3(0.0f), 0x00);
  EXPECT_EQ(to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(to_e4m3(-0x1p-140f), 0x80) << "the sign of what rounds to zero is kept";
  EXPECT_EQ(to_e4m3(0x1p-10f), 0x00) << "half of the least subnormal goes to even";
  EXPECT_EQ(to_e4m3(0x3p-10f), 0x02);
}

TEST(E2m1, DecodesEveryCode) {
  for (int code = 0; code < 16; ++code) {
    EXPECT_EQ(double(e2m1_to_float(uint8_t(code))), tables::from_e2m1(uint8_t(code))) << code;
    EXPECT_EQ(std::signbit(e2m1_to_float(uint8_t(code))), code >= 8) << code;
    EXPECT_EQ(to_e2m1(e2m1_to_float(uint8_t(code))), code);
  }
}

TEST(E2m1, Rounds) {
  for (const float x : edges(tables::e2m1())) ASSERT_EQ(int(to_e2m1(x)), int(tables::to_e2m1(x))) << x;
  for (const float x : every_bf16()) ASSERT_EQ(int(to_e2m1(x)), int(tables::to_e2m1(x))) << x;
  for (const float x : random_floats(1'000'000)) ASSERT_EQ(int(to_e2m1(x)), int(tables::to_e2m1(x))) << x;
}

TEST(E2m1, Specials) {
  EXPECT_EQ(to_e2m1(kNan), 7);
  EXPECT_EQ(to_e2m1(-kNan), 7);
  EXPECT_EQ(to_e2m1(kInf), 7);
  EXPECT_EQ(to_e2m1(-kInf), 15);
  EXPECT_EQ(to_e2m1(-0.0f), 8);
  EXPECT_EQ(to_e2m1(0.25f), 0);
  EXPECT_EQ(to_e2m1(0.75f), 2);
  EXPECT_EQ(to_e2m1(2.5f), 4);
  EXPECT_EQ(to_e2m1(5.0f), 6);
}

TEST(Bf16, DecodesEveryCode) {
  const auto& values = tables::bf16().values;
  for (uint32_t code = 0; code < 65536; ++code) {
    const float got = to_float(BFloat16{uint16_t(code)});
    const uint32_t magnitude = code & 0x7FFF;
    EXPECT_EQ(std::signbit(got), code >= 0x8000) << code;
    if (magnitude < 0x7F80) {
      EXPECT_EQ(std::fabs(double(got)), values[magnitude]) << code;
    } else if (magnitude == 0x7F80) {
      EXPECT_EQ(std::fabs(got), kInf);
    } else {
      EXPECT_TRUE(std::isnan(got)) << code;
    }
  }
}

TEST(Bf16, EncodesItsOwnValues) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float x = to_float(BFloat16{uint16_t(code)});
    const uint16_t want = std::isnan(x) ? uint16_t((code & 0x8000) | 0x7FC0) : uint16_t(code);
    EXPECT_EQ(to_bf16(x).bits, want);
    EXPECT_EQ(to_bf16(double(x)).bits, want);
  }
}

TEST(Bf16, RoundsFloats) {
  for (const float x : edges(tables::bf16())) {
    if (!std::isnan(x)) {
      ASSERT_EQ(to_bf16(x).bits, std::isinf(x) ? (x > 0 ? 0x7F80 : 0xFF80) : tables::to_bf16(x)) << x;
    }
  }
  for (const float x : random_floats(1'000'000)) {
    if (std::isfinite(x)) {
      ASSERT_EQ(to_bf16(x).bits, tables::to_bf16(x)) << x;
    }
  }
}

TEST(Bf16, RoundsDoublesOnce) {
  const auto& table = tables::bf16();
  for (size_t i = 0; i < table.values.size(); ++i) {
    const double next = i + 1 < table.values.size() ? table.values[i + 1] : table.end;
    const double middle = (table.values[i] + next) / 2;
    const uint16_t down = uint16_t(i), up = uint16_t(i + 1);
    // Just beside the midpoint lie doubles that a rounding to float would put on it.
    ASSERT_EQ(to_bf16(middle).bits, i % 2 == 0 ? down : up) << middle;
    ASSERT_EQ(to_bf16(std::nextafter(middle, 0.0)).bits, down) << middle;
    ASSERT_EQ(to_bf16(std::nextafter(middle, kInf64)).bits, up) << middle;
    ASSERT_EQ(to_bf16(-middle).bits, 0x8000 | (i % 2 == 0 ? down : up)) << middle;
    ASSERT_EQ(to_bf16(-std::nextafter(middle, 0.0)).bits, 0x8000 | down) << middle;
    ASSERT_EQ(to_bf16(-std::nextafter(middle, kInf64)).bits, 0x8000 | up) << middle;
  }
}

TEST(Bf16, RoundsRandomDoubles) {
  std::mt19937_64 bits(2);
  std::uniform_int_distribution<int> code(0, 0x7F7F), exponent(-60, -20);
  for (int i = 0; i < 1'000'000; ++i) {
    // Near midpoints, at distances that FP32 cannot show.
    const double low = tables::bf16().values[size_t(code(bits))];
    const double near = low * (1 + 0x1p-8) * (1 + std::ldexp(double(int64_t(bits())) / 0x1p63, exponent(bits)));
    ASSERT_EQ(to_bf16(near).bits, tables::to_bf16(near)) << near;
    const double any = std::bit_cast<double>(bits());
    if (std::isfinite(any)) {
      ASSERT_EQ(to_bf16(any).bits, tables::to_bf16(std::clamp(any, -0x1p128, 0x1p128))) << any;
    }
  }
}

TEST(Bf16, Specials) {
  EXPECT_EQ(to_bf16(kInf64).bits, 0x7F80);
  EXPECT_EQ(to_bf16(-kInf64).bits, 0xFF80);
  EXPECT_EQ(to_bf16(1e300).bits, 0x7F80);
  EXPECT_EQ(to_bf16(-1e-300).bits, 0x8000);
  EXPECT_EQ(to_bf16(-0.0).bits, 0x8000);
  EXPECT_EQ(to_bf16(double(kNan)).bits & 0x7FFF, 0x7FC0);
}

TEST(Ue8m0, CeilOfPowersAndNeighbours) {
  for (int e = -126; e <= 127; ++e) {
    const float power = std::ldexp(1.0f, e);
    EXPECT_EQ(ue8m0_ceil(power), e + 127) << e;
    EXPECT_EQ(ue8m0_ceil(std::nextafter(power, kInf)), e + 128) << e;
    if (e > -126) {
      EXPECT_EQ(ue8m0_ceil(std::nextafter(power, 0.0f)), e + 127) << e;
    }
  }
  EXPECT_EQ(ue8m0_ceil(0.0f), 0);
  EXPECT_EQ(ue8m0_ceil(0x1p-149f), 1) << "subnormals go up to the least normal";
  EXPECT_EQ(ue8m0_ceil(std::numeric_limits<float>::max()), 255);
  EXPECT_EQ(ue8m0_ceil(kInf), 255);
  EXPECT_EQ(ue8m0_ceil(kNan), 255);
}

TEST(Ue8m0, CeilOfRandomFloats) {
  std::mt19937 bits(3);
  std::uniform_int_distribution<uint32_t> normal(0x00800000, 0x7F000000);
  for (int i = 0; i < 200'000; ++i) {
    const float x = std::bit_cast<float>(normal(bits));
    ASSERT_EQ(std::ldexp(1.0, ue8m0_ceil(x) - 127), tables::power_of_two_from(x)) << x;
  }
}

TEST(Ue8m0, DecodesEveryByte) {
  for (int byte = 0; byte < 255; ++byte) {
    EXPECT_EQ(double(ue8m0_to_float(uint8_t(byte))), std::ldexp(1.0, byte - 127)) << byte;
  }
  EXPECT_TRUE(std::isnan(ue8m0_to_float(255)));
}

TEST(Bits, MagnitudeAndNan) {
  EXPECT_EQ(magnitude(-3.5f), 3.5f);
  EXPECT_EQ(bits_of(magnitude(-0.0f)), 0u);
  EXPECT_EQ(magnitude(-kInf), kInf);
  EXPECT_TRUE(is_nan(magnitude(-kNan)));
  EXPECT_TRUE(is_nan(float_of(0x7F800001u)));
  EXPECT_TRUE(is_nan(float_of(0xFFFFFFFFu)));
  EXPECT_FALSE(is_nan(kInf));
  EXPECT_FALSE(is_nan(0.0f));
}

}  // namespace
}  // namespace dsacore
