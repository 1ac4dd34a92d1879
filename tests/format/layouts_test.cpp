// The cache layouts of spec 6: every byte's place as a literal, rows encoded a second time by other means, round trips,
// zero rows, saturation, NaN.
#include "format/layouts.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "format/tables.h"

namespace dsacore {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using Row = std::vector<uint8_t>;

/// What a cache row is made from: 512 latents and 64 pe, all BF16 values.
struct KvInput {
  std::array<float, 512> c;
  std::array<BFloat16, 64> pe;
};

/// BF16 values of every size: some tiny, some huge, zeros of both signs in between.
float some_bf16(std::mt19937& bits, float exponent_low, float exponent_high) {
  if (bits() % 16 == 0) return bits() % 2 == 0 ? 0.0f : -0.0f;
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(exponent_low, exponent_high);
  return to_float(to_bf16(normal(bits) * std::exp2(exponent(bits))));
}

KvInput random_input(uint32_t seed) {
  std::mt19937 bits(seed);
  KvInput in;
  // Neighbouring runs of 16 differ in size, so that each block and tile has a scale of its own.
  for (size_t i = 0; i < in.c.size(); ++i) {
    const float size = float(int(i / 16 * 7 + seed) % 24) - 14;
    in.c[i] = some_bf16(bits, size, size + 3);
  }
  for (BFloat16& x : in.pe) x = to_bf16(some_bf16(bits, -8, 10));
  return in;
}

Row encode(KvFormat format, const KvInput& in, float k_scale_inv = 1) {
  Row row(size_t(row_bytes(format)), 0xEE);
  encode_kv(format, in.c.data(), in.pe.data(), k_scale_inv, reinterpret_cast<std::byte*>(row.data()));
  return row;
}

const std::byte* bytes(const Row& row) { return reinterpret_cast<const std::byte*>(row.data()); }

/// Writes a float's bytes, least significant first.
void put_float(Row& row, size_t at, float x) {
  const uint32_t b = bits_of(x);
  for (size_t i = 0; i < 4; ++i) row[at + i] = uint8_t(b >> (8 * i));
}

float largest(const float* x, int n) {
  float amax = 0;
  for (int i = 0; i < n; ++i) amax = std::max(amax, std::fabs(x[i]));
  return amax;
}

void expect_equal(const Row& got, const Row& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(int(got[i]), int(want[i])) << what << ": byte " << i;
}

// ---- encoders written from spec 6 alone ----

Row fp8_ds_mla_row(const KvInput& in) {
  Row row(656);
  for (int tile = 0; tile < 4; ++tile) {
    const float* c = in.c.data() + 128 * tile;
    const float scale = float(tables::power_of_two_from(std::max(largest(c, 128) / 448.0f, 1e-4f)));
    for (int i = 0; i < 128; ++i) row[size_t(128 * tile + i)] = tables::to_e4m3(c[i] / scale);
    put_float(row, size_t(512 + 4 * tile), scale);
  }
  for (size_t i = 0; i < 64; ++i) {
    row[528 + 2 * i] = uint8_t(in.pe[i].bits & 0xFF);
    row[529 + 2 * i] = uint8_t(in.pe[i].bits >> 8);
  }
  return row;
}

Row fp8_row(const KvInput& in, float k_scale_inv) {
  Row row(576);
  for (size_t i = 0; i < 512; ++i) row[i] = tables::to_e4m3(in.c[i] * k_scale_inv);
  for (size_t i = 0; i < 64; ++i) row[512 + i] = tables::to_e4m3(to_float(in.pe[i]) * k_scale_inv);
  return row;
}

// The byte of each block's scale.
constexpr std::array<size_t, 32> kNvfp4Scale = {320, 328, 336, 344, 321, 329, 337, 345, 322, 330, 338,
                                                346, 323, 331, 339, 347, 324, 332, 340, 348, 325, 333,
                                                341, 349, 326, 334, 342, 350, 327, 335, 343, 351};

Row nvfp4_ds_mla_row(const KvInput& in) {
  Row row(352, 0);
  for (size_t block = 0; block < 32; ++block) {
    const float* c = in.c.data() + 16 * block;
    const uint8_t code = tables::to_e4m3(std::max(largest(c, 16) / 6.0f, 0x1p-9f));
    const float scale = float(tables::from_e4m3(code));
    row[kNvfp4Scale[block]] = code;
    for (size_t i = 0; i < 16; ++i) {
      row[(16 * block + i) / 2] |= uint8_t(tables::to_e2m1(c[i] / scale) << (i % 2 == 0 ? 0 : 4));
    }
  }
  for (size_t i = 0; i < 64; ++i) row[256 + i] = tables::to_e4m3(to_float(in.pe[i]));
  return row;
}

/// A page of 64 tokens, all bytes 0xEE but token `token`'s.
Row index_fp8_page(const float* key, size_t token) {
  Row page(64 * 132, 0xEE);
  const float scale = float(tables::power_of_two_from(std::max(largest(key, 128), 1e-4f) / 448.0f));
  for (size_t i = 0; i < 128; ++i) page[128 * token + i] = tables::to_e4m3(key[i] / scale);
  put_float(page, 8192 + 4 * token, scale);
  return page;
}

Row index_mxfp4_page(const float* key, size_t token) {
  Row page(64 * 68, 0xEE);
  for (size_t block = 0; block < 4; ++block) {
    const float* k = key + 32 * block;
    const double scale = tables::power_of_two_from(std::max(largest(k, 32), 1e-4f) / 6.0f);
    for (size_t i = 0; i < 32; i += 2) {
      page[64 * token + 16 * block + i / 2] =
          uint8_t(tables::to_e2m1(k[i] / float(scale)) | tables::to_e2m1(k[i + 1] / float(scale)) << 4);
    }
    page[4096 + 4 * token + block] = uint8_t(std::ilogb(scale) + 127);
  }
  return page;
}

// ---- MLA cache ----

TEST(KvLayouts, RowBytes) {
  EXPECT_EQ(row_bytes(KvFormat::kFp8DsMla), 656);
  EXPECT_EQ(row_bytes(KvFormat::kFp8), 576);
  EXPECT_EQ(row_bytes(KvFormat::kNvfp4DsMla), 352);
}

TEST(KvLayouts, EveryByteOfRandomRows) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const KvInput in = random_input(seed);
    const float k_scale_inv = std::ldexp(1.0f + float(seed) / 300, int(seed % 7) - 3);
    const std::string what = "seed " + std::to_string(seed);
    ASSERT_NO_FATAL_FAILURE(expect_equal(encode(KvFormat::kFp8DsMla, in), fp8_ds_mla_row(in), "fp8_ds_mla, " + what));
    ASSERT_NO_FATAL_FAILURE(
        expect_equal(encode(KvFormat::kFp8, in, k_scale_inv), fp8_row(in, k_scale_inv), "fp8, " + what));
    ASSERT_NO_FATAL_FAILURE(
        expect_equal(encode(KvFormat::kNvfp4DsMla, in), nvfp4_ds_mla_row(in), "nvfp4_ds_mla, " + what));
  }
}

