// CachePool: caches filled from a pool, here in host memory: right contents, no two keys alike, another order for each
// number. And verify_layer, which judges a step over them.
#include "driver/cache_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "driver/placed_inputs.h"
#include "driver/run_case.h"
#include "driver/verify_layer.h"
#include "format/layouts.h"

namespace dsacore {
namespace {

CaseOptions shape_of(KvFormat kv, IndexFormat index) {
  CaseOptions options;
  options.heads = 2;
  options.batch = 3;
  options.context = "70,500,3000";
  options.q_lora = 128;
  options.index_heads = 8;
  options.topk = 64;
  options.page = 128;
  options.kv_format = kv;
  options.index_format = index;
  return options;
}

/// A step in host memory as a device would have it.
struct Filled {
  Filled(const CaseOptions& shape, CachePool& pool, uint64_t number)
      : described(make_case_without_caches(shape)), placed(inputs_of(described), host_memory()) {
    pool.fill(shape, placed.inputs(), host_memory(), number);
  }
  std::string index_bytes() const {
    return {reinterpret_cast<const char*>(placed.inputs().index.data), size_t(cache_bytes(placed.inputs().index))};
  }

  Case described;
  PlacedInputs placed;
};

std::vector<AgreementLine> verify(const Filled& filled, const LayerWeights& weights) {
  Context context;
  const Inputs host = inputs_of(filled.described);
  PreparedLayer layer(context, host.config, weights, prepare_options_of(host, {}));
  layer.prepare_cache(filled.placed.inputs().kv, filled.placed.inputs().index);
  return verify_layer(context, layer, filled.placed, host);
}

bool agree(const std::vector<AgreementLine>& lines) {
  for (const AgreementLine& line : lines) {
    if (!line.ok) return false;
  }
  return !lines.empty();
}

class CachePoolOfFormats : public ::testing::TestWithParam<std::tuple<KvFormat, IndexFormat>> {};

TEST_P(CachePoolOfFormats, FillsWhatAStepCanRunOn) {
  CachePool pool;
  const Filled filled(shape_of(std::get<0>(GetParam()), std::get<1>(GetParam())), pool, 0);
  for (const AgreementLine& line : verify(filled, inputs_of(filled.described).weights)) {
    EXPECT_TRUE(line.ok) << line.tensor << ": " << line.figure << ", allowed " << line.bound;
  }
}

INSTANTIATE_TEST_SUITE_P(All, CachePoolOfFormats,
                         ::testing::Combine(::testing::Values(KvFormat::kFp8DsMla, KvFormat::kFp8,
                                                              KvFormat::kNvfp4DsMla),
                                            ::testing::Values(IndexFormat::kFp8, IndexFormat::kMxfp4)));

TEST(CachePool, NoTwoKeysAreAlike) {
  CachePool pool;
  CaseOptions shape = shape_of(KvFormat::kFp8DsMla, IndexFormat::kFp8);
  shape.context = std::to_string(2 * CachePool::kPages * kIndexPage);  // so that pages of the pool come several times
  shape.batch = 1;
  const Filled filled(shape, pool, 0);
  const IndexCache& index = filled.placed.inputs().index;
  std::set<std::string> keys;
  int64_t nan = 0;
  for (int64_t page = 0; page < index.pages; ++page) {
    const std::byte* at = index.data + page * IndexFp8::kPageBytes;
    for (int token = 0; token < kIndexPage; ++token) {
      const auto* key = reinterpret_cast<const char*>(at + IndexFp8::value_at(token));
      keys.emplace(key, size_t(kIndexDim));
      for (int i = 0; i < kIndexDim; ++i) nan += (key[i] & 0x7F) == 0x7F;
      ASSERT_GT(IndexFp8::scale(at, token), 0.0f) << page << " " << token;
    }
  }
  EXPECT_EQ(int64_t(keys.size()), index.pages * kIndexPage);
  EXPECT_EQ(nan, 0);
}

TEST(CachePool, AnotherNumberIsAnotherOrder) {
  CachePool pool;
  const CaseOptions shape = shape_of(KvFormat::kFp8, IndexFormat::kMxfp4);
  const std::string first = Filled(shape, pool, 0).index_bytes();
  EXPECT_EQ(first, Filled(shape, pool, 0).index_bytes());
  EXPECT_NE(first, Filled(shape, pool, 1).index_bytes());
  CaseOptions other = shape;
  other.seed = 1;
  EXPECT_NE(first, Filled(other, pool, 0).index_bytes()) << "the pool is made again";
}

TEST(VerifyLayer, FindsALayerThatIsWrong) {
  CachePool pool;
  CaseOptions shape = shape_of(KvFormat::kFp8DsMla, IndexFormat::kFp8);
  const Filled filled(shape, pool, 0);
  shape.seed = 1;
  const Case other = make_case_without_caches(shape);
  EXPECT_FALSE(agree(verify(filled, other.weights)));
}

TEST(MakeCase, WithoutCachesAllElseIsTheSame) {
  const CaseOptions shape = shape_of(KvFormat::kFp8DsMla, IndexFormat::kFp8);
  const Case whole = make_case(shape), described = make_case_without_caches(shape);
  EXPECT_EQ(described.kv.data, nullptr);
  EXPECT_EQ(described.index.data, nullptr);
  EXPECT_EQ(described.kv.pages, whole.kv.pages);
  EXPECT_EQ(described.index.pages, whole.index.pages);
  const auto same = [](const auto& a, const auto& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), size_t(a.size()) * sizeof(*a.data())) == 0;
  };
  EXPECT_TRUE(same(described.step.projected, whole.step.projected));
  EXPECT_TRUE(same(described.step.block_table, whole.step.block_table));
  EXPECT_TRUE(same(described.step.slots, whole.step.slots));
}

}  // namespace
}  // namespace dsacore
