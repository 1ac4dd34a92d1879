// compare: agrees where backends do, and names the stage where one was broken on purpose (spec 9).
#include "driver/compare.h"

#include <gtest/gtest.h>

#include <set>

#include "format/numeric.h"
#include "io/generate.h"
#include "support/layer.h"

namespace dsacore {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

CaseOptions small(KvFormat kv, IndexFormat index) {
  CaseOptions options;
  options.heads = 4;
  options.batch = 8;
  options.context = "5,300,90,150";
  options.topk = 32;
  options.index_heads = 8;
  options.q_lora = 128;
  options.pad_requests = 1;
  options.kv_format = kv;
  options.index_format = index;
  return options;
}

/// The same case three times: as it was, run by the reference, run by the judged one.
struct Runs {
  explicit Runs(const CaseOptions& options, BackendKind judged = BackendKind::kReference)
      : before(make_case(options)), expected_case(make_case(options)), got_case(make_case(options)) {
    RunOptions run;
    run.backend = BackendKind::kReference;
    run.dump = true;
    expected = run_case(inputs_of(expected_case), run).outputs;
    run.backend = judged;
    got = run_case(inputs_of(got_case), run).outputs;
  }

  std::vector<AgreementLine> lines() const { return compare(inputs_of(before), reference_backend(), expected, got); }

  /// The tensors that disagree.
  std::set<std::string> broken() const {
    std::set<std::string> names;
    for (const AgreementLine& line : lines()) {
      if (!line.ok) names.insert(line.tensor);
    }
    return names;
  }

