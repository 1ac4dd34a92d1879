// Generated cases: the same bytes for the same seed, caches that hold what a step needs and 0xFF elsewhere, adversarial
// kinds.
#include "io/generate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "io/generate_support.h"

namespace dsacore::test {
namespace {

TEST(Generate, TheSameOptionsGiveTheSameBytes) {
  CaseOptions options = small_case();
  options.adversarial = {"all"};
  const uint64_t first = hash_of(make_case(options));
  EXPECT_EQ(first, hash_of(make_case(options)));
  options.seed += 1;
  EXPECT_NE(first, hash_of(make_case(options)));
}

TEST(Generate, TheBytesAreTheSameOnEveryMachine) {
  struct Golden {
    KvFormat kv;
    IndexFormat index;
    const char* adversarial;
    uint64_t hash;
  };
  const Golden golden[] = {
      {KvFormat::kFp8DsMla, IndexFormat::kFp8, "", 2564525697977015903u},
      {KvFormat::kFp8, IndexFormat::kMxfp4, "", 2825481917028663094u},
      {KvFormat::kNvfp4DsMla, IndexFormat::kFp8, "all", 13625901084484942328u},
  };
  for (const Golden& g : golden) {
    CaseOptions options = small_case();
    options.kv_format = g.kv;
    options.index_format = g.index;
    options.context = "1-300";
    options.pad_requests = 1;
    options.pitch_pad = 8;
    if (*g.adversarial != '\0') options.adversarial = {g.adversarial};
    EXPECT_EQ(hash_of(make_case(options)), g.hash) << name_of(g.kv) << " " << name_of(g.index) << " " << g.adversarial;
  }
}

TEST(Generate, ViewsOutliveAMove) {
  Case c = make_case(small_case());
  const uint64_t before = hash_of(c);
  const Case moved = std::move(c);
  EXPECT_EQ(hash_of(moved), before);
}

// ---- caches, tables, slots ----

struct Shape {
  const char* name;
  CaseOptions options;
};

std::vector<Shape> shapes() {
  std::vector<Shape> shapes(7, {"", small_case()});
  shapes[0].name = "Plain";
  shapes[1].name = "StrideRows";
  shapes[1].options.page = 128;
  shapes[1].options.stride_rows = 320;
  shapes[1].options.kv_format = KvFormat::kFp8;
  shapes[2].name = "IndexTable";
  shapes[2].options.index_table = true;
  shapes[2].options.page = 256;
  shapes[2].options.index_format = IndexFormat::kMxfp4;
  shapes[3].name = "Speculative";
  shapes[3].options.batch = 12;
  shapes[3].options.q = 3;
  shapes[3].options.context = "2,140,65,3";
  shapes[3].options.kv_format = KvFormat::kNvfp4DsMla;
  shapes[4].name = "Padded";
  shapes[4].options.batch = 6;
  shapes[4].options.q = 2;
  shapes[4].options.pad_requests = 1;
  shapes[4].options.pitch_pad = 5;
  shapes[5].name = "SlotsMixed";
  shapes[5].options.slots = SlotsKind::kMixed;
  shapes[5].options.batch = 32;
  shapes[5].options.q = 8;
  shapes[6].name = "SlotsNegativeNoSpares";
  shapes[6].options.slots = SlotsKind::kNegative;
  shapes[6].options.spare_pages = 0;
  shapes[6].options.adversarial = {"magnitude", "subnormal", "negzero"};
  return shapes;
}

class GenerateShape : public ::testing::TestWithParam<Shape> {
 protected:
  const CaseOptions& options() const { return GetParam().options; }
  Case c_ = make_case(GetParam().options);
};

TEST_P(GenerateShape, MlaCacheHoldsTheOldKeysAndNothingElse) {
  std::set<int32_t> owned;
  for (int r = 0; r < live_requests(options()); ++r) {
    for (int64_t t = 0; t < c_.step.seq_lens(r); ++t) {
      const std::string_view row = kv_row(c_, r, t);
      EXPECT_TRUE(owned.insert(physical_row(kv_place(c_, r, t), c_.kv.stride_rows).value()).second) << "shared row";
      ASSERT_EQ(all_ff(row), is_inserted(c_, r, t)) << "request " << r << " token " << t;
      for (int i = 0; !is_inserted(c_, r, t) && i < kQueryRow; ++i) {
        ASSERT_TRUE(std::isfinite(kv_value(c_, row, i))) << "request " << r << " token " << t << " element " << i;
      }
    }
  }
  const int64_t rows = (c_.kv.pages - 1) * c_.kv.stride_rows + c_.kv.page;
  for (int64_t row = 0; row < rows; ++row) {
    if (owned.contains(int32_t(row))) continue;
    ASSERT_TRUE(all_ff(kv_row(c_, row))) << "row " << row << " belongs to nobody";
  }
}

TEST_P(GenerateShape, IndexCacheHoldsTheOldKeysAndNothingElse) {
  std::set<int64_t> owned;
  for (int r = 0; r < live_requests(options()); ++r) {
    for (int64_t t = 0; t < c_.step.seq_lens(r); ++t) {
      const Place place = index_place(c_, r, t);
      EXPECT_TRUE(owned.insert(int64_t(place.page.value()) * kIndexPage + place.offset).second) << "shared row";
      ASSERT_EQ(all_ff(index_row(c_, place)), is_inserted(c_, r, t)) << "request " << r << " token " << t;
    }
  }
  for (int64_t row = 0; row < c_.index.pages * kIndexPage; ++row) {
    if (owned.contains(row)) continue;
    ASSERT_TRUE(all_ff(index_row(c_, place_of(Slot(row), kIndexPage)))) << "row " << row << " belongs to nobody";
  }
}

TEST_P(GenerateShape, TablesNameOwnPagesThenSpareOnes) {
  const auto check = [&](const View<const int32_t, 2>& table, int page, int64_t pages) {
    std::set<int32_t> owned;
    for (int r = 0; r < live_requests(options()); ++r) {
      const int64_t mine = pages_of(c_.step.seq_lens(r), page);
      ASSERT_GT(table.extent(1), mine) << "every request has an entry past its length";
      for (int64_t i = 0; i < mine; ++i) EXPECT_TRUE(owned.insert(table(r, i)).second) << r << ", " << i;
    }
    EXPECT_EQ(int64_t(owned.size()) + options().spare_pages, pages);
    for (int r = 0; r < table.extent(0); ++r) {
      const bool live = r < live_requests(options());
      for (int64_t i = 0; i < table.extent(1); ++i) {
        ASSERT_GE(table(r, i), 0);
        ASSERT_LT(table(r, i), pages);
        EXPECT_TRUE(live || table(r, i) == 0) << r << ", " << i << " of a padded request";
        if (!live || i < pages_of(c_.step.seq_lens(r), page) || options().spare_pages == 0) continue;
        EXPECT_FALSE(owned.contains(table(r, i))) << r << ", " << i << " is past the length and must be a spare page";
      }
    }
  };
  check(c_.step.block_table, c_.kv.page, c_.kv.pages);
  if (options().index_table) {
    check(c_.step.index_block_table, kIndexPage, c_.index.pages);
  } else {
    EXPECT_TRUE(c_.step.index_block_table.empty());
    EXPECT_EQ(c_.index.pages, c_.kv.pages * (c_.kv.page / kIndexPage));
  }
}

TEST_P(GenerateShape, SlotsArePlacesOfTheNewTokens) {
  int given = 0;
  int64_t expected = 0;
  for (int b = 0; b < c_.step.batch; ++b) {
    const int r = b / c_.step.q;
    const int64_t token = c_.step.seq_lens(r) - c_.step.q + b % c_.step.q;
    expected += token >= 0;
    EXPECT_EQ(c_.step.slots(b) < 0, c_.step.index_slots(b) < 0) << "row " << b;
    if (c_.step.slots(b) < 0) continue;
    ++given;
    ASSERT_GE(token, 0) << "row " << b;
    const Place kv = kv_place(c_, r, token);
    EXPECT_EQ(c_.step.slots(b), int64_t(kv.page.value()) * c_.kv.page + kv.offset) << "row " << b;
    const Place index = index_place(c_, r, token);
    EXPECT_EQ(c_.step.index_slots(b), int64_t(index.page.value()) * kIndexPage + index.offset) << "row " << b;
  }
  switch (options().slots) {
    case SlotsKind::kOwned: EXPECT_EQ(given, expected); break;
    case SlotsKind::kNegative: EXPECT_EQ(given, 0); break;
    case SlotsKind::kMixed: EXPECT_TRUE(0 < given && given < expected) << given << " of " << expected; break;
  }
}

TEST_P(GenerateShape, PaddedRowsHoldGarbageAndPitchColumnsNan) {
  const int64_t width = c_.sizes.width();
  ASSERT_EQ(c_.step.projected.extent(1), width);
  ASSERT_EQ(c_.step.projected.stride(0), width + options().pitch_pad);
  for (int b = 0; b < c_.step.batch; ++b) {
    const BFloat16* row = c_.step.projected.row(b);
    const bool live = b / c_.step.q < live_requests(options());
    const bool has_nan = std::any_of(row, row + width, [](BFloat16 x) { return is_nan(to_float(x)); });
    EXPECT_EQ(has_nan, !live) << "row " << b;
    EXPECT_EQ(c_.step.seq_lens(b / c_.step.q) == 0, !live) << "row " << b;
    for (int64_t i = width; i < c_.step.projected.stride(0); ++i)
      EXPECT_TRUE(is_nan(to_float(row[i]))) << b << ", " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Each, GenerateShape, ::testing::ValuesIn(shapes()),
                         [](const auto& tested) { return std::string(tested.param.name); });

// ---- adversarial kinds ----

/// A case of 16 requests with one kind.
struct Spoilt {
  explicit Spoilt(std::vector<std::string> kinds) {
    CaseOptions options = small_case();
    options.batch = 16;
    options.context = "150";
    options.adversarial = std::move(kinds);
    c = make_case(options);
  }
  /// Elements [begin, end) of a projected row.
  std::vector<float> part(int b, int64_t begin, int64_t end) const {
    std::vector<float> values;
    for (int64_t i = begin; i < end; ++i) values.push_back(to_float(c.step.projected(b, i)));
    return values;
  }
  std::vector<float> row(int b) const { return part(b, 0, c.sizes.width()); }
  std::vector<float> q_a(int b) const { return part(b, 0, c.sizes.q_lora); }

  /// Rows of which `f` holds.
  template <class F>
  int rows_where(F f) const {
    int count = 0;
    for (int b = 0; b < c.step.batch; ++b) count += f(b);
    return count;
  }
  /// Old tokens of which `f(row, index row)` holds.
  template <class F>
  int tokens_where(F f) const {
    int count = 0;
    for (int r = 0; r < c.step.batch; ++r) {
      for (int64_t t = 0; t + 1 < c.step.seq_lens(r); ++t)
        count += f(kv_row(c, r, t), index_row(c, index_place(c, r, t)));
    }
    return count;
  }
  std::set<std::string> distinct_index_rows() const {
    std::set<std::string> rows;
    tokens_where([&](std::string_view, const std::string& row) { return rows.insert(row).second; });
    return rows;
  }
  std::set<std::string> distinct_kv_rows() const {
    std::set<std::string> rows;
    tokens_where([&](std::string_view row, const std::string&) { return rows.emplace(row).second; });
    return rows;
  }
  Case c;
};

constexpr int kOldTokens = 16 * 149;

bool all_zero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return x == 0; });
}

