// Spec 7, step 2: what D ranks select together is what one rank would select, on random scores with ties and NaN.
#include <algorithm>
#include <climits>
#include <memory>
#include <random>
#include <vector>

#include "format/score_key.h"
#include "reference/index_scene.h"

namespace dsacore::test {
namespace {

constexpr int kQ = 2;

/// Key code of a token: few distinct values, so that ties are everywhere; some NaN.
uint8_t code_of(uint32_t seed, int64_t request, int32_t token) {
  std::mt19937 bits(seed * 7919u + uint32_t(request) * 104729u + uint32_t(token));
  const uint32_t draw = bits() % 40;
  return draw == 0 ? 0x7F : to_e4m3(float(draw % 12) - 3);
}

void set_keys(IndexScene& scene, uint32_t seed) {
  for (int64_t r = 0; r < scene.requests; ++r) {
    for (int32_t local = 0; local < local_count(scene.shard, scene.seq_lens[size_t(r)]); ++local) {
      scene.set_key(r, local, code_of(seed, r, global_of(scene.shard, LocalId(local)).value()));
    }
  }
}

void expect_padded_candidates(const IndexScene& scene, int64_t row, int64_t n) {
  const int64_t topk = scene.candidates.view().extent(1);
  const int64_t count = n <= topk ? -1 : std::min<int64_t>(topk, local_count(scene.shard, n));
  if (count < 0) return;  // left to the merge
  for (int64_t i = 0; i < topk; ++i) {
    const Candidate& c = scene.candidates(row, i);
    if (i >= count) {
      ASSERT_EQ(c.key, 0u) << i;
      ASSERT_EQ(c.token, INT32_MAX) << i;
      continue;
    }
    ASSERT_TRUE(owns(scene.shard, TokenId(c.token))) << i;
    ASSERT_LT(c.token, n);
    if (i > 0) {
      ASSERT_GT(c.token, scene.candidates(row, i - 1).token) << "ascending by token";
    }
  }
}

/// Checks one rank's merge against the selection `want` of a single rank.
void expect_merge(const IndexScene& one, IndexScene& scene, const Tensor<Candidate, 3>& all) {
  const int64_t topk = all.view().extent(2), rows = scene.rows;
  Tensor<int32_t, 2> tokens(rows, topk), local_rows(rows, topk);
  Tensor<int32_t, 1> valid(rows), local_valid(rows);
  constexpr int kPage = 128, kStride = 192;  // pages of another size than the index's
  const CandidateMergeArgs args{&scene.layer.model,
                                kQ,
                                scene.shard,
                                View<const int32_t, 1>(scene.seq_lens.data(), scene.requests),
                                scene.table.view(),
                                kPage,
                                kStride,
                                all.view(),
                                tokens.view(),
                                valid.view(),
                                local_rows.view(),
                                local_valid.view()};
  run_stage(reference_backend().candidate_merge, args,
            shape_of(scene.layer.model, rows, kQ, scene.shard.ranks, scene.most_tokens()));
  for (int64_t row = 0; row < rows; ++row) {
    ASSERT_EQ(valid(row), one.valid(row)) << "row " << row;
    std::vector<int32_t> owned;
    for (int64_t i = 0; i < topk; ++i) {
      const int32_t token = one.tokens(row, i);
      ASSERT_EQ(tokens(row, i), token) << "row " << row << " entry " << i;
      if (token < 0 || !owns(scene.shard, TokenId(token))) continue;
      const int32_t local = local_of(scene.shard, TokenId(token)).value();
      owned.push_back(scene.table(row / kQ, local / kPage) * kStride + local % kPage);
    }
    ASSERT_EQ(local_valid(row), int32_t(owned.size())) << "row " << row;
    for (int64_t i = 0; i < topk; ++i) {
      ASSERT_EQ(local_rows(row, i), i < int64_t(owned.size()) ? owned[size_t(i)] : -1)
          << "row " << row << " entry " << i;
    }
  }
}

TEST(ReferenceCandidateMerge, EqualsTheSelectionOfOneRank) {
  // Requests shorter than topk, of just above it (some ranks hold less than topk of them), and long ones.
  const std::vector<int32_t> lengths = {0, 1, 31, 32, 33, 34, 70, 500, 1200};
  constexpr int kTopk = 32;
  for (uint32_t seed = 0; seed < 3; ++seed) {
    IndexScene one(IndexFormat::kFp8, kTopk, lengths, kQ);
    set_keys(one, seed);
    one.run();
    for (const int ranks : {2, 4, 8}) {
      for (const int interleave : {1, 3}) {
        Tensor<Candidate, 3> all(ranks, one.rows, kTopk);
        std::vector<std::unique_ptr<IndexScene>> scenes;
        for (int rank = 0; rank < ranks; ++rank) {
          const RankShard shard{ranks, rank, interleave};
          scenes.push_back(std::make_unique<IndexScene>(IndexFormat::kFp8, kTopk, lengths, kQ, shard));
          IndexScene& scene = *scenes.back();
          set_keys(scene, seed);
          scene.run();
          for (int64_t row = 0; row < scene.rows; ++row) {
            const int64_t n = keys_seen(lengths[size_t(row / kQ)], kQ, int(row % kQ));
            ASSERT_NO_FATAL_FAILURE(expect_padded_candidates(scene, row, n));
            std::copy_n(scene.candidates.view().row(row), kTopk, all.view().row(rank, row));
          }
        }
        for (auto& scene : scenes) {
          SCOPED_TRACE(testing::Message() << "seed " << seed << " ranks " << ranks << " rank " << scene->shard.rank
                                          << " interleave " << interleave);
          ASSERT_NO_FATAL_FAILURE(expect_merge(one, *scene, all));
        }
      }
    }
  }
}

TEST(ReferenceCandidateMerge, TiesAcrossRanksGoToSmallerTokens) {
  IndexScene scene(IndexFormat::kFp8, 2, {6}, kQ, {2, 1, 1});
  Tensor<Candidate, 3> all(2, 2, 2);
  const uint32_t high = score_key(3), low = score_key(1);
  for (int row = 0; row < 2; ++row) {
    all(0, row, 0) = {low, 0};
    all(0, row, 1) = {high, 4};
    all(1, row, 0) = {low, 1};
    all(1, row, 1) = {low, 3};
  }
  Tensor<int32_t, 2> tokens(2, 2), local_rows(2, 2);
  Tensor<int32_t, 1> valid(2), local_valid(2);
  run_stage(reference_backend().candidate_merge,
            CandidateMergeArgs{&scene.layer.model, kQ, scene.shard, View<const int32_t, 1>(scene.seq_lens.data(), 1),
                               scene.table.view(), kIndexPage, kIndexPage, all.view(), tokens.view(), valid.view(),
                               local_rows.view(), local_valid.view()},
            shape_of(scene.layer.model, 2, kQ, 2, 3));
  EXPECT_EQ(tokens(1, 0), 0);
  EXPECT_EQ(tokens(1, 1), 4);
  EXPECT_EQ(valid(1), 2);
  EXPECT_EQ(local_valid(1), 0) << "both belong to rank 0";
  EXPECT_EQ(local_rows(1, 0), -1);
}

}  // namespace
}  // namespace dsacore::test
