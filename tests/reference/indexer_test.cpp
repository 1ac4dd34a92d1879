// Steps 9 and 10 of the reference on scores set by hand, and against a brute-force selection on random bytes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "format/score_key.h"
#include "reference/index_scene.h"

namespace dsacore::test {
namespace {

using Tokens = std::vector<int32_t>;

Tokens first(int n) {
  Tokens out(static_cast<size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

TEST(ReferenceIndexer, LargestScoresInTokenOrder) {
  IndexScene scene(IndexFormat::kFp8, 3, {6});
  const float values[] = {1, 5, -2, 4, 0.5f, 6};
  for (int t = 0; t < 6; ++t) scene.set_key(0, t, to_e4m3(values[t]));
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{1, 3, 5}));
  EXPECT_EQ(scene.valid(0), 3);
}

TEST(ReferenceIndexer, EqualScoresGoToSmallerTokens) {
  IndexScene scene(IndexFormat::kFp8, 4, {100});
  for (int t = 0; t < 100; ++t) scene.set_key(0, t, to_e4m3(2.0f));
  scene.run();
  EXPECT_EQ(scene.selected(0), first(4));
  // One better token far behind, and equal ones split by the threshold.
  scene.set_key(0, 99, to_e4m3(3.0f));
  for (int t = 0; t < 50; ++t) scene.set_key(0, t, to_e4m3(1.0f));
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{50, 51, 52, 99}));
}

TEST(ReferenceIndexer, SameScoreByDifferentBytesIsATie) {
  IndexScene scene(IndexFormat::kFp8, 1, {2});
  scene.set_key(0, 0, to_e4m3(1.0f), 4);
  scene.set_key(0, 1, to_e4m3(4.0f), 1);
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{0}));
}

TEST(ReferenceIndexer, NanScoresAreLowestAmongThemselvesByToken) {
  IndexScene scene(IndexFormat::kFp8, 4, {7});
  scene.head_weights(0, 0) = -1;  // so that scores are negative, and NaN still below them
  for (int t = 0; t < 7; ++t) scene.set_key(0, t, 0x7F);
  scene.set_key(0, 4, to_e4m3(448.0f), 1e30f);
  scene.set_key(0, 6, to_e4m3(1.0f));
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{0, 1, 4, 6}));
  for (const uint8_t nan : {uint8_t(0x7F), uint8_t(0xFF)}) {
    scene.set_key(0, 0, nan);
    scene.run();
    EXPECT_EQ(scene.selected(0), (Tokens{0, 1, 4, 6})) << "relu of either NaN is NaN";
  }
}

TEST(ReferenceIndexer, MinusZeroEqualsZero) {
  IndexScene scene(IndexFormat::kFp8, 1, {2});
  // A score that underflows to -0 in FP32 against one that is +0: a tie, so the smaller token wins on either side.
  scene.head_weights(0, 0) = -0x1p-100f;
  scene.set_key(0, 0, to_e4m3(1.0f), 0x1p-100f);
  scene.set_key(0, 1, 0x00);
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{0}));
  scene.set_key(0, 0, 0x00);
  scene.set_key(0, 1, to_e4m3(1.0f), 0x1p-100f);
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{0}));
}

TEST(ReferenceIndexer, ReluComesBeforeTheHeadWeight) {
  IndexScene scene(IndexFormat::kFp8, 2, {3});
  scene.head_weights(0, 0) = -2;
  scene.set_key(0, 0, to_e4m3(1.0f));   // -2
  scene.set_key(0, 1, to_e4m3(-8.0f));  // relu makes it 0
  scene.set_key(0, 2, to_e4m3(0.5f));   // -1
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{1, 2}));
}

TEST(ReferenceIndexer, KeyScaleMultipliesAfterTheHeadSum) {
  IndexScene scene(IndexFormat::kFp8, 1, {2});
  // Two heads that see opposite signs: with the scale inside the relu nothing would change, with a negative scale
  // outside it the order turns round.
  scene.set_key(0, 0, to_e4m3(1.0f), -1);
  scene.set_key(0, 1, to_e4m3(2.0f), -1);
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{0})) << "scores -1 and -2, not relu(-1) and relu(-2)";
}

TEST(ReferenceIndexer, SumsHeadsAndDimensions) {
  IndexScene scene(IndexFormat::kFp8, 1, {2});
  scene.index_query.fill(0);
  for (int h = 0; h < 8; ++h) {
    scene.head_weights(0, h) = float(h + 1);
    for (int i = 0; i < kIndexDim; ++i) scene.index_query(0, h, i) = to_e4m3(h % 2 == 0 ? 1.0f : -1.0f);
  }
  // Even heads see +d, odd heads -d: positive keys score 128 * (1 + 3 + 5 + 7), negative ones 128 * (2 + 4 + 6 + 8).
  for (int t = 0; t < 2; ++t) {
    int offset = 0;
    scene.set_key(0, t, 0);
    std::byte* page = scene.page_of(0, t, &offset);
    std::memset(page + IndexFp8::value_at(offset), to_e4m3(t == 0 ? 1.0f : -1.0f), kIndexDim);
  }
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{1}));
}

