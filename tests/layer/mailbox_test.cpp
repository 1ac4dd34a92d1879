// The layout of a DCP window: parts neither overlap nor leave a word unused but to line up, and no sender's word looks
// empty.
#include "format/mailbox.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "format/numeric.h"
#include "format/score_key.h"

namespace dsacore {
namespace {

std::vector<MailboxSizes> all_sizes() {
  std::vector<MailboxSizes> all;
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int cap : {1, 5, 64}) {
      for (const int heads : {1, 3, 12}) {
        for (const int topk : {1, 33, 2048}) {
          for (const KvFormat format : {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
            for (const int width : {128, 512}) {
              const int64_t words = int64_t(ranks) * cap * (int64_t(heads) * 600 + 2 * topk);
              if (words < 1000000) all.push_back({ranks, cap, heads, topk, format, width});
            }
          }
        }
      }
    }
  }
  return all;
}

std::string text_of(const MailboxSizes& s) {
  return "ranks " + std::to_string(s.ranks) + " cap " + std::to_string(s.cap) + " heads " + std::to_string(s.heads) +
         " topk " + std::to_string(s.topk) + " " + std::string(name_of(s.kv_format)) + " width " +
         std::to_string(s.value_width);
}

/// Which part of the window each word belongs to.
class Owners {
 public:
  explicit Owners(const MailboxLayout& layout) : owner_(size_t(layout.bytes() / 4)) {}

  void claim(const std::string& part, int64_t at, int64_t words) {
    ASSERT_GE(at, 0) << part;
    ASSERT_LE(at + words, int64_t(owner_.size())) << part;
    parts_.push_back(part);
    for (int64_t i = at; i < at + words; ++i) {
      const int before = owner_[size_t(i)];
      ASSERT_EQ(before, 0) << part << " overlaps " << parts_[size_t(before) - 1] << " at word " << i;
      owner_[size_t(i)] = int(parts_.size());
    }
  }
  int64_t claimed() const { return int64_t(owner_.size()) - std::count(owner_.begin(), owner_.end(), 0); }