bool latent_is_zero(const Case& c, std::string_view row) {
  for (int i = 0; i < kLatent; ++i) {
    if (kv_value(c, row, i) != 0) return false;
  }
  return true;
}

TEST(Adversarial, PlainCasesHaveNoneOfThem) {
  const Spoilt s({});
  EXPECT_EQ(s.distinct_index_rows().size(), size_t(kOldTokens));
  EXPECT_EQ(s.distinct_kv_rows().size(), size_t(kOldTokens));
  for (int b = 0; b < s.c.step.batch; ++b) {
    for (const float x : s.row(b)) {
      ASSERT_TRUE(std::isfinite(x)) << "row " << b;
      ASSERT_LT(std::fabs(x), 200.0f) << "row " << b;
    }
    EXPECT_FALSE(all_zero(s.q_a(b)));
  }
}

TEST(Adversarial, Ties) {
  const Spoilt s({"ties"});
  EXPECT_EQ(s.distinct_index_rows().size(), 6u) << "five keys and zero";
  EXPECT_EQ(s.distinct_kv_rows().size(), size_t(kOldTokens));
}

TEST(Adversarial, Equal) {
  const Spoilt s({"equal"});
  EXPECT_EQ(s.distinct_kv_rows().size(), 5u);
  EXPECT_EQ(s.distinct_index_rows().size(), size_t(kOldTokens));
}