TEST(ReferenceIndexer, Mxfp4BlockScalesComeBeforeTheRelu) {
  IndexScene scene(IndexFormat::kMxfp4, 1, {2});
  scene.index_query(0, 0, 0) = to_e4m3(1.0f);
  scene.index_query(0, 0, 32) = to_e4m3(1.0f);
  const auto set = [&](int t, float a, int exponent_a, float b, int exponent_b) {
    int offset = 0;
    std::byte* page = scene.page_of(0, t, &offset);
    std::memset(page + IndexMxfp4::value_at(offset), 0, IndexMxfp4::kValueBytes);
    page[IndexMxfp4::value_at(offset)] = std::byte(to_e2m1(a));
    page[IndexMxfp4::value_at(offset) + 16] = std::byte(to_e2m1(b));
    for (int i = 0; i < 4; ++i) page[IndexMxfp4::scale_at(offset) + i] = std::byte(127);
    page[IndexMxfp4::scale_at(offset)] = std::byte(127 + exponent_a);
    page[IndexMxfp4::scale_at(offset) + 1] = std::byte(127 + exponent_b);
  };
  // 6 - 2 * 2 = 2 loses to 3; a relu per block would make it 6, and without block scales it would be 6 - 2 = 4.
  set(0, 6, 0, -2, 1);
  set(1, 3, 0, 0, 0);
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{1}));
  set(1, 1, 0, 1, -2);  // 1.25
  scene.run();
  EXPECT_EQ(scene.selected(0), (Tokens{0}));
}

TEST(ReferenceIndexer, ShortRowsTakeEveryTokenAndReadNoKey) {
  IndexScene scene(IndexFormat::kFp8, 8, {0, 1, 8});
  scene.index.data = nullptr;
  scene.run();
  EXPECT_EQ(scene.selected(0), Tokens{});
  EXPECT_EQ(scene.selected(1), first(1));
  EXPECT_EQ(scene.selected(2), first(8));
  for (int row = 0; row < 3; ++row) {
    EXPECT_EQ(scene.valid(row), scene.seq_lens[size_t(row)]);
    for (int i = scene.valid(row); i < 8; ++i) {
      EXPECT_EQ(scene.tokens(row, i), -1) << row << " " << i;
      EXPECT_EQ(scene.physical(row, i), -1) << row << " " << i;
    }
  }
}

TEST(ReferenceIndexer, RowsOfARequestSeeOneTokenMoreEach) {
  IndexScene scene(IndexFormat::kFp8, 4, {2, 6}, 3);
  for (int t = 0; t < 6; ++t) scene.set_key(1, t, to_e4m3(float(t + 1)));
  scene.run();
  EXPECT_EQ(scene.valid(0), 0);
  EXPECT_EQ(scene.selected(1), first(1));
  EXPECT_EQ(scene.selected(2), first(2));
  EXPECT_EQ(scene.selected(3), first(4));
  EXPECT_EQ(scene.selected(4), (Tokens{1, 2, 3, 4}));
  EXPECT_EQ(scene.selected(5), (Tokens{2, 3, 4, 5}));
}

TEST(ReferenceIndexer, PhysicalRowsOfStridedLargePages) {
  IndexScene scene(IndexFormat::kFp8, 300, {300});
  Tensor<int32_t, 2> table(1, 3);
  table(0, 0) = 4;
  table(0, 1) = 0;
  table(0, 2) = 2;
  IndexerArgs args = scene.args();
  args.block_table = table.view();
  args.page = 128;
  args.stride_rows = 384;
  run_stage(reference_backend().indexer, args, shape_of(scene.layer.model, 1, 1, 1, 300));
  ASSERT_EQ(scene.valid(0), 300);
  for (int t = 0; t < 300; ++t) EXPECT_EQ(scene.physical(0, t), table(0, t / 128) * 384 + t % 128) << t;
}

TEST(ReferenceIndexer, IndexTableOfItsOwn) {
  IndexScene scene(IndexFormat::kFp8, 1, {130});
  for (int t = 0; t < 130; ++t) scene.set_key(0, t, to_e4m3(t == 129 ? 2.0f : 1.0f));
  IndexerArgs args = scene.args();
  Tensor<int32_t, 2> table(1, 2);  // MLA pages of 128 that would lead the index astray
  table.fill(77);
  args.block_table = table.view();
  args.index_block_table = scene.table.view();
  args.page = args.stride_rows = 128;
  run_stage(reference_backend().indexer, args, shape_of(scene.layer.model, 1, 1, 1, 130));
  EXPECT_EQ(scene.tokens(0, 0), 129);
  EXPECT_EQ(scene.physical(0, 0), 77 * 128 + 1);
}

