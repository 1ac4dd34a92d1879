// The cuda backend's indexer (steps 9 and 10 of spec.md) on a device, against scores in FP64 and against its own keys.
#include "backends/cuda/scores.h"
#include "cpu/select_case.h"
#include "cuda/indexer_device.h"

namespace dsacore::test {
namespace {

// The FP8 tensor cores add with 14 bits (spec 9).
constexpr double kDeviceBound = 1e-3;
/// Of the tensor cores, relative to the magnitudes of all products: 14 bits, cut off.
constexpr double kProductBound = 3e-4;
constexpr IndexFormat kFormats[] = {IndexFormat::kFp8, IndexFormat::kMxfp4};
constexpr std::string_view kNames[] = {"fused", "stock"};

std::string text_of(const IndexerOptions& o) {
  std::ostringstream text;
  text << (o.format == IndexFormat::kFp8 ? "fp8" : "mxfp4") << ", heads " << o.heads << ", q " << o.q << ", topk "
       << o.topk << ", kind " << int(o.kind);
  return text.str();
}

/// sum over heads and dimensions of the magnitudes of all products of a token's score: what the tensor cores' error is
/// relative to.
double products_of(const IndexerCase& c, int row, size_t token) {
  double key[kIndexDim], sum = 0;
  const double scale = decode_key(c, c.keys[size_t(row / c.options.q)].data() + int64_t(token) * c.row_bytes(), key);
  for (int h = 0; h < c.options.heads; ++h) {
    double dot = 0;
    for (int i = 0; i < kIndexDim; ++i) {
      dot += std::abs(key[i] * double(e4m3_to_float(c.queries[size_t((row * c.options.heads + h) * kIndexDim + i)])));
    }
    sum += dot * std::abs(double(c.weights[size_t(row * c.options.heads + h)]));
  }
  return sum * std::abs(scale);
}

/// Whether every key is near its score, by a wide bound: this finds keys that are of something else.
testing::AssertionResult keys_are_near(const IndexerCase& c, const DeviceSelected& got,
                                       const std::vector<std::vector<Score>>& scores) {
  int64_t far = 0, all = 0;
  std::ostringstream text;
  for (int row = 0; row < c.rows(); ++row) {
    for (size_t t = 0; t < scores[size_t(row)].size(); ++t, ++all) {
      const Score& want = scores[size_t(row)][t];
      const double score = score_of_key(got.keys[size_t(row)][t]);
      if (std::isnan(want.value) ? std::isnan(score) : std::abs(score - want.value) <= 0.02 * want.size) continue;
      if (std::abs(score - want.value) <= kProductBound * products_of(c, row, t)) continue;
      if (far++ < 6) text << "; [" << row << "][" << t << "] = " << score << ", must be near " << want.value;
    }
  }
  if (far == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << far << " of " << all << " keys are far from their scores" << text.str();
}

/// Runs and judges a case with both kernels.
void check(const IndexerOptions& options, const Layout& layout = {}) {
  const IndexerCase c(options);
  const Placed placed = place(c, layout);
  const auto scores = all_scores(c);
  DeviceIndexer device(c, placed);
  for (const std::string_view name : kNames) {
    SCOPED_TRACE(std::string(name) + ", " + text_of(options));
    const DeviceSelected got = device.run(name);
    EXPECT_TRUE(selects_exactly(c, options.topk, got));
    EXPECT_TRUE(keys_are_near(c, got, scores));
    EXPECT_TRUE(judge(c, placed, got.selected, scores, kDeviceBound));
  }
}

TEST(ScoreBins, AreMonotoneAndKnowTheirFirstKeys) {
  for (int bin = 0; bin < cuda::kScoreBins; ++bin) {
    const uint32_t first = cuda::first_key_of_bin(bin), end = cuda::first_key_of_bin(bin + 1);
    ASSERT_LT(first, end) << bin;
    ASSERT_EQ(cuda::bin_of_key(first), bin);
    ASSERT_EQ(cuda::bin_of_key(end - 1), bin);
  }
  EXPECT_EQ(cuda::bin_of_key(score_key(0.0f)), cuda::bin_of_key(score_key(-0.0f)));
  EXPECT_EQ(cuda::first_key_of_bin(cuda::bin_of_key(score_key(0.0f)) + 1) - score_key(0.0f), 1u);
}

class EveryFormat : public testing::TestWithParam<IndexFormat> {};
INSTANTIATE_TEST_SUITE_P(Indexer, EveryFormat, testing::ValuesIn(kFormats),
                         [](const auto& format) { return format.param == IndexFormat::kFp8 ? "fp8" : "mxfp4"; });

TEST_P(EveryFormat, ScoresAreWithinTheBound) {
  for (const KeyKind kind : {KeyKind::kNormal, KeyKind::kBytes, KeyKind::kNear, KeyKind::kSomeNan}) {
    for (const int heads : {8, 9, 16, 24, 31, 32, 40, 48, 64}) {
      const IndexerCase c(
          {.format = GetParam(), .heads = heads, .q = 3, .topk = 1, .lengths = {700, 65}, .kind = kind});
      DeviceIndexer device(c, place(c, {}));
      const DeviceSelected got = device.run("fused");
      double worst = 0;
      for (int row = 0; row < c.rows(); ++row) {
        const auto scores = scores_of(c, row);
        for (size_t t = 0; t < scores.size(); ++t) {
          const double score = score_of_key(got.keys[size_t(row)][t]), want = scores[t].value;
          if (std::isnan(want)) {
            ASSERT_TRUE(std::isnan(score)) << text_of(c.options) << ", row " << row << ", token " << t << ": " << score;
            continue;
          }
          const double products = products_of(c, row, t),
                       error = products == 0 ? score : std::abs(score - want) / products;
          worst = std::max(worst, error);
          ASSERT_LE(error, kProductBound) << text_of(c.options) << ", row " << row << ", token " << t << ": " << score
                                          << ", must be " << want << " +- 3e-4 * " << products;
        }
      }
      if (heads == 32) printf("  %s: worst score error %.2e of the products\n", text_of(c.options).c_str(), worst);
    }
  }
}

TEST_P(EveryFormat, SelectsForAllHeadsAndQueryLengths) {
  for (const int heads : {8, 9, 24, 32, 48, 64}) {
    for (const int q : {1, 2, 3, 4, 8}) {
      check({.format = GetParam(),
             .heads = heads,
             .q = q,
             .topk = 16,
             .lengths = {1, 15, 16, 17, 63, 64, 65, 300, 1024, 1100}});
    }
  }
}

TEST_P(EveryFormat, SelectsForAllTopk) {
  for (const int topk : {1, 2, 16, 500, 2047, 2048}) {
    check({.format = GetParam(),
           .heads = 9,
           .topk = topk,
           .lengths = {0, 1, 63, 64, 65, topk - 1, topk, topk + 1, 2 * topk, 4096, 5000}});
  }
}

TEST_P(EveryFormat, SelectsForEveryKindOfKeys) {
  for (const KeyKind kind :
       {KeyKind::kNormal, KeyKind::kBytes, KeyKind::kTies, KeyKind::kNear, KeyKind::kEqual, KeyKind::kZero,
        KeyKind::kSomeNan, KeyKind::kAllNan, KeyKind::kNegative, KeyKind::kRising}) {
    check({.format = GetParam(), .q = 2, .topk = 500, .lengths = {499, 501, 3000, 9001}, .kind = kind});
  }
}

TEST_P(EveryFormat, AddressesEveryLayout) {
  for (const Layout& layout :
       {Layout{.page = 64, .stride_rows = 64, .index_table = true}, Layout{.page = 64, .stride_rows = 200},
        Layout{.page = 192, .stride_rows = 192}, Layout{.page = 192, .stride_rows = 193, .index_table = true},
        Layout{.page = 2048, .stride_rows = 2048}, Layout{.page = 2048, .stride_rows = 5000, .index_table = true}}) {
    SCOPED_TRACE("page " + std::to_string(layout.page) + ", stride_rows " + std::to_string(layout.stride_rows));
    check({.format = GetParam(), .q = 2, .topk = 128, .lengths = {100, 2047, 2050, 5000}}, layout);
  }
}

TEST_P(EveryFormat, SelectsForManyRows) {
  IndexerOptions options{.format = GetParam(), .heads = 16, .topk = 100, .lengths = {}};
  for (int r = 0; r < 256; ++r) options.lengths.push_back(r % 7 == 0 ? r : 90 + r * 5);
  check(options);
}

// For tools that take a tenth of a second a launch: scores of every width, of one row and of two together, and of keys
// with any scales.
TEST_P(EveryFormat, SmallForTools) {
  for (const int heads : {8, 16, 24, 32, 48, 64}) {
    for (const int q : {1, 2}) check({.format = GetParam(), .heads = heads, .q = q, .topk = 16, .lengths = {70, 1}});
  }
  check({.format = GetParam(), .heads = 16, .topk = 16, .lengths = {70}, .kind = KeyKind::kBytes});
}

// Requests that are scored one after the other, each row's selection as soon as it is: the same tokens as at once, run
// after run.
void check_pieces(const IndexerOptions& options, std::initializer_list<int64_t> pieces) {
  SCOPED_TRACE(text_of(options));
  const IndexerCase c(options);
  DeviceIndexer device(c, place(c, {}));
  const DeviceSelected whole = device.run("fused");
  EXPECT_TRUE(selects_exactly(c, options.topk, whole));
  for (const int64_t bytes : pieces) {
    SCOPED_TRACE("pieces of " + std::to_string(bytes));
    for (int repeat = 0; repeat < 3; ++repeat) {
      const DeviceSelected got = device.run_in_pieces(bytes);
      EXPECT_TRUE(selects_exactly(c, options.topk, got));
      EXPECT_EQ(got.selected.tokens, whole.selected.tokens);
      EXPECT_EQ(got.selected.rows, whole.selected.rows);
      EXPECT_EQ(got.selected.valid, whole.selected.valid);
    }
  }
}

TEST(Indexer, SelectsInPieces) {
  for (const int heads : {8, 9, 24, 32}) {
    IndexerOptions many{.heads = heads, .topk = 100, .lengths = {}};
    for (int r = 0; r < 64; ++r) many.lengths.push_back(r % 9 == 0 ? 3 * r : 90 + r * 150);
    check_pieces(many, {2048, 40'000, 300'000});
  }
  check_pieces({.topk = 500, .lengths = {20'000, 0, 501, 507, 1, 9001, 500, 30'000}}, {1 << 10, 1 << 14, 1 << 16});
  check_pieces({.topk = 2048, .lengths = {200'001, 2048, 2049, 70'000}}, {1 << 16, 1 << 18});
  for (const KeyKind kind : {KeyKind::kEqual, KeyKind::kSomeNan, KeyKind::kTies}) {
    check_pieces({.topk = 500, .lengths = {499, 40'000, 3000, 9001}, .kind = kind}, {1 << 14});
  }
}

TEST(Indexer, SmallInPiecesForTools) {
  for (const int heads : {8, 16, 24, 32}) check_pieces({.heads = heads, .topk = 16, .lengths = {300, 1, 17}}, {256});
}

TEST_P(EveryFormat, NanQueryHarmsItsRowAlone) {
  const IndexerOptions options{.format = GetParam(), .q = 4, .topk = 100, .lengths = {777, 500}};
  IndexerCase c(options);
  const Placed placed = place(c, {});
  const DeviceSelected clean = DeviceIndexer(c, placed).run("fused");
  IndexerCase harmed = c;
  harmed.queries[size_t((2 * options.heads + 5) * kIndexDim + 3)] = 0xFF;
  harmed.weights[size_t(5 * options.heads)] = NAN;
  const DeviceSelected got = DeviceIndexer(harmed, placed).run("fused");
  for (int row = 0; row < c.rows(); ++row) {
    for (int i = 0; i < options.topk; ++i) {
      const size_t at = size_t(row * options.topk + i);
      ASSERT_EQ(got.selected.tokens[at], row == 2 || row == 5 ? i : clean.selected.tokens[at])
          << "[" << row << "][" << i << "]";
    }
  }
}

// ---- decoding ----

TEST(Indexer, DecodesEveryE4m3Code) {
  for (int at = 0; at < kIndexDim; ++at) {
    const IndexerCase c = value_case(IndexFormat::kFp8, at, 1, keys_of_e4m3_codes(at));
    const auto got = DeviceIndexer(c, place(c, {})).run("fused").keys[0];
    for (int code = 0; code < 256; ++code) {
      ASSERT_EQ(got[size_t(code)], score_key(0.25f * e4m3_to_float(uint8_t(code))))
          << "code " << code << " at " << at << ": score " << score_of_key(got[size_t(code)]);
    }
  }
}

TEST(Indexer, DecodesEveryE2m1CodeWithEveryScale) {
  for (int at = 0; at < kIndexDim; ++at) {
    const IndexerCase c = value_case(IndexFormat::kMxfp4, at, 1, keys_of_e2m1_codes(at));
    ASSERT_TRUE(decodes_e2m1_codes(DeviceIndexer(c, place(c, {})).run("fused").keys[0], at));
  }
}

// ---- bits ----

void check_keys_depend_on_bytes(IndexFormat format, KeyKind kind) {
  const IndexerOptions options{
      .format = format, .q = 3, .topk = 300, .lengths = {9000, 17, 1500, 4099, 301}, .kind = kind};
  const IndexerCase c(options);
  const DeviceSelected first = DeviceIndexer(c, place(c, {})).run("fused");
  for (const uint64_t seed : {2, 3}) {
    DeviceIndexer device(c, place(c, {.page = 256, .stride_rows = 256, .seed = seed}));
    for (int repeat = 0; repeat < 3; ++repeat) {
      const DeviceSelected again = device.run(repeat == 1 ? "stock" : "fused");
      EXPECT_EQ(again.selected.tokens, first.selected.tokens);
      for (const int row : {0, 1, 2, 6, 7, 8, 9, 10, 11}) {
        EXPECT_TRUE(again.keys[size_t(row)] == first.keys[size_t(row)])
            << "row " << row << " " << first_difference(again.keys[size_t(row)], first.keys[size_t(row)], 64);
      }
    }
  }
  // Each request alone: other CTAs have its pages. Without its first keys: they lie beside others.
  for (const int r : {0, 2, 3}) {
    for (const int dropped : {0, 5}) {
      IndexerCase alone = c;
      alone.options.lengths = {options.lengths[size_t(r)] - dropped};
      alone.keys = {{c.keys[size_t(r)].begin() + dropped * c.row_bytes(), c.keys[size_t(r)].end()}};
      const std::ptrdiff_t query = std::ptrdiff_t(options.q) * options.heads * kIndexDim;
      alone.queries.assign(c.queries.begin() + r * query, c.queries.begin() + (r + 1) * query);
      alone.weights.assign(c.weights.begin() + r * options.q * options.heads,
                           c.weights.begin() + (r + 1) * options.q * options.heads);
      const DeviceSelected got = DeviceIndexer(alone, place(alone, {})).run("fused");
      for (int j = 0; j < options.q; ++j) {
        const std::vector<uint32_t>& all = first.keys[size_t(r * options.q + j)];
        EXPECT_TRUE(
            std::equal(all.begin() + dropped, all.end(), got.keys[size_t(j)].begin(), got.keys[size_t(j)].end()))
            << "request " << r << ", row " << j << ", without " << dropped;
      }
    }
  }
}

TEST_P(EveryFormat, KeysDependOnBytesAlone) {
  for (const KeyKind kind : {KeyKind::kTies, KeyKind::kBytes}) check_keys_depend_on_bytes(GetParam(), kind);
}

TEST_P(EveryFormat, EqualBytesHaveEqualKeysAtEveryPosition) {
  const IndexerCase c({.format = GetParam(), .topk = 2048, .lengths = {9049}, .kind = KeyKind::kEqual});
  const auto keys = DeviceIndexer(c, place(c, {})).run("fused").keys[0];
  for (size_t t = 0; t < keys.size(); ++t) ASSERT_EQ(keys[t], keys[0]) << "token " << t;
}

// ---- selection ----

class EveryKind : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Select, EveryKind, testing::Range(0, int(std::size(kKinds))));

void check_select(const std::string& name, const std::vector<float>& scores) {
  const IndexerCase c = case_of(scores, 2048);
  DeviceIndexer device(c, place(c, {}));
  for (const int topk : {1, 2, 16, 500, 2048}) {
    device.set_topk(topk);
    const std::vector<int32_t> want = best_of(scores, topk);
    for (const std::string_view kernel : kNames) {
      const DeviceSelected got = device.run(kernel);
      ASSERT_TRUE(selects_exactly(c, topk, got))
          << name << ", n " << scores.size() << ", topk " << topk << ", " << kernel;
      ASSERT_TRUE(got.selected.tokens == want) << name << ", n " << scores.size() << ", topk " << topk << ", " << kernel
                                               << ": " << first_difference(got.selected.tokens, want, topk);
      ASSERT_EQ(got.selected.valid[0], std::min<int64_t>(topk, int64_t(scores.size())));
    }
  }
}

TEST_P(EveryKind, ShortContexts) {
  for (const int64_t n : {1, 2, 31, 64, 501, 2047, 2048, 2049, 2065, 8000})
    check_select(kKinds[GetParam()].name, scores_of(kKinds[GetParam()], n));
}

TEST_P(EveryKind, LargeContexts) {
  for (const int64_t n : {32769, 200001}) check_select(kKinds[GetParam()].name, scores_of(kKinds[GetParam()], n));
}

// For tools: a CTA a row, and a cluster.
TEST(Select, SmallForTools) {
  for (const int64_t n : {2065, 13000}) check_select(kKinds[0].name, scores_of(kKinds[0], n));
}

class SomeKinds : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Select, SomeKinds, testing::Values("normal", "equal", "last bits", "zeros of both signs"));

TEST_P(SomeKinds, AMillionTokens) {
  for (const Kind& kind : kKinds) {
    if (std::string_view(kind.name) == GetParam()) check_select(kind.name, scores_of(kind, 1 << 20));
  }
}

// More, and the query of many heads, and the selection, start behind them (HACKING.md).
TEST(Scores, OfOneRowTakeFewRegisters) {
  const auto registers = [](const cuda::ScoresInstance& scores) {
    cudaFuncAttributes attributes = {};
    cuda::check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(scores.kernel)),
                "cudaFuncGetAttributes");
    return attributes.numRegs;
  };
  for (const int heads : {8, 16, 24, 32}) {
    SCOPED_TRACE(std::to_string(heads) + " heads");
    EXPECT_LE(registers(cuda::scores_fp8(heads, 1, false)), 72);
    EXPECT_LE(registers(cuda::scores_mxfp4(heads, 1, false)), 72);
    EXPECT_LE(registers(cuda::scores_fp8_in_pieces(heads)), 64);
  }
}

TEST(Select, RefusesRanks) {
  const IndexerCase c({});
  ShapeKey shape = shape_of(c, {});
  EXPECT_TRUE(cuda::indexer_kernels()[0].accepts(shape).ok);
  shape.ranks = 2;
  EXPECT_FALSE(cuda::indexer_kernels()[0].accepts(shape).ok);
  EXPECT_FALSE(cuda::indexer_kernels()[0].accepts(shape).reason.empty());
}

}  // namespace
}  // namespace dsacore::test