TEST(Adversarial, Magnitude) {
  const Spoilt s({"magnitude"});
  const auto largest = [&](int b) {
    float most = 0;
    for (const float x : s.q_a(b)) most = std::max(most, std::fabs(x));
    return most;
  };
  EXPECT_GE(s.rows_where([&](int b) { return largest(b) > 1e4f; }), 4);
  EXPECT_GE(s.rows_where([&](int b) { return largest(b) < 1e-4f; }), 4);
  EXPECT_GE(s.rows_where([&](int b) { return largest(b) > 1 && largest(b) < 1e3f; }), 4);
  // Scales of index keys: the last four bytes of a row.
  std::set<std::string> scales;
  s.tokens_where([&](std::string_view, const std::string& row) { return scales.insert(row.substr(128)).second; });
  EXPECT_GE(scales.size(), 8u);
}

TEST(Adversarial, Subnormal) {
  const Spoilt s({"subnormal"});
  const auto is_subnormal = [&](int b) {  // but for its outlier channels
    const std::vector<float> q_a = s.q_a(b);
    const auto few = std::count_if(q_a.begin(), q_a.end(), [](float x) { return x != 0 && std::fabs(x) < 0x1p-126f; });
    return few > 100;
  };
  EXPECT_EQ(s.rows_where(is_subnormal), 8);
  const int tokens = s.tokens_where([&](std::string_view row, const std::string&) {
    const float pe = std::fabs(kv_value(s.c, row, kLatent));
    return pe > 0 && pe < 0x1p-126f;
  });
  EXPECT_GE(tokens, kOldTokens / 50);
}

