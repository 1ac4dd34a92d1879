// The cpu backend's candidate merge (step 2 of spec 7): the ranks' candidates give what one rank alone selects, bit for
// bit.
#include <gtest/gtest.h>

#include "cpu/indexer_case.h"
#include "support/targets.h"

namespace dsacore::test {
namespace {

/// What a merge wrote.
struct Merged {
  std::vector<int32_t> tokens, valid, local_rows, local_valid;
};

Merged run_merge(const Backend& backend, const IndexerCase& c, const Placed& placed,
                 const std::vector<Candidate>& candidates, int threads = 2) {
  const int rows = c.rows(), topk = c.options.topk;
  const size_t count = size_t(rows) * size_t(topk);
  constexpr int32_t kPoisoned = -1431655766;
  Merged out{std::vector<int32_t>(count, kPoisoned), std::vector<int32_t>(size_t(rows), kPoisoned),
             std::vector<int32_t>(count, kPoisoned), std::vector<int32_t>(size_t(rows), kPoisoned)};
  const CandidateMergeArgs args{
      .model = &c.model,
      .q = c.options.q,
      .shard = placed.layout.shard,
      .seq_lens = View<const int32_t, 1>(c.options.lengths.data(), c.requests()),
      .block_table = View<const int32_t, 2>(placed.block_table.data(), c.requests(), placed.width),
      .page = placed.layout.page,
      .stride_rows = placed.layout.stride_rows,
      .candidates = View<const Candidate, 3>(candidates.data(), placed.layout.shard.ranks, rows, topk),
      .topk_tokens = View<int32_t, 2>(out.tokens.data(), rows, topk),
      .valid = View<int32_t, 1>(out.valid.data(), rows),
      .local_rows = View<int32_t, 2>(out.local_rows.data(), rows, topk),
      .local_valid = View<int32_t, 1>(out.local_valid.data(), rows)};
  run_kernel(backend, backend.candidate_merge, shape_of(c, placed.layout.shard), args, threads);
  return out;
}

/// Local rows of the selected tokens, from the definitions of spec 7.
testing::AssertionResult judge_local(const IndexerCase& c, const Placed& placed, const Merged& got) {
  const int topk = c.options.topk;
  const RankShard& shard = placed.layout.shard;
  for (int row = 0; row < c.rows(); ++row) {
    std::vector<int32_t> want;
    for (int i = 0; i < got.valid[size_t(row)]; ++i) {
      const int64_t t = got.tokens[size_t(row * topk + i)];
      if (t / shard.interleave % shard.ranks != shard.rank) continue;
      const int64_t local = t / (shard.ranks * shard.interleave) * shard.interleave + t % shard.interleave;
      const int64_t page = placed.block_table[size_t(row / c.options.q * placed.width + local / placed.layout.page)];
      want.push_back(int32_t(page * placed.layout.stride_rows + local % placed.layout.page));
    }
    if (got.local_valid[size_t(row)] != int32_t(want.size())) {
      return testing::AssertionFailure() << "local_valid[" << row << "] = " << got.local_valid[size_t(row)]
                                         << ", must be " << want.size();
    }
    want.resize(size_t(topk), -1);
    for (int i = 0; i < topk; ++i) {
      if (got.local_rows[size_t(row * topk + i)] != want[size_t(i)]) {
        return testing::AssertionFailure()
               << "local_rows[" << row << "][" << i << "] = " << got.local_rows[size_t(row * topk + i)] << ", must be "
               << want[size_t(i)];
      }
    }
  }
  return testing::AssertionSuccess();
}

/// All ranks' candidates, [D, rows, topk].
std::vector<Candidate> gather(const Backend& backend, const IndexerCase& c, const Layout& layout) {
  std::vector<Candidate> all;
  for (int rank = 0; rank < layout.shard.ranks; ++rank) {
    Layout mine = layout;
    mine.shard.rank = rank;
    const Selected part = run_indexer(backend, c, place(c, mine));
    all.insert(all.end(), part.candidates.begin(), part.candidates.end());
  }
  return all;
}

void check_ranks(const IndexerOptions& options, const Layout& layout) {
  const IndexerCase c(options);
  for (const std::string_view target : tested_instruction_sets()) {
    const Backend& backend = *cpu_backend(target);
    const Selected alone = run_indexer(backend, c, place(c, {}));
    const std::vector<Candidate> candidates = gather(backend, c, layout);
    for (int rank = 0; rank < layout.shard.ranks; ++rank) {
      Layout mine = layout;
      mine.shard.rank = rank;
      const Placed placed = place(c, mine);
      const Merged got = run_merge(backend, c, placed, candidates);
      ASSERT_EQ(got.tokens == alone.tokens, true)
          << target << ", D " << layout.shard.ranks << ", I " << layout.shard.interleave << ", rank " << rank
          << ": topk_tokens" << first_difference(got.tokens, alone.tokens, options.topk);
      ASSERT_EQ(got.valid == alone.valid, true) << target << ": valid" << first_difference(got.valid, alone.valid, 1);
      ASSERT_TRUE(judge_local(c, placed, got)) << target << ", D " << layout.shard.ranks << ", rank " << rank;
    }
  }
}

TEST(CandidateMerge, RanksSelectWhatOneRankSelects) {
  for (const IndexFormat format : {IndexFormat::kFp8, IndexFormat::kMxfp4}) {
    for (const int ranks : {2, 4, 8}) {
      for (const int interleave : {1, 3}) {
        for (const KeyKind kind :
             {KeyKind::kNormal, KeyKind::kTies, KeyKind::kEqual, KeyKind::kSomeNan, KeyKind::kZero}) {
          check_ranks({.format = format,
                       .heads = 8,
                       .q = 2,
                       .topk = 130,
                       .lengths = {0, 1, 64, 130, 131, 132, 150, 3000},
                       .kind = kind},
                      {.shard = {.ranks = ranks, .rank = 0, .interleave = interleave}, .seed = 7});
        }
      }
    }
  }
}

TEST(CandidateMerge, RanksSelectWithFullTopk) {
  for (const int interleave : {1, 3, 64}) {
    check_ranks({.heads = 9, .lengths = {2048, 2049, 5000, 20000}, .kind = KeyKind::kNear},
                {.page = 192, .stride_rows = 200, .shard = {.ranks = 4, .rank = 0, .interleave = interleave}});
  }
}

TEST(CandidateMerge, RanksWithoutTokens) {
  // One or two tokens a request: most ranks hold none, and one more than topk = 1 must be refused its place.
  check_ranks({.heads = 8, .topk = 1, .lengths = {1, 2, 3, 9}}, {.shard = {.ranks = 8, .rank = 0, .interleave = 1}});
}

/// Candidates with chosen keys: of rank d the tokens it owns among 0..n-1, of which the best topk.
struct Lists {
  std::vector<Candidate> candidates;
  std::vector<int32_t> best;
};
Lists lists_of(const std::vector<uint32_t>& keys, int topk, const RankShard& shard) {
  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.key != b.key ? a.key > b.key : a.token < b.token;
  };
  const auto by_token = [](const Candidate& a, const Candidate& b) { return a.token < b.token; };
  const auto best_of = [&](std::vector<Candidate> list) {
    std::sort(list.begin(), list.end(), better);
    list.resize(std::min(list.size(), size_t(topk)));
    std::sort(list.begin(), list.end(), by_token);
    return list;
  };
  Lists lists;
  std::vector<Candidate> all;
  for (int d = 0; d < shard.ranks; ++d) {
    std::vector<Candidate> mine;
    for (int32_t t = 0; t < int32_t(keys.size()); ++t) {
      if (t / shard.interleave % shard.ranks == d) mine.push_back({keys[size_t(t)], t});
    }
    all.insert(all.end(), mine.begin(), mine.end());
    mine = best_of(mine);
    mine.resize(size_t(topk), {0, INT32_MAX});
    lists.candidates.insert(lists.candidates.end(), mine.begin(), mine.end());
  }
  for (const Candidate& candidate : best_of(all)) lists.best.push_back(candidate.token);
  return lists;
}

TEST(CandidateMerge, AnyKeys) {
  using KeyOf = uint32_t (*)(std::mt19937_64&);
  const KeyOf kinds[] = {
      [](std::mt19937_64& r) { return uint32_t(r()) & 0xFFF00000u; },
      [](std::mt19937_64& r) { return uint32_t(r() % 0xFF800001u); },
      [](std::mt19937_64&) { return 0u; },
      [](std::mt19937_64&) { return 0xC0000000u; },
      [](std::mt19937_64& r) { return uint32_t(0x80000000u + r() % 3); },
      [](std::mt19937_64& r) { return r() % 20 == 0 ? 0xFF800000u : 0u; },
      [](std::mt19937_64& r) {
        return r() % 300 == 0 ? uint32_t(r() % 0xFF800001u) : 0xBF800000u + uint32_t(r() % 50);
      },
  };
  for (const int ranks : {2, 3, 8}) {
    for (const int topk : {1, 7, 300, 2048}) {
      for (const int n : {topk + 1, 2 * topk + 3, 9 * topk + 77}) {
        for (const KeyOf key_of : kinds) {
          const RankShard shard{.ranks = ranks, .rank = ranks - 1, .interleave = 2};
          std::mt19937_64 random{uint64_t(n)};
          std::vector<uint32_t> keys(static_cast<size_t>(n));
          for (uint32_t& key : keys) key = key_of(random);
          const Lists lists = lists_of(keys, topk, shard);
          const IndexerCase c({.heads = 8, .topk = topk, .lengths = {n}, .kind = KeyKind::kZero});
          const Placed placed = place(c, {.shard = shard});
          for (const std::string_view target : tested_instruction_sets()) {
            const Merged got = run_merge(*cpu_backend(target), c, placed, lists.candidates);
            ASSERT_EQ(got.tokens == lists.best, true) << target << ", D " << ranks << ", topk " << topk << ", n " << n
                                                      << first_difference(got.tokens, lists.best, topk);
            ASSERT_EQ(got.valid[0], topk);
            ASSERT_TRUE(judge_local(c, placed, got)) << target;
          }
        }
      }
    }
  }
}

TEST(CandidateMerge, AnyThreadCountGivesTheSameBits) {
  const IndexerCase c({.heads = 8, .q = 3, .topk = 100, .lengths = {1000, 90, 5, 400, 101}, .kind = KeyKind::kTies});
  const Layout layout{.shard = {.ranks = 4, .rank = 2, .interleave = 1}};
  const Backend& backend = *cpu_backend({});
  const std::vector<Candidate> candidates = gather(backend, c, layout);
  const Placed placed = place(c, layout);
  const Merged one = run_merge(backend, c, placed, candidates, 1);
  for (const int threads : {2, 3, 7}) {
    const Merged got = run_merge(backend, c, placed, candidates, threads);
    EXPECT_TRUE(got.tokens == one.tokens && got.valid == one.valid && got.local_rows == one.local_rows &&
                got.local_valid == one.local_valid)
        << "threads " << threads;
  }
}

}  // namespace
}  // namespace dsacore::test
