// What sparse core tests of every backend put into a CoreCase: extreme codes, what is no number, large logits, other
// scales.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <tuple>

#include "cpu/sparse_core_case.h"

namespace dsacore {

inline constexpr KvFormat kFormats[] = {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla};

inline std::string name_of_format(const testing::TestParamInfo<KvFormat>& param) {
  return std::string(name_of(param.param));
}

inline std::string name_of_shape(const testing::TestParamInfo<std::tuple<KvFormat, int>>& param) {
  return std::string(name_of(std::get<0>(param.param))) + "_heads" + std::to_string(std::get<1>(param.param));
}

/// A row that selects no key.
inline void expect_no_keys(const CoreResult& got, int row, int heads) {
  for (int head = 0; head < heads; ++head) {
    const size_t at = size_t(row * heads + head);
    EXPECT_EQ(got.lse[at], -HUGE_VALF);
    for (size_t i = 0; i < size_t(kLatent); ++i) EXPECT_EQ(got.latent[at * kLatent + i].bits, 0);
  }
}

/// The largest codes of either sign, largest block scales too.
inline void saturate_values(CoreCase& c) {
  const KvFormat format = c.kv.format;
  const int values = format == KvFormat::kNvfp4DsMla ? KvNvfp4DsMla::kRowBytes : kLatent;
  c.for_selected([&](std::byte* row) {
    for (int i = 0; i < values; ++i) {
      const bool negative = (c.random()() & 1) != 0;
      const bool scale = format == KvFormat::kNvfp4DsMla && i >= KvNvfp4DsMla::kScalesAt;
      const uint8_t largest = format == KvFormat::kNvfp4DsMla && i < KvNvfp4DsMla::kPeAt ? 0x77 : 0x7E;
      row[i] = std::byte(negative && !scale ? largest | 0x80 : largest);
    }
  });
}

/// Every byte a key can have but NaN: all codes, all scale codes, subnormal ones too.
inline void write_every_code(CoreCase& c) {
  const KvFormat format = c.kv.format;
  c.for_selected([&](std::byte* row) {
    for (int i = 0; i < row_bytes(format); ++i) {
      if (format == KvFormat::kFp8DsMla && i >= kLatent) break;
      uint8_t code = uint8_t(c.random()());
      const bool nibbles = format == KvFormat::kNvfp4DsMla && i < KvNvfp4DsMla::kPeAt;
      if (!nibbles && (code & 0x7F) == 0x7F) code ^= 1;
      if (format == KvFormat::kNvfp4DsMla && i >= KvNvfp4DsMla::kScalesAt) code &= 0x7F;
      row[i] = std::byte(code);
    }
  });
}

/// Head in whose query `break_values` puts what is no number.
inline constexpr int kBrokenHead = 5;

/// Of at least 4 rows: NaN in a head's query of row 0 and, where the format has it, infinity in row 1; NaN in a key, a
/// latent's code or a scale, that row 2 alone selects.
inline void break_values(CoreCase& c) {
  c.set_query(0, kBrokenHead, 77, float_of(0x7FFFFFFFu));
  if (c.query().element == 2) c.set_query(1, kBrokenHead, 3, HUGE_VALF);
  int32_t own = 0;
  while (c.selects(0, own) || c.selects(1, own) || c.selects(3, own)) ++own;
  c.selected(2)[17] = own;
  c.encode_random(own);
  c.row(own)[c.kv.format == KvFormat::kNvfp4DsMla ? KvNvfp4DsMla::kRowBytes - 1 : 3] = std::byte(0xFF);
}

/// `break_values` harms what reads them and nothing else; `clean` is of the case before.
inline void expect_broken_values_stayed(CoreCase& c, const CoreResult& got, const CoreResult& clean) {
  for (int b = 0; b < c.rows(); ++b) {
    for (int head = 0; head < c.heads(); ++head) {
      const bool harmed =
          (b == 0 && head == kBrokenHead) || (b == 1 && head == kBrokenHead && c.query().element == 2) || b == 2;
      const size_t at = size_t(b * c.heads() + head);
      SCOPED_TRACE(place_in(got, at * kLatent));
      int finite = 0, changed = 0;
      for (size_t i = at * kLatent; i < (at + 1) * kLatent; ++i) {
        finite += std::isfinite(to_float(got.latent[i]));
        changed += got.latent[i].bits != clean.latent[i].bits;
      }
      if (harmed) {
        EXPECT_TRUE(std::isnan(got.lse[at]));
        EXPECT_EQ(finite, 0);
      } else {
        EXPECT_EQ(bits_of(got.lse[at]), bits_of(clean.lse[at]));
        EXPECT_EQ(changed, 0);
      }
    }
  }
}

/// Keys and queries are small integers, so that logits of 1e4 are exact and spec 9's bound of the lse can be kept.
inline void make_logits_large(CoreCase& c) {
  c.model.config.softmax_scale = 0.6;
  c.model.q_scale = c.model.k_scale = 1;
  const auto small_integer = [&] { return float(int(c.random()() % 9) - 4); };
  c.for_selected([&](std::byte* row) {
    float latent[kLatent];
    BFloat16 pe[kPe];
    for (float& x : latent) x = 4 * small_integer();
    for (BFloat16& x : pe) x = to_bf16(4 * small_integer());
    encode_kv(c.kv.format, latent, pe, 1.0f, row);
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
}

/// Gives every selected row of an `fp8_ds_mla` cache other tile scales, and no pe.
inline void set_scales(CoreCase& c, const std::function<float()>& scale) {
  c.for_selected([&](std::byte* row) {
    for (int tile = 0; tile < KvFp8DsMla::kTiles; ++tile) {
      const float s = scale();
      std::memcpy(row + KvFp8DsMla::kScalesAt + tile * int(sizeof(float)), &s, sizeof(s));
    }
    std::memset(row + KvFp8DsMla::kPeAt, 0, kPe * sizeof(BFloat16));  // has no scale: would outweigh small ones
  });
}

/// The largest scale with the smallest codes: finite in FP32, and must be here.
inline void set_largest_scale(CoreCase& c) {
  set_scales(c, [] { return 0x1.fffffep127f; });
  c.for_selected([&](std::byte* row) {
    for (int i = 0; i < kLatent; ++i) row[i] = std::byte(i % 2 == 0 ? 0x01 : 0x81);
  });
}

}  // namespace dsacore
