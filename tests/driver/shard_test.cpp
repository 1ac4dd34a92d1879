// Sharding (spec 7): every token and head on exactly one rank, with the bytes of the whole.
#include "driver/shard.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "format/layouts.h"
#include "io/generate.h"

namespace dsacore {
namespace {

CaseOptions small(int q) {
  CaseOptions options;
  options.heads = 6;
  options.batch = 4 * q;
  options.q = q;
  options.context = "1,200,65,129";
  options.topk = 32;
  options.index_heads = 8;
  options.q_lora = 128;
  options.slots = SlotsKind::kMixed;
  return options;
}

struct ShardCase {
  const char* name;
  int ranks, interleave, q, page;
  int64_t stride_rows;
  bool index_table;
  KvFormat kv;
  IndexFormat index;
};

class Sharding : public ::testing::TestWithParam<ShardCase> {
 protected:
  void SetUp() override {
    const ShardCase& p = GetParam();
    CaseOptions options = small(p.q);
    options.page = p.page;
    options.stride_rows = p.stride_rows;
    options.index_table = p.index_table;
    options.kv_format = p.kv;
    options.index_format = p.index;
    whole_case_ = std::make_unique<Case>(make_case(options));
    whole_ = inputs_of(*whole_case_);
  }

  Shard rank(int d) const { return shard(whole_, {GetParam().ranks, d, GetParam().interleave}); }

  const std::byte* kv_row(const Inputs& in, int64_t request, int32_t token) const {
    return row_at(
        in.kv, physical_row(kv_place(in.step.block_table.row(request), in.kv.page, LocalId(token)), in.kv.stride_rows));
  }