/// Score of a token by the formula of step 9, in long double.
float brute_score(const IndexScene& scene, int64_t row, const std::byte* page, int offset) {
  const bool fp8 = scene.index.format == IndexFormat::kFp8;
  long double sum = 0;
  for (int h = 0; h < 8; ++h) {
    long double product = 0;
    for (int i = 0; i < kIndexDim; ++i) {
      const float scale = fp8 ? 1.0f : IndexMxfp4::scale(page, offset, i / 32);
      const float k = fp8 ? IndexFp8::value(page, offset, i) : IndexMxfp4::value(page, offset, i);
      product += static_cast<long double>(scale) * k * e4m3_to_float(scene.index_query(row, h, i));
    }
    if (product < 0) product = 0;
    sum += scene.head_weights(row, h) * product;
  }
  return float(double(fp8 ? sum * IndexFp8::scale(page, offset) : sum));
}

/// Random bytes in few distinct keys, so that there are ties and NaN scores among them.
void randomize(IndexScene& scene, uint32_t seed) {
  std::mt19937 bits(seed);
  const bool fp8 = scene.index.format == IndexFormat::kFp8;
  std::vector<Tokens> kinds(40, Tokens(fp8 ? 128 : 68));
  for (Tokens& kind : kinds) {
    for (int32_t& b : kind) b = int32_t(bits() & 0xFF);
    const bool nan = &kind == &kinds[0];
    for (int32_t& b : kind) b = fp8 && !nan && (b & 0x7F) == 0x7F ? 0x10 : b;
    if (!fp8) {
      for (size_t i = 64; i < 68; ++i) kind[i] = nan ? 255 : 120 + kind[i] % 16;
    }
  }
  for (int64_t r = 0; r < scene.requests; ++r) {
    for (int32_t t = 0; t < scene.seq_lens[size_t(r)]; ++t) {
      const Tokens& kind = kinds[bits() % kinds.size()];
      int offset = 0;
      std::byte* page = scene.page_of(r, t, &offset);
      const int value_bytes = fp8 ? 128 : 64;
      for (int i = 0; i < value_bytes; ++i) page[offset * value_bytes + i] = std::byte(kind[size_t(i)]);
      const float scale = float(1 + kind[0] % 5);
      if (fp8) std::memcpy(page + IndexFp8::scale_at(offset), &scale, sizeof(float));
      for (int i = 0; !fp8 && i < 4; ++i) page[IndexMxfp4::scale_at(offset) + i] = std::byte(kind[size_t(64 + i)]);
    }
  }
  std::normal_distribution<float> normal;
  for (int64_t row = 0; row < scene.rows; ++row) {
    for (int h = 0; h < 8; ++h) {
      scene.head_weights(row, h) = normal(bits);
      for (int i = 0; i < kIndexDim; ++i) scene.index_query(row, h, i) = to_e4m3(normal(bits));
    }
  }
}

TEST(ReferenceIndexer, MatchesBruteForceForAnyThreadCount) {
  for (const IndexFormat format : {IndexFormat::kFp8, IndexFormat::kMxfp4}) {
    for (const int topk : {1, 16, 512}) {
      IndexScene scene(format, topk, {700, 513, 40}, 2);
      randomize(scene, uint32_t(topk));
      scene.run(1);
      for (int64_t row = 0; row < scene.rows; ++row) {
        const int64_t request = row / 2, n = scene.seq_lens[size_t(request)] - 1 + row % 2;
        std::vector<float> scores;
        for (int32_t t = 0; t < n; ++t) {
          int offset = 0;
          const std::byte* page = scene.page_of(request, t, &offset);
          scores.push_back(brute_score(scene, row, page, offset));
        }
        Tokens order = first(int(n));
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
          const float x = scores[size_t(a)], y = scores[size_t(b)];
          return std::isnan(y) ? !std::isnan(x) : x > y;
        });
        order.resize(size_t(std::min<int64_t>(n, topk)));
        std::sort(order.begin(), order.end());
        ASSERT_EQ(scene.selected(row), order) << name_of(format) << " topk " << topk << " row " << row;
      }
      const Tokens before(scene.tokens.view().data(), scene.tokens.view().data() + scene.tokens.view().size());
      scene.tokens.fill(-7);
      scene.run(5);
      const Tokens after(scene.tokens.view().data(), scene.tokens.view().data() + scene.tokens.view().size());
      ASSERT_EQ(before, after);
    }
  }
}

}  // namespace
}  // namespace dsacore::test