TEST(KvLayouts, DecodesBytesAtTheirPlaces) {
  std::mt19937 bits(9);
  Row row(656);
  for (uint8_t& b : row) b = uint8_t(bits() % 0x7F);
  const std::array<float, 4> scales = {0.25f, 3.0f, 1e-3f, 448.0f};  // older writers' are no powers of two
  for (size_t tile = 0; tile < 4; ++tile) put_float(row, 512 + 4 * tile, scales[tile]);
  for (size_t i = 0; i < 576; ++i) {
    const float want = i < 512 ? float(tables::from_e4m3(row[i])) * scales[i / 128]
                               : to_float(BFloat16{uint16_t(row[528 + 2 * (i - 512)] | row[529 + 2 * (i - 512)] << 8)});
    ASSERT_EQ(KvFp8DsMla::value(bytes(row), int(i)), want) << "fp8_ds_mla " << i;
    ASSERT_EQ(double(KvFp8::value(bytes(row), int(i))), tables::from_e4m3(row[i])) << "fp8 " << i;
    const uint8_t pair = row[i / 2];
    const double want_fp4 =
        i < 512 ? tables::from_e2m1(i % 2 == 0 ? pair & 15 : pair >> 4) * tables::from_e4m3(row[kNvfp4Scale[i / 16]])
                : tables::from_e4m3(row[256 + i - 512]);
    ASSERT_EQ(double(KvNvfp4DsMla::value(bytes(row), int(i))), want_fp4) << "nvfp4_ds_mla " << i;
  }
  for (int tile = 0; tile < 4; ++tile) EXPECT_EQ(KvFp8DsMla::scale(bytes(row), tile), scales[size_t(tile)]);
}