TEST(Adversarial, Zero) {
  const Spoilt s({"zero"});
  EXPECT_GE(s.rows_where([&](int b) { return all_zero(s.row(b)); }), 4);
  EXPECT_GE(s.rows_where([&](int b) { return all_zero(s.q_a(b)) && !all_zero(s.row(b)); }), 4);
  EXPECT_GE(s.tokens_where([&](std::string_view row, const std::string&) { return latent_is_zero(s.c, row); }),
            kOldTokens / 50);
}

TEST(Adversarial, Negzero) {
  const Spoilt s({"negzero"});
  const auto has_negzero = [&](int b) {
    const std::vector<float> row = s.row(b);
    return std::any_of(row.begin(), row.end(), [](float x) { return x == 0 && std::signbit(x); });
  };
  EXPECT_GE(s.rows_where(has_negzero), 4);
  const int tokens = s.tokens_where([&](std::string_view row, const std::string&) {
    for (int i = 0; i < kQueryRow; ++i) {
      const float x = kv_value(s.c, row, i);
      if (x == 0 && std::signbit(x)) return true;
    }
    return false;
  });
  EXPECT_EQ(tokens, kOldTokens);
}

TEST(Adversarial, NanAndInf) {
  const Spoilt s({"nan", "inf"});
  const auto count = [&](int b, bool nan) {
    const std::vector<float> row = s.row(b);
    return std::count_if(row.begin(), row.end(), [&](float x) { return nan ? std::isnan(x) : std::isinf(x); });
  };
  for (int b = 0; b < s.c.step.batch; ++b) {
    EXPECT_EQ(count(b, true), b == 15 ? 1 : 0) << "row " << b;
    EXPECT_EQ(count(b, false), b == 14 ? 1 : 0) << "row " << b;
  }
}

TEST(Adversarial, NanAndInfLandInTheLastRowOfTheirRequest) {
  CaseOptions options = small_case();
  options.batch = 9;
  options.q = 3;
  options.adversarial = {"all"};
  const Case c = make_case(options);
  for (int b = 0; b < 9; ++b) {
    bool nan = false, inf = false;
    for (int64_t i = 0; i < c.sizes.width(); ++i) {
      nan = nan || std::isnan(to_float(c.step.projected(b, i)));
      inf = inf || std::isinf(to_float(c.step.projected(b, i)));
    }
    EXPECT_EQ(nan, b == 8) << "row " << b;
    EXPECT_EQ(inf, b == 5) << "row " << b;
  }
}

}  // namespace
}  // namespace dsacore::test