  Case before, expected_case, got_case;
  Outputs expected, got;
};

using Names = std::set<std::string>;

class Formats : public ::testing::TestWithParam<std::tuple<KvFormat, IndexFormat>> {};

TEST_P(Formats, TheCpuBackendAgrees) {
  for (const char* adversarial : {"", "ties,equal,zero,negzero,subnormal,magnitude,nan,inf"}) {
    CaseOptions options = small(std::get<0>(GetParam()), std::get<1>(GetParam()));
    for (std::string_view rest = adversarial; !rest.empty();) {
      const size_t comma = std::min(rest.find(','), rest.size());
      options.adversarial.emplace_back(rest.substr(0, comma));
      rest.remove_prefix(std::min(comma + 1, rest.size()));
    }
    const Runs runs(options, BackendKind::kCpu);
    for (const AgreementLine& line : runs.lines())
      EXPECT_TRUE(line.ok) << line.tensor << ": " << line.figure << ", allowed " << line.bound;
    EXPECT_EQ(runs.lines().size(), 12u);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Formats,
                         ::testing::Combine(::testing::Values(KvFormat::kFp8DsMla, KvFormat::kFp8,
                                                              KvFormat::kNvfp4DsMla),
                                            ::testing::Values(IndexFormat::kFp8, IndexFormat::kMxfp4)));

class Broken : public ::testing::Test {
 protected:
  Runs runs_{small(KvFormat::kFp8DsMla, IndexFormat::kFp8)};
  StageDump& dump() { return *runs_.got.stages; }
};

TEST_F(Broken, NothingIsWithoutAChange) { EXPECT_EQ(runs_.broken(), Names()); }

TEST_F(Broken, QcByTwoUnits) {
  dump().q_c[5].bits = uint16_t(dump().q_c[5].bits + 2);
  EXPECT_EQ(runs_.broken(), Names{"q_c"});
}

TEST_F(Broken, QcByOneUnitInManyPlaces) {
  for (size_t i = 0; i < 20; ++i) dump().q_c[i].bits = uint16_t(dump().q_c[i].bits + 1);
  EXPECT_TRUE(runs_.broken().count("q_c"));
}

TEST_F(Broken, OneUnitOfQcIsAllowedAndLaterStagesAreJudgedOnIt) {
  size_t largest = 0;
  for (size_t i = 0; i < 128; ++i) {
    if (std::abs(to_float(dump().q_c[i])) > std::abs(to_float(dump().q_c[largest]))) largest = i;
  }
  dump().q_c[largest].bits = uint16_t(dump().q_c[largest].bits + 1);
  EXPECT_FALSE(runs_.broken().count("q_c"));
}

TEST_F(Broken, Query) {
  BFloat16* query = reinterpret_cast<BFloat16*>(dump().query.data());
  for (int i = 0; i < 576; ++i) query[i] = to_bf16(to_float(query[i]) * 1.1f);
  EXPECT_EQ(runs_.broken(), Names{"query"}) << "attention is judged on the expected query where the dumped one fails";
}

TEST_F(Broken, HeadWeights) {
  dump().head_weights[9] *= 1.00001f;
  EXPECT_EQ(runs_.broken(), Names{"head_weights"});
}

TEST_F(Broken, HeadWeightsNotANumber) {
  dump().head_weights[9] = kNan;
  EXPECT_EQ(runs_.broken(), Names{"head_weights"});
}

TEST_F(Broken, IndexQuery) {
  dump().index_query[700] ^= 0x44;
  EXPECT_EQ(runs_.broken(), Names{"index_query"});
}

TEST_F(Broken, InsertedCacheRow) {
  const int64_t slot = runs_.got_case.step.slots(1);
  runs_.got.kv.data[slot * 656 + 7] ^= std::byte(0x30);
  EXPECT_EQ(runs_.broken(), Names{"kv_cache"});
}

TEST_F(Broken, CacheByteThatNobodyMayWrite) {
  const int32_t page = runs_.got_case.step.block_table(1, 0);  // an old page of a long request
  runs_.got.kv.data[int64_t(page) * 64 * 656 + 3] ^= std::byte(1);
  EXPECT_EQ(runs_.broken(), Names{"kv_cache"});
  runs_.got.index.data[int64_t(page) * 64 * 132 + 3] ^= std::byte(1);
  EXPECT_EQ(runs_.broken(), (Names{"kv_cache", "index_cache"}));
}

TEST_F(Broken, InsertedIndexKey) {
  const int64_t slot = runs_.got_case.step.index_slots(1);
  std::byte* page = runs_.got.index.data + slot / 64 * 64 * 132;
  page[slot % 64 * 128 + 2] ^= std::byte(0x30);
  EXPECT_EQ(runs_.broken(), Names{"index_cache"});
}

/// Row 1 sees 300 keys, of which it selects 32.
TEST_F(Broken, SelectionOfAnyOtherToken) {
  int32_t* tokens = dump().topk_tokens.data() + 32;
  const std::set<int32_t> taken(tokens, tokens + 32);
  for (int32_t t = 0; t < 300; ++t) {
    if (taken.count(t) == 0 && t < tokens[0]) {
      tokens[0] = t;
      break;
    }
  }
  EXPECT_EQ(runs_.broken(), (Names{"topk_tokens"})) << "rows and attention are judged on the recomputed selection";
}

TEST_F(Broken, SelectionOutOfOrder) {
  std::swap(dump().topk_tokens[32], dump().topk_tokens[33]);
  EXPECT_EQ(runs_.broken(), Names{"topk_tokens"});
}

TEST_F(Broken, SelectionOfShortRow) {
  dump().topk_tokens[2] = 4;  // row 0 sees 5 keys: all are selected
  EXPECT_EQ(runs_.broken(), Names{"topk_tokens"});
}

TEST_F(Broken, Valid) {
  dump().valid[3] = 31;
  EXPECT_EQ(runs_.broken(), Names{"valid"});
  dump().valid[3] = 32;
  dump().valid[7] = 1;  // a padded row
  EXPECT_EQ(runs_.broken(), Names{"valid"});
}

TEST_F(Broken, PhysicalRows) {
  dump().topk_rows[40] += 1;
  EXPECT_EQ(runs_.broken(), Names{"topk_rows"});
}

TEST_F(Broken, Latent) {
  for (int i = 0; i < 512; ++i) dump().latent[2048 + i] = to_bf16(to_float(dump().latent[2048 + i]) * 1.05f);
  EXPECT_EQ(runs_.broken(), Names{"latent"});
}

TEST_F(Broken, Lse) {
  dump().lse[6] += 0.01f;
  EXPECT_EQ(runs_.broken(), Names{"lse"});
  dump().lse[6] = kNan;
  EXPECT_EQ(runs_.broken(), Names{"lse"});
}

TEST_F(Broken, LseOfAPaddedRow) {
  dump().lse[7 * 4] = 0;
  EXPECT_EQ(runs_.broken(), Names{"lse"});
}

TEST_F(Broken, Out) {
  for (int i = 0; i < 128; ++i) runs_.got.out[512 + i] = to_bf16(to_float(runs_.got.out[512 + i]) * 1.2f);
  EXPECT_EQ(runs_.broken(), Names{"out"});
}

TEST_F(Broken, OutNotANumber) {
  runs_.got.out[600] = to_bf16(kNan);
  EXPECT_EQ(runs_.broken(), Names{"out"});
}

TEST_F(Broken, OutOfAPaddedRow) {
  runs_.got.out[7 * 512 + 3] = to_bf16(1.0f);
  EXPECT_EQ(runs_.broken(), Names{"out"});
}

TEST(Ties, OfTwoEqualKeysTheLaterOneIsRefused) {
  CaseOptions options = small(KvFormat::kFp8DsMla, IndexFormat::kFp8);
  options.adversarial = {"ties"};
  Runs runs(options);
  EXPECT_EQ(runs.broken(), Names());
  // Of a row that sees more keys than it selects, exchange the last selected token of a group of equal keys for a later
  // one.
  const Inputs in = inputs_of(runs.before);
  const auto key_of = [&](int64_t request, int32_t token) {
    const Place place = index_place_of(in, request, LocalId(token));
    const std::byte* page = index_page_at(runs.got.index, place.page);
    std::string bytes(reinterpret_cast<const char*>(page + place.offset * 128), 128);
    return bytes.append(reinterpret_cast<const char*>(page + 64 * 128 + place.offset * 4), 4);
  };
  int exchanged = 0;
  for (int64_t row = 1; row < 4; ++row) {
    int32_t* tokens = runs.got.stages->topk_tokens.data() + row * 32;
    const std::set<int32_t> taken(tokens, tokens + 32);
    const int32_t n = runs.before.step.seq_lens(row);
    for (int32_t later = n - 1; later > tokens[31]; --later) {
      if (key_of(row, later) != key_of(row, tokens[31]) || taken.count(later) != 0) continue;
      tokens[31] = later;
      ++exchanged;
      break;
    }
  }
  ASSERT_GT(exchanged, 0) << "the case has no tie at the threshold";
  runs.got.stages->topk_rows.clear();
  EXPECT_EQ(runs.broken(), Names{"topk_tokens"});
}

TEST(Ranks, AreJudgedWithoutCachesAndRows) {
  const CaseOptions options = small(KvFormat::kNvfp4DsMla, IndexFormat::kFp8);
  Runs runs(options);
  const Case again = make_case(options);
  RunOptions run;
  run.backend = BackendKind::kCpu;
  run.dump = true;
  run.dcp = 2;
  run.partial = PartialFormat::kProj;
  runs.got = run_case(inputs_of(again), run).outputs;
  const std::vector<AgreementLine> lines = runs.lines();
  Names judged;
  for (const AgreementLine& line : lines) {
    judged.insert(line.tensor);
    EXPECT_TRUE(line.ok) << line.tensor << ": " << line.figure;
  }
  EXPECT_EQ(judged, (Names{"q_c", "query", "head_weights", "index_query", "topk_tokens", "valid", "lse", "out"}));
}

TEST(Compare, NeedsDumps) {
  Runs runs(small(KvFormat::kFp8, IndexFormat::kFp8));
  runs.got.stages.reset();
  EXPECT_EQ(test::error_of([&] { runs.lines(); }).code, ErrorCode::kInternal);
}

}  // namespace
}  // namespace dsacore