TEST(KvLayouts, RoundTripStaysWithinHalfAUnit) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const KvInput in = random_input(seed);
    const Row fp8 = encode(KvFormat::kFp8DsMla, in), fp4 = encode(KvFormat::kNvfp4DsMla, in);
    for (size_t i = 0; i < 512; ++i) {
      const float x = in.c[i];
      const float tile_scale = KvFp8DsMla::scale(bytes(fp8), int(i / 128));
      // Half a unit: 2^-4 of a normal e4m3 value, 2^-10 of the scale below.
      const float unit8 = std::max(std::fabs(x) * 0x1p-4f, tile_scale * 0x1p-10f);
      ASSERT_LE(std::fabs(KvFp8DsMla::value(bytes(fp8), int(i)) - x), unit8) << seed << " " << i;
      // e2m1's widest gap is 2 scales; its scale is itself rounded, by at most 2^-4 or 2^-10.
      const float block_scale = e4m3_to_float(fp4[kNvfp4Scale[i / 16]]);
      const float clipped = std::min(std::fabs(x), 6 * block_scale);
      ASSERT_LE(std::fabs(std::fabs(KvNvfp4DsMla::value(bytes(fp4), int(i))) - clipped), block_scale)
          << seed << " " << i;
    }
    for (size_t i = 0; i < 64; ++i) {
      ASSERT_EQ(bits_of(KvFp8DsMla::value(bytes(fp8), int(512 + i))), bits_of(to_float(in.pe[i]))) << "pe is exact";
    }
    // What was decoded is encoded without loss (its scale may be smaller, where the largest value was rounded down).
    KvInput again = in;
    for (size_t i = 0; i < 512; ++i) again.c[i] = KvFp8DsMla::value(bytes(fp8), int(i));
    const Row fp8_again = encode(KvFormat::kFp8DsMla, again);
    for (size_t i = 0; i < 512; ++i) {
      ASSERT_EQ(bits_of(KvFp8DsMla::value(bytes(fp8_again), int(i))), bits_of(again.c[i])) << seed << " " << i;
    }
  }
}

TEST(KvLayouts, ZeroRows) {
  KvInput in{};
  in.c[3] = -0.0f;
  in.c[7] = -0.0f;
  in.pe[5] = BFloat16{0x8000};
  Row row = encode(KvFormat::kFp8DsMla, in);
  EXPECT_EQ(KvFp8DsMla::scale(bytes(row), 0), 0x1p-13f) << "the least tile scale: 1e-4 rounded up to a power of two";
  EXPECT_EQ(row[3], 0x80);
  EXPECT_EQ(row[4], 0x00);
  EXPECT_EQ(row[528 + 11], 0x80);
  row = encode(KvFormat::kFp8, in, 2);
  EXPECT_EQ(row[3], 0x80);
  EXPECT_EQ(row[512 + 5], 0x80);
  row = encode(KvFormat::kNvfp4DsMla, in);
  EXPECT_EQ(row[320], 0x01) << "the least block scale: 2^-9";
  EXPECT_EQ(row[1], 0x80) << "element 3 is -0, element 2 is +0";
  EXPECT_EQ(row[256 + 5], 0x80);
  for (int i = 0; i < 576; ++i) EXPECT_EQ(KvNvfp4DsMla::value(bytes(row), i), 0.0f);
}

TEST(KvLayouts, TinyRowsUseTheLeastScale) {
  KvInput in{};
  in.c[0] = 0x1p-24f;
  in.c[128] = 0.05f;
  const Row row = encode(KvFormat::kFp8DsMla, in);
  EXPECT_EQ(KvFp8DsMla::scale(bytes(row), 0), 0x1p-13f);
  EXPECT_EQ(KvFp8DsMla::scale(bytes(row), 1), 0x1p-13f) << "0.05 / 448 = 1.1e-4 rounds up to the same power";
  EXPECT_EQ(row[0], 0x00) << "2^-24 / 2^-13 is below half of the least subnormal";
}

