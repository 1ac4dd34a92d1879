// The cpu backend's indexer (steps 9 and 10 of spec.md) on every target that this machine runs, against scores in FP64.
#include <gtest/gtest.h>

#include "cpu/indexer_case.h"
#include "support/targets.h"

namespace dsacore::test {
namespace {

constexpr IndexFormat kFormats[] = {IndexFormat::kFp8, IndexFormat::kMxfp4};

std::string text_of(const IndexerOptions& o) {
  std::ostringstream text;
  text << (o.format == IndexFormat::kFp8 ? "fp8" : "mxfp4") << ", heads " << o.heads << ", q " << o.q << ", topk "
       << o.topk << ", kind " << int(o.kind);
  return text.str();
}

/// Runs and judges a case on every target.
void check(const IndexerOptions& options, const Layout& layout = {}) {
  const IndexerCase c(options);
  const Placed placed = place(c, layout);
  const auto scores = all_scores(c);
  for (const std::string_view target : tested_targets()) {
    SCOPED_TRACE(std::string(target) + ", " + text_of(options));
    const Backend& backend = *cpu_backend(target);
    ASSERT_EQ(backend.target, target);
    EXPECT_TRUE(judge(c, placed, run_indexer(backend, c, placed), scores));
  }
}

class EveryFormat : public testing::TestWithParam<IndexFormat> {};
INSTANTIATE_TEST_SUITE_P(Indexer, EveryFormat, testing::ValuesIn(kFormats),
                         [](const auto& format) { return format.param == IndexFormat::kFp8 ? "fp8" : "mxfp4"; });

TEST_P(EveryFormat, SelectsForAllHeadsAndQueryLengths) {
  for (const int heads : {8, 9, 32, 64}) {
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

TEST_P(EveryFormat, SelectsFromLongRaggedContexts) {
  check({.format = GetParam(), .q = 2, .lengths = {20000, 3, 40001, 0, 2049}});
  check({.format = GetParam(), .heads = 8, .topk = 512, .lengths = {70000}});
}

TEST_P(EveryFormat, SeesFewerKeysInEarlierRows) {
  for (const int length : {1, 5, 8, 16, 17, 23, 24, 64, 65, 71, 129}) {
    check({.format = GetParam(), .heads = 8, .q = 8, .topk = 16, .lengths = {length, length + 1}});
  }
}

TEST_P(EveryFormat, SelectsFromAllKindsOfKeys) {
  for (const KeyKind kind : {KeyKind::kBytes, KeyKind::kTies, KeyKind::kNear, KeyKind::kEqual, KeyKind::kZero,
                             KeyKind::kSomeNan, KeyKind::kAllNan, KeyKind::kNegative, KeyKind::kRising}) {
    for (const int topk : {1, 100, 2048}) {
      check({.format = GetParam(), .topk = topk, .lengths = {2 * topk + 77, 20 * topk + 5}, .kind = kind});
    }
  }
}

TEST_P(EveryFormat, NanKeysComeLastByTokenId) {
  // 600 keys, about 200 of them NaN, of which 500 are selected.
  const IndexerOptions options{.format = GetParam(), .topk = 500, .lengths = {600}, .kind = KeyKind::kSomeNan};
  const IndexerCase c(options);
  const auto scores = scores_of(c, 0);
  const Placed placed = place(c, {});
  for (const std::string_view target : tested_targets()) {
    const Selected got = run_indexer(*cpu_backend(target), c, placed);
    std::vector<int32_t> numbers, nans;
    for (int32_t t = 0; t < 600; ++t) (std::isnan(scores[size_t(t)].value) ? nans : numbers).push_back(t);
    ASSERT_LT(numbers.size(), 500u);
    numbers.insert(numbers.end(), nans.begin(), nans.begin() + (500 - std::ptrdiff_t(numbers.size())));
    std::sort(numbers.begin(), numbers.end());
    EXPECT_EQ(got.tokens, numbers) << target << first_difference(got.tokens, numbers, 500);
  }
}

TEST_P(EveryFormat, NanQueryHarmsItsRowAlone) {
  const IndexerOptions options{.format = GetParam(), .q = 4, .topk = 100, .lengths = {777, 500}};
  IndexerCase c(options);
  const Placed placed = place(c, {});
  for (const std::string_view target : tested_targets()) {
    const Backend& backend = *cpu_backend(target);
    const Selected clean = run_indexer(backend, c, placed);
    IndexerCase harmed = c;
    harmed.queries[size_t((2 * options.heads + 5) * kIndexDim + 3)] = 0xFF;
    harmed.weights[size_t(5 * options.heads)] = NAN;
    const Selected got = run_indexer(backend, harmed, placed);
    for (int row = 0; row < c.rows(); ++row) {
      for (int i = 0; i < options.topk; ++i) {
        const size_t at = size_t(row * options.topk + i);
        ASSERT_EQ(got.tokens[at], row == 2 || row == 5 ? i : clean.tokens[at])
            << target << " [" << row << "][" << i << "]";
      }
    }
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

// ---- decoding ----

/// Keys of the first tokens, as rank 0 of 8 holds them all in a context of 8 times as many.
std::vector<uint32_t> keys_of_all(const Backend& backend, IndexerCase c) {
  const int tokens = c.options.lengths[0];
  std::vector<std::byte> spread(c.keys[0].size() * 8);
  for (int t = 0; t < tokens; ++t) {
    std::memcpy(spread.data() + int64_t(8 * t) * c.row_bytes(), c.keys[0].data() + t * c.row_bytes(),
                size_t(c.row_bytes()));
  }
  c.keys = {spread};
  c.options.lengths = {8 * tokens};
  const Selected got = run_indexer(backend, c, place(c, {.shard = {.ranks = 8, .rank = 0, .interleave = 1}}));
  std::vector<uint32_t> keys;
  for (int t = 0; t < tokens; ++t) keys.push_back(got.candidates[size_t(t)].key);
  return keys;
}

TEST(Indexer, DecodesEveryE4m3Code) {
  for (int place = 0; place < kIndexDim; ++place) {
    const std::vector<std::byte> keys = keys_of_e4m3_codes(place);
    // Two tokens are decoded at a time: an odd one out must not depend on its neighbour, so those are put apart.
    std::vector<std::byte> apart(2 * keys.size(), std::byte(0x40));
    for (int code = 0; code < 256; ++code) {
      std::memcpy(apart.data() + 2 * code * IndexFp8::kRowBytes, keys.data() + code * IndexFp8::kRowBytes,
                  IndexFp8::kRowBytes);
    }
    const IndexerCase c = value_case(IndexFormat::kFp8, place, 2048, apart);
    for (const std::string_view target : tested_targets()) {
      const std::vector<uint32_t> got = keys_of_all(*cpu_backend(target), c);
      for (int code = 0; code < 256; ++code) {
        ASSERT_EQ(got[size_t(2 * code)], score_key(0.25f * e4m3_to_float(uint8_t(code))))
            << target << ", code " << code << " at " << place << ": score " << score_of_key(got[size_t(2 * code)]);
      }
    }
  }
}

TEST(Indexer, DecodesEveryE2m1CodeWithEveryScale) {
  for (int place = 0; place < kIndexDim; ++place) {
    const IndexerCase c = value_case(IndexFormat::kMxfp4, place, 2048, keys_of_e2m1_codes(place));
    for (const std::string_view target : tested_targets()) {
      ASSERT_TRUE(decodes_e2m1_codes(keys_of_all(*cpu_backend(target), c), place)) << target;
    }
  }
}

// ---- bits ----

/// A rank that holds every token of any length, yet writes candidates: so tests see keys.
constexpr RankShard kAllTokens{.ranks = 2, .rank = 0, .interleave = 1 << 22};

TEST_P(EveryFormat, ScoresAreWithinTheBound) {
  for (const KeyKind kind : {KeyKind::kNormal, KeyKind::kBytes, KeyKind::kNear, KeyKind::kSomeNan}) {
    for (const int heads : {8, 9, 31, 32, 48, 64}) {
      // Rank 0 holds every eighth token, fewer than topk: it writes all of its keys.
      const RankShard shard{.ranks = 8, .rank = 0, .interleave = 1};
      const IndexerCase c({.format = GetParam(), .heads = heads, .q = 2, .topk = 300, .lengths = {2000}, .kind = kind});
      const Placed placed = place(c, {.shard = shard});
      for (const std::string_view target : tested_targets()) {
        const Selected got = run_indexer(*cpu_backend(target), c, placed);
        for (int row = 0; row < c.rows(); ++row) {
          const auto scores = scores_of(c, row);
          const int64_t held = local_count(shard, c.seen(row));
          for (int64_t i = 0; i < 300; ++i) {
            const Candidate& candidate = got.candidates[size_t(row * 300 + i)];
            if (i >= held) {
              ASSERT_TRUE(candidate.key == 0 && candidate.token == INT32_MAX)
                  << target << " [" << row << "][" << i << "]";
              continue;
            }
            ASSERT_EQ(candidate.token, 8 * i) << target << " [" << row << "][" << i << "]";
            const Score& want = scores[size_t(candidate.token)];
            const double score = score_of_key(candidate.key);
            ASSERT_TRUE(std::isnan(want.value) ? std::isnan(score)
                                               : std::abs(score - want.value) <= kScoreBound * want.size)
                << target << ", heads " << heads << ", kind " << int(kind) << ", token " << candidate.token << ": "
                << score << ", must be " << want.value << " +- 1e-5 * " << want.size;
          }
        }
      }
    }
  }
}

TEST_P(EveryFormat, PagesMayLieAnywhere) {
  for (const KeyKind kind : {KeyKind::kNormal, KeyKind::kBytes, KeyKind::kTies}) {
    const IndexerCase c({.format = GetParam(), .q = 2, .topk = 700, .lengths = {5000, 801}, .kind = kind});
    for (const std::string_view target : tested_targets()) {
      const Backend& backend = *cpu_backend(target);
      const Selected first = run_indexer(backend, c, place(c, {.shard = kAllTokens, .seed = 1}));
      for (uint64_t seed = 2; seed < 5; ++seed) {
        EXPECT_TRUE(first == run_indexer(backend, c, place(c, {.shard = kAllTokens, .seed = seed}))) << target;
        EXPECT_TRUE(
            first ==
            run_indexer(backend, c, place(c, {.page = 256, .stride_rows = 256, .shard = kAllTokens, .seed = seed})))
            << target;
      }
    }
  }
}

TEST_P(EveryFormat, EqualBytesHaveEqualKeysAtEveryPosition) {
  const IndexerCase c({.format = GetParam(), .topk = 2048, .lengths = {2049}, .kind = KeyKind::kEqual});
  const Placed placed = place(c, {.shard = kAllTokens});
  for (const std::string_view target : tested_targets()) {
    const Selected got = run_indexer(*cpu_backend(target), c, placed);
    for (int i = 0; i < 2048; ++i) {
      ASSERT_EQ(got.candidates[size_t(i)].key, got.candidates[0].key) << target << ", token " << i;
      ASSERT_EQ(got.candidates[size_t(i)].token, i) << target;
    }
  }
}

TEST_P(EveryFormat, AnyThreadCountGivesTheSameBits) {
  const IndexerCase c(
      {.format = GetParam(), .q = 2, .topk = 300, .lengths = {9000, 17, 1500, 4099, 301}, .kind = KeyKind::kTies});
  for (const RankShard& shard : {RankShard{}, kAllTokens}) {
    const Placed placed = place(c, {.shard = shard});
    for (const std::string_view target : tested_targets()) {
      const Backend& backend = *cpu_backend(target);
      const Selected one = run_indexer(backend, c, placed, 1);
      for (const int threads : {1, 2, 3, 7}) {
        EXPECT_TRUE(one == run_indexer(backend, c, placed, threads)) << target << ", threads " << threads;
      }
    }
  }
}

TEST_P(EveryFormat, NeighboursOfARowDoNotMatter) {
  const IndexerOptions options{.format = GetParam(), .topk = 300, .lengths = {3000, 2000, 900}};
  const IndexerCase c(options);
  for (const std::string_view target : tested_targets()) {
    const Backend& backend = *cpu_backend(target);
    const Selected together = run_indexer(backend, c, place(c, {.shard = kAllTokens}));
    for (int r = 0; r < c.requests(); ++r) {
      IndexerCase alone = c;
      alone.options.lengths = {options.lengths[size_t(r)]};
      alone.keys = {c.keys[size_t(r)]};
      const std::ptrdiff_t query = std::ptrdiff_t(options.heads) * kIndexDim;
      alone.queries.assign(c.queries.begin() + r * query, c.queries.begin() + (r + 1) * query);
      alone.weights.assign(c.weights.begin() + r * options.heads, c.weights.begin() + (r + 1) * options.heads);
      const Selected got = run_indexer(backend, alone, place(alone, {.shard = kAllTokens}));
      EXPECT_EQ(std::memcmp(got.candidates.data(), together.candidates.data() + r * 300, 300 * sizeof(Candidate)), 0)
          << target << ", request " << r;
    }
  }
}

TEST_P(EveryFormat, WavesOfRequestsGiveTheSameBits) {
  // 1.5 million keys of q = 6 rows and 9 requests: more than one wave of kWaveKeys.
  IndexerOptions options{.format = GetParam(), .heads = 8, .q = 6, .topk = 64, .lengths = {}};
  for (int r = 0; r < 9; ++r) options.lengths.push_back(170000 + 1000 * r);
  options.kind = KeyKind::kZero;  // quickly made
  IndexerCase c(options);
  for (auto& keys : c.keys) {
    for (size_t i = 0; i < keys.size(); i += 97) keys[i] = std::byte(0x30 + i % 7);
  }
  const Placed placed = place(c, {});
  const Backend& backend = *cpu_backend({});
  const Selected all = run_indexer(backend, c, placed);
  for (const int r : {0, 7, 8}) {
    IndexerCase alone = c;
    alone.options.lengths = {c.options.lengths[size_t(r)]};
    alone.keys = {c.keys[size_t(r)]};
    const std::ptrdiff_t query = std::ptrdiff_t(options.q) * options.heads * kIndexDim;
    alone.queries.assign(c.queries.begin() + r * query, c.queries.begin() + (r + 1) * query);
    alone.weights.assign(c.weights.begin() + r * options.q * options.heads,
                         c.weights.begin() + (r + 1) * options.q * options.heads);
    const Selected got = run_indexer(backend, alone, place(alone, {}));
    const std::vector<int32_t> want(all.tokens.begin() + r * 6 * 64, all.tokens.begin() + (r + 1) * 6 * 64);
    EXPECT_EQ(got.tokens, want) << "request " << r << " " << first_difference(got.tokens, want, 64);
  }
}

// ---- ranks ----

TEST_P(EveryFormat, RanksHoldTheSameKeys) {
  const IndexerCase c(
      {.format = GetParam(), .q = 2, .topk = 150, .lengths = {1999, 151, 150, 3, 640}, .kind = KeyKind::kTies});
  for (const std::string_view target : tested_targets()) {
    const Backend& backend = *cpu_backend(target);
    // Keys of all tokens, a hundred and fifty at a time: every token of a rank that holds at most topk of them.
    for (const int interleave : {1, 3}) {
      for (const int ranks : {2, 4, 8}) {
        const Selected whole = run_indexer(backend, c, place(c, {.shard = kAllTokens}));
        for (int rank = 0; rank < ranks; ++rank) {
          const RankShard shard{ranks, rank, interleave};
          const Selected part = run_indexer(backend, c, place(c, {.shard = shard, .seed = uint64_t(rank)}));
          for (int row = 0; row < c.rows(); ++row) {
            if (c.seen(row) <= c.options.topk) continue;
            // Every selected token that this rank owns must be among its candidates with the same key.
            const Candidate* mine = part.candidates.data() + row * c.options.topk;
            for (int i = 0; i < c.options.topk; ++i) {
              const Candidate& want = whole.candidates[size_t(row * c.options.topk + i)];
              if (!owns(shard, TokenId(want.token))) continue;
              const auto found =
                  std::find_if(mine, mine + c.options.topk, [&](const Candidate& x) { return x.token == want.token; });
              ASSERT_NE(found, mine + c.options.topk)
                  << target << ", rank " << rank << ", row " << row << ", token " << want.token;
              ASSERT_EQ(found->key, want.key)
                  << target << ", rank " << rank << ", row " << row << ", token " << want.token;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dsacore::test