  std::unique_ptr<Case> whole_case_;
  Inputs whole_;
};

TEST_P(Sharding, PutsEveryTokenOnOneRankWithItsBytes) {
  const ShardCase& p = GetParam();
  std::vector<std::vector<int>> owners(4);
  for (int64_t r = 0; r < 4; ++r) owners[size_t(r)].assign(size_t(whole_.step.seq_lens(r)), 0);
  for (int d = 0; d < p.ranks; ++d) {
    const Shard mine = rank(d);
    for (int64_t r = 0; r < 4; ++r) {
      int32_t local = 0;
      for (int32_t t = 0; t < whole_.step.seq_lens(r); ++t) {
        if (t / p.interleave % p.ranks != d) continue;
        ++owners[size_t(r)][size_t(t)];
        ASSERT_EQ(std::memcmp(kv_row(mine.inputs, r, local), kv_row(whole_, r, t), size_t(whole_.kv.row_bytes)), 0)
            << "rank " << d << " request " << r << " token " << t;
        const Place from = index_place_of(whole_, r, LocalId(t)), to = index_place_of(mine.inputs, r, LocalId(local));
        const std::byte* source = index_page_at(whole_.index, from.page);
        const std::byte* target = index_page_at(mine.inputs.index, to.page);
        const bool same = with_layout(p.index, [&](auto layout) {
          return std::memcmp(source + layout.value_at(from.offset), target + layout.value_at(to.offset),
                             layout.kValueBytes) == 0 &&
                 std::memcmp(source + layout.scale_at(from.offset), target + layout.scale_at(to.offset),
                             layout.kScaleBytes) == 0;
        });
        ASSERT_TRUE(same) << "index key, rank " << d << " request " << r << " token " << t;
        ++local;
      }
    }
  }
  for (const auto& request : owners) {
    for (int count : request) EXPECT_EQ(count, 1);
  }
}

TEST_P(Sharding, OwnsPagesOnceAndPageZeroNever) {
  for (int d = 0; d < GetParam().ranks; ++d) {
    const Shard mine = rank(d);
    const RankShard who{GetParam().ranks, d, GetParam().interleave};
    std::set<int32_t> used;
    for (int64_t r = 0; r < 4; ++r) {
      const int64_t pages = pages_of(local_count(who, whole_.step.seq_lens(r)), mine.inputs.kv.page);
      for (int64_t i = 0; i < pages; ++i)
        EXPECT_TRUE(used.insert(mine.inputs.step.block_table(r, i)).second) << "page twice";
    }
    EXPECT_EQ(used.count(0), 0u);
    EXPECT_EQ(int64_t(used.size()) + 1, mine.inputs.kv.pages);
    for (int64_t i = 0; i < mine.inputs.kv.page * mine.inputs.kv.row_bytes; ++i) {
      ASSERT_EQ(mine.inputs.kv.data[i], std::byte(0xFF)) << "page 0, byte " << i;
    }
  }
}

TEST_P(Sharding, CutsGatesAndSharesWeights) {
  const int ranks = GetParam().ranks, heads = whole_.sizes.heads / ranks;
  for (int d = 0; d < ranks; ++d) {
    const Inputs mine = rank(d).inputs;
    EXPECT_EQ(mine.sizes.heads, heads);
    EXPECT_EQ(mine.weights.wq_b.data, whole_.weights.wq_b.data);
    EXPECT_EQ(mine.weights.q_b_proj.shape[0], heads * 192);
    EXPECT_EQ(static_cast<const std::byte*>(mine.weights.q_b_proj.data) -
                  static_cast<const std::byte*>(whole_.weights.q_b_proj.data),
              int64_t(d) * heads * 192 * 128 * 2);
    EXPECT_EQ(static_cast<const std::byte*>(mine.weights.kv_b_proj.data) -
                  static_cast<const std::byte*>(whole_.weights.kv_b_proj.data),
              int64_t(d) * heads * 256 * 512 * 2);
  }
  for (int d = 0; d < ranks; ++d) {
    const Shard kept = rank(d);
    const Step& mine = kept.inputs.step;
    for (int64_t b = 0; b < whole_.step.batch; ++b) {
      const BFloat16 *from = whole_.step.projected.row(b), *to = mine.projected.row(b);
      const int64_t gate = 128 + 576, all = 6 * 128, own = int64_t(heads) * 128;
      for (int64_t i = 0; i < gate; ++i) ASSERT_EQ(to[i].bits, from[i].bits) << "column " << i;
      for (int64_t i = 0; i < own; ++i) ASSERT_EQ(to[gate + i].bits, from[gate + d * own + i].bits) << "gate " << i;
      for (int64_t i = 0; i < 128 + 8; ++i)
        ASSERT_EQ(to[gate + own + i].bits, from[gate + all + i].bits) << "after the gates, " << i;
    }
  }
}

TEST_P(Sharding, SlotsFollowTheirTokens) {
  const ShardCase& p = GetParam();
  std::vector<int> written(size_t(whole_.step.batch)), index_written(size_t(whole_.step.batch));
  for (int d = 0; d < p.ranks; ++d) {
    const Shard kept = rank(d);
    const Inputs& mine = kept.inputs;
    for (int64_t b = 0; b < whole_.step.batch; ++b) {
      const int64_t r = b / p.q, token = whole_.step.seq_lens(r) - p.q + b % p.q;
      const bool here = token >= 0 && token / p.interleave % p.ranks == d;
      EXPECT_EQ(mine.step.slots(b) >= 0, here && whole_.step.slots(b) >= 0) << "row " << b;
      EXPECT_EQ(mine.step.index_slots(b) >= 0, here && whole_.step.index_slots(b) >= 0) << "row " << b;
      if (mine.step.slots(b) >= 0) {
        ++written[size_t(b)];
        const int64_t local = token / (int64_t(p.ranks) * p.interleave) * p.interleave + token % p.interleave;
        EXPECT_EQ(mine.step.slots(b), int64_t(mine.step.block_table(r, local / p.page)) * p.page + local % p.page);
      }
      if (mine.step.index_slots(b) >= 0) ++index_written[size_t(b)];
    }
  }
  for (int64_t b = 0; b < whole_.step.batch; ++b) {
    EXPECT_EQ(written[size_t(b)], whole_.step.slots(b) >= 0) << "row " << b;
    EXPECT_EQ(index_written[size_t(b)], whole_.step.index_slots(b) >= 0) << "row " << b;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Sharding,
    ::testing::Values(ShardCase{"plain", 2, 1, 1, 64, 0, false, KvFormat::kFp8DsMla, IndexFormat::kFp8},
                      ShardCase{"three_interleaved", 3, 5, 2, 64, 0, false, KvFormat::kFp8, IndexFormat::kMxfp4},
                      ShardCase{"large_pages", 2, 64, 1, 128, 320, false, KvFormat::kNvfp4DsMla, IndexFormat::kFp8},
                      ShardCase{"index_table", 6, 1, 3, 64, 0, true, KvFormat::kFp8DsMla, IndexFormat::kMxfp4}),
    [](const auto& shape) { return std::string(shape.param.name); });

}  // namespace
}  // namespace dsacore