TEST(KvLayouts, Saturation) {
  KvInput in{};
  in.c[0] = 1e6f;
  in.c[1] = -1e6f;
  in.pe[0] = to_bf16(1e6f);
  in.pe[1] = to_bf16(-500.0f);
  Row row = encode(KvFormat::kFp8, in, 4);
  EXPECT_EQ(row[0], 0x7E);
  EXPECT_EQ(row[1], 0xFE);
  EXPECT_EQ(row[512], 0x7E);
  EXPECT_EQ(row[513], 0xFE);
  row = encode(KvFormat::kNvfp4DsMla, in);
  EXPECT_EQ(row[320], 0x7E) << "the block scale saturates at 448";
  EXPECT_EQ(row[0], 0xF7) << "6 and -6";
  EXPECT_EQ(row[256], 0x7E);
  EXPECT_EQ(row[257], 0xFE);
  row = encode(KvFormat::kFp8DsMla, in);
  EXPECT_LE(std::fabs(KvFp8DsMla::value(bytes(row), 0) - in.c[0]), 1e6f / 16) << "a tile scale never saturates";
}

TEST(KvLayouts, NanStaysInItsTileAndBlock) {
  const KvInput clean = random_input(77);
  KvInput in = clean;
  in.c[130] = kNan;
  in.pe[9] = BFloat16{0x7FC0};
  for (const KvFormat format : {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
    const Row got = encode(format, in), want = encode(format, clean);
    for (size_t i = 0; i < got.size(); ++i) {
      bool may_differ = false;
      switch (format) {
        case KvFormat::kFp8DsMla:
          may_differ = (i >= 128 && i < 256) || (i >= 516 && i < 520) || i == 528 + 18 || i == 529 + 18;
          break;
        case KvFormat::kFp8: may_differ = i == 130 || i == 512 + 9; break;
        case KvFormat::kNvfp4DsMla: may_differ = (i >= 64 && i < 72) || i == kNvfp4Scale[8] || i == 256 + 9; break;
      }
      if (!may_differ) {
        ASSERT_EQ(int(got[i]), int(want[i])) << name_of(format) << " byte " << i;
      }
    }
  }
  EXPECT_EQ(encode(KvFormat::kFp8, in)[130], 0x7F);
  EXPECT_EQ(encode(KvFormat::kFp8DsMla, in)[130], 0x7F);
  EXPECT_EQ(encode(KvFormat::kNvfp4DsMla, in)[256 + 9], 0x7F);
}

// ---- index cache ----

std::vector<float> random_key(uint32_t seed) {
  std::mt19937 bits(seed + 1000);
  std::vector<float> key(128);
  for (size_t i = 0; i < key.size(); ++i) {
    const float size = float(int(i / 32 * 5 + seed) % 20) - 14;
    key[i] = some_bf16(bits, size, size + 3);
  }
  return key;
}

Row encode_page(IndexFormat format, const std::vector<float>& key, int token) {
  Row page(size_t(64 * row_bytes(format)), 0xEE);
  encode_index(format, key.data(), token, reinterpret_cast<std::byte*>(page.data()));
  return page;
}

TEST(IndexLayouts, RowBytes) {
  EXPECT_EQ(row_bytes(IndexFormat::kFp8), 132);
  EXPECT_EQ(row_bytes(IndexFormat::kMxfp4), 68);
  EXPECT_EQ(IndexFp8::kPageBytes, 8448);
  EXPECT_EQ(IndexMxfp4::kPageBytes, 4352);
}

TEST(IndexLayouts, EveryByteOfAPage) {
  for (int token = 0; token < 64; ++token) {
    const std::vector<float> key = random_key(uint32_t(token));
    const std::string what = "token " + std::to_string(token);
    ASSERT_NO_FATAL_FAILURE(expect_equal(encode_page(IndexFormat::kFp8, key, token),
                                         index_fp8_page(key.data(), size_t(token)), "fp8, " + what));
    ASSERT_NO_FATAL_FAILURE(expect_equal(encode_page(IndexFormat::kMxfp4, key, token),
                                         index_mxfp4_page(key.data(), size_t(token)), "mxfp4, " + what));
  }
}

TEST(IndexLayouts, DecodesBytesAtTheirPlaces) {
  std::mt19937 bits(10);
  Row page(8448);
  for (uint8_t& b : page) b = uint8_t(bits());
  for (size_t token = 0; token < 64; ++token) {
    put_float(page, 8192 + 4 * token, float(token) + 0.5f);
    ASSERT_EQ(IndexFp8::scale(bytes(page), int(token)), float(token) + 0.5f);
    for (size_t i = 0; i < 128; ++i) {
      const double want = tables::from_e4m3(page[128 * token + i]);
      const double got = IndexFp8::value(bytes(page), int(token), int(i));
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << "fp8 token " << token << " value " << i;
      const uint8_t pair = page[64 * token + i / 2];
      ASSERT_EQ(double(IndexMxfp4::value(bytes(page), int(token), int(i))),
                tables::from_e2m1(i % 2 == 0 ? pair & 15 : pair >> 4))
          << "mxfp4 token " << token << " value " << i;
    }
    for (size_t block = 0; block < 4; ++block) {
      page[4096 + 4 * token + block] = uint8_t(token * 4 + block - (token == 63 && block == 3));
      ASSERT_EQ(double(IndexMxfp4::scale(bytes(page), int(token), int(block))),
                std::ldexp(1.0, page[4096 + 4 * token + block] - 127));
    }
  }
}

TEST(IndexLayouts, ZeroAndTinyKeys) {
  std::vector<float> key(128, 0.0f);
  key[1] = -0.0f;
  Row page = encode_page(IndexFormat::kFp8, key, 2);
  EXPECT_EQ(IndexFp8::scale(bytes(page), 2), 0x1p-22f) << "1e-4 / 448 = 2.2e-7 rounded up";
  EXPECT_EQ(page[257], 0x80);
  EXPECT_EQ(page[256], 0x00);
  page = encode_page(IndexFormat::kMxfp4, key, 2);
  EXPECT_EQ(IndexMxfp4::scale(bytes(page), 2, 3), 0x1p-15f) << "1e-4 / 6 = 1.7e-5 rounded up";
  EXPECT_EQ(page[128], 0x80);
  key[0] = 0x1p-20f;
  EXPECT_EQ(IndexFp8::scale(bytes(encode_page(IndexFormat::kFp8, key, 0)), 0), 0x1p-22f);
}

TEST(IndexLayouts, RoundTrip) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const std::vector<float> key = random_key(seed);
    const Row fp8 = encode_page(IndexFormat::kFp8, key, 5), fp4 = encode_page(IndexFormat::kMxfp4, key, 5);
    for (int i = 0; i < 128; ++i) {
      const float x = key[size_t(i)], scale8 = IndexFp8::scale(bytes(fp8), 5),
                  scale4 = IndexMxfp4::scale(bytes(fp4), 5, i / 32);
      ASSERT_LE(std::fabs(IndexFp8::value(bytes(fp8), 5, i) * scale8 - x),
                std::max(std::fabs(x) * 0x1p-4f, scale8 * 0x1p-10f))
          << i;
      ASSERT_LE(std::fabs(IndexMxfp4::value(bytes(fp4), 5, i) * scale4 - x), scale4) << i;
    }
  }
}

TEST(IndexLayouts, NanStaysInItsTokenAndBlock) {
  const std::vector<float> clean = random_key(5);
  std::vector<float> key = clean;
  key[40] = kNan;
  const Row got = encode_page(IndexFormat::kMxfp4, key, 1), want = encode_page(IndexFormat::kMxfp4, clean, 1);
  for (size_t i = 0; i < got.size(); ++i) {
    if ((i >= 80 && i < 96) || i == 4096 + 5) continue;  // its block of 32
    ASSERT_EQ(int(got[i]), int(want[i])) << i;
  }
  EXPECT_EQ(encode_page(IndexFormat::kFp8, key, 1)[128 + 40], 0x7F);
}

}  // namespace
}  // namespace dsacore