 private:
  std::vector<int> owner_;
  std::vector<std::string> parts_;
};

TEST(MailboxLayout, PartsDoNotOverlap) {
  for (const MailboxSizes& sizes : all_sizes()) {
    SCOPED_TRACE(text_of(sizes));
    const MailboxLayout layout(sizes);
    Owners owners(layout);
    owners.claim("abort record", MailboxLayout::abort_record(), 1);
    for (int r = 0; r < sizes.ranks; ++r) {
      owners.claim("heartbeat", MailboxLayout::heartbeat(r), 1);
      owners.claim("hello", MailboxLayout::hello(r), MailboxLayout::kHelloWords);
    }
    for (int buffer = 0; buffer < 2; ++buffer) {
      for (int r = 0; r < sizes.ranks; ++r) {
        owners.claim("step", layout.step(buffer, r), MailboxLayout::kStepWords);
        for (int row = 0; row < sizes.cap; ++row) {
          owners.claim("query", layout.query(buffer, row, r), layout.query_words());
          owners.claim("candidates", layout.candidates(buffer, r, row), MailboxLayout::kCandidateWords * sizes.topk);
          owners.claim("value", layout.value(buffer, r, row, sizes.value_width), layout.value_words(sizes.value_width));
          owners.claim("lse", layout.lse(buffer, r, row), layout.lse_words());
        }
      }
    }
    if (HasFatalFailure()) return;
    // The sizes of spec 7: [2, cap, D*H, 576], [2, D, cap, topk] of 8 bytes, [2, D, cap, H, width] BF16, [2, D, cap, H]
    // FP32.
    const int64_t element = sizes.kv_format == KvFormat::kFp8DsMla ? 2 : 1;
    const int64_t per_row = int64_t(sizes.heads) * (576 * element + 2 * sizes.value_width + 4) + 8 * sizes.topk;
    const int64_t header = 4 + sizes.ranks * (4 + 32) + 2 * sizes.ranks * 16;
    EXPECT_EQ(owners.claimed() * 4, header + 2 * int64_t(sizes.ranks) * sizes.cap * per_row);
  }
}

TEST(MailboxLayout, NarrowPartialsStayInTheirSourcesPart) {
  const MailboxLayout layout({3, 7, 5, 11, KvFormat::kFp8, 512});
  for (int buffer = 0; buffer < 2; ++buffer) {
    for (int source = 0; source < 3; ++source) {
      const int64_t begin = layout.value(buffer, source, 0, 512);
      const int64_t end = layout.value(buffer, source, 6, 512) + layout.value_words(512);
      for (int row = 0; row < 7; ++row) {
        EXPECT_GE(layout.value(buffer, source, row, 128), begin);
        EXPECT_LE(layout.value(buffer, source, row, 128) + layout.value_words(128), end);
      }
      EXPECT_EQ(layout.value(buffer, source, 1, 128) - layout.value(buffer, source, 0, 128), layout.value_words(128));
    }
  }
}

TEST(MailboxLayout, RegionsAreTheWholeWindowInOrderAndAligned) {
  for (const MailboxSizes& sizes : all_sizes()) {
    SCOPED_TRACE(text_of(sizes));
    const MailboxLayout layout(sizes);
    int64_t at = 0;
    for (const MailboxRegion& region : layout.regions()) {
      EXPECT_EQ(region.first, at) << region.name;
      EXPECT_EQ(region.first * 4 % 64, 0) << region.name;
      at += region.words;
    }
    EXPECT_EQ(at * 4, layout.bytes());
    EXPECT_EQ(layout.bytes() % 64, 0);
    for (int source = 0; source < sizes.ranks; ++source) {
      EXPECT_EQ(layout.query(1, 0, source) * 4 % 64, 0);
      EXPECT_EQ(layout.candidates(1, source, 0) * 4 % 64, 0);
      EXPECT_EQ(layout.value(1, source, 0, sizes.value_width) * 4 % 64, 0);
      EXPECT_EQ(layout.lse(1, source, 0) * 4 % 64, 0);
    }
  }
}

TEST(MailboxLayout, RegionsHaveTheFormatOfTheirWords) {
  for (const KvFormat format : {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
    const MailboxLayout layout({2, 3, 4, 5, format, 512});
    const auto format_at = [&](int64_t word) {
      for (const MailboxRegion& region : layout.regions()) {
        if (word >= region.first && word < region.first + region.words) return region.format;
      }
      return WordFormat::kPlain;
    };
    EXPECT_EQ(format_at(layout.query(1, 2, 1)),
              format == KvFormat::kFp8DsMla ? WordFormat::kBf16Pair : WordFormat::kE4m3);
    EXPECT_EQ(format_at(layout.candidates(0, 0, 0)), WordFormat::kPlain);
    EXPECT_EQ(format_at(layout.value(0, 0, 0, 512)), WordFormat::kBf16Pair);
    EXPECT_EQ(format_at(layout.lse(1, 1, 2)), WordFormat::kLse);
    EXPECT_EQ(format_at(MailboxLayout::abort_record()), WordFormat::kPlain);
    EXPECT_EQ(format_at(layout.step(1, 1)), WordFormat::kPlain);
  }
}

TEST(Sendable, NoE4m3ConversionGivesTheArmedByte) {
  for (uint64_t bits = 0; bits < (uint64_t(1) << 32); bits += 4099) {
    ASSERT_NE(to_e4m3(float_of(uint32_t(bits))), 0xFF) << std::hex << bits;
  }
  // Negative NaN codes that came from elsewhere still travel, as NaN.
  const uint32_t sent = sendable(WordFormat::kE4m3, 0xFFFFFFFFu);
  EXPECT_EQ(sent, 0x7F7F7F7Fu);
  EXPECT_EQ(sendable(WordFormat::kE4m3, 0xFFFFFF00u), 0xFFFFFF00u);
  EXPECT_EQ(sendable(WordFormat::kE4m3, 0x7F7F7F7Fu), 0x7F7F7F7Fu);
}

TEST(Sendable, OnlyThePairPlusZeroMinusZeroChanges) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000u, 0x8000u, 0x0001u, 0x7FC0u, 0xFFFFu}) {
      const uint32_t pair = high << 16 | low;
      const uint32_t sent = sendable(WordFormat::kBf16Pair, pair);
      ASSERT_NE(sent, armed_word(WordFormat::kBf16Pair)) << std::hex << pair;
      ASSERT_EQ(sent, pair == 0x80000000u ? 0u : pair) << std::hex << pair;
    }
  }
}

TEST(Sendable, LseKeepsNumbersAndInfinitiesAndMakesNanCanonical) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float lse : {0.0f, -0.0f, 1.5f, -88.25f, inf, -inf, 1e-40f}) {
    EXPECT_EQ(sendable(WordFormat::kLse, bits_of(lse)), bits_of(lse)) << lse;
  }
  for (const uint32_t nan : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFC00000u, 0xFFFFFFFFu}) {
    EXPECT_EQ(sendable(WordFormat::kLse, nan), 0x7FC00000u) << std::hex << nan;
  }
}

TEST(Sendable, NoCandidateLooksEmpty) {
  for (const float score : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max(), 0.0f, -0.0f,
                            -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_NE(score_key(score), armed_word(WordFormat::kPlain)) << score;
    EXPECT_EQ(sendable(WordFormat::kPlain, score_key(score)), score_key(score)) << score;
  }
  EXPECT_NE(uint32_t(std::numeric_limits<int32_t>::max()), armed_word(WordFormat::kPlain));
}

}  // namespace
}  // namespace dsacore
