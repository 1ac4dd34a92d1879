// run_case: one rank and several, dumps, reports, errors.
#include "driver/run_case.h"

#include <gtest/gtest.h>

#include <chrono>

#include "io/generate.h"
#include "support/layer.h"

namespace dsacore {
namespace {

CaseOptions small() {
  CaseOptions options;
  options.heads = 4;
  options.batch = 4;
  options.context = "5,150,90,33";
  options.topk = 24;
  options.index_heads = 8;
  options.q_lora = 128;
  return options;
}

std::vector<uint16_t> bits_of(const std::vector<BFloat16>& values) {
  std::vector<uint16_t> bits;
  for (BFloat16 value : values) bits.push_back(value.bits);
  return bits;
}

TEST(RunCase, DumpsEveryTensorOfOneRank) {
  const Case c = make_case(small());
  RunOptions options;
  options.dump = true;
  options.threads = 2;
  const RunResult result = run_case(inputs_of(c), options);
  ASSERT_TRUE(result.outputs.stages.has_value());
  const StageDump& dump = *result.outputs.stages;
  EXPECT_EQ(result.outputs.out.size(), 4u * 4 * 128);
  EXPECT_EQ(dump.q_c.size(), 4u * 128);
  EXPECT_EQ(dump.query.size(), 4u * 4 * 576 * 2);
  EXPECT_EQ(dump.index_query.size(), 4u * 8 * 128);
  EXPECT_EQ(dump.head_weights.size(), 4u * 8);
  EXPECT_EQ(dump.topk_tokens.size(), 4u * 24);
  EXPECT_EQ(dump.topk_rows.size(), 4u * 24);
  EXPECT_EQ(dump.valid, (std::vector<int32_t>{5, 24, 24, 24}));
  EXPECT_EQ(dump.latent.size(), 4u * 4 * 512);
  EXPECT_EQ(dump.lse.size(), 4u * 4);
  EXPECT_EQ(result.outputs.kv.data, c.kv.data) << "the inputs' cache, updated in place";
  EXPECT_EQ(result.report.threads, 2);
  EXPECT_EQ(result.report.stages.size(), 5u);
  EXPECT_GT(result.report.run_seconds, 0);
  EXPECT_GT(result.report.reserved_bytes, 0);
}

TEST(RunCase, CopiesNothingWithoutADump) {
  const Case c = make_case(small());
  EXPECT_FALSE(run_case(inputs_of(c), {}).outputs.stages.has_value());
}

class RunCaseRanks : public ::testing::TestWithParam<std::tuple<int, int, PartialFormat>> {};

TEST_P(RunCaseRanks, GiveWhatOneRankGives) {
  const auto [ranks, interleave, partial] = GetParam();
  const Case one_case = make_case(small()), ranks_case = make_case(small());
  RunOptions options;
  options.dump = true;
  options.threads = ranks;
  const RunResult one = run_case(inputs_of(one_case), options);
  options.dcp = ranks;
  options.interleave = interleave;
  options.partial = partial;
  const RunResult several = run_case(inputs_of(ranks_case), options);
  EXPECT_LT(test::relative_error(bits_of(several.outputs.out), bits_of(one.outputs.out)), 8e-3);
  const StageDump &a = *several.outputs.stages, &b = *one.outputs.stages;
  EXPECT_TRUE(test::same_bits(a.topk_tokens, b.topk_tokens, "topk_tokens"));
  EXPECT_TRUE(test::same_bits(a.valid, b.valid, "valid"));
  EXPECT_TRUE(test::same_bits(a.query, b.query, "query"));
  EXPECT_TRUE(test::same_bits(a.index_query, b.index_query, "index_query"));
  EXPECT_TRUE(test::same_bits(bits_of(a.q_c), bits_of(b.q_c), "q_c"));
  ASSERT_EQ(a.lse.size(), b.lse.size());
  for (size_t i = 0; i < a.lse.size(); ++i) EXPECT_NEAR(a.lse[i], b.lse[i], 2e-3) << "row and head " << i;
  EXPECT_EQ(a.latent.empty(), partial == PartialFormat::kProj);
  if (!a.latent.empty()) {
    EXPECT_LT(test::relative_error(bits_of(a.latent), bits_of(b.latent)), 4e-3);
  }
  EXPECT_TRUE(a.topk_rows.empty());
  EXPECT_EQ(several.outputs.kv.data, nullptr);
  EXPECT_EQ(several.report.threads, 1);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RunCaseRanks,
                         ::testing::Values(std::tuple(2, 1, PartialFormat::kBf16),
                                           std::tuple(4, 7, PartialFormat::kBf16),
                                           std::tuple(2, 64, PartialFormat::kProj),
                                           std::tuple(4, 1, PartialFormat::kProj)));

TEST(RunCase, RefusesBeforeRanksStart) {
  const Case c = make_case(small());
  const auto refused = [&](auto change) {
    RunOptions options;
    options.dcp = 2;
    Inputs inputs = inputs_of(c);
    change(inputs, options);
    const auto start = std::chrono::steady_clock::now();
    const Error error = test::error_of([&] { run_case(inputs, options); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5)) << "no rank waits for another";
    EXPECT_EQ(error.code, ErrorCode::kRefused) << error.message();
    return error.argument;
  };
  EXPECT_EQ(refused([](Inputs&, RunOptions& o) { o.dcp = 3; }), "dcp");
  EXPECT_EQ(refused([](Inputs&, RunOptions& o) { o.dcp = 9; }), "dcp");
  EXPECT_EQ(refused([](Inputs&, RunOptions& o) { o.interleave = 0; }), "interleave");
  EXPECT_EQ(refused([](Inputs&, RunOptions& o) { o.deadline = std::chrono::milliseconds(0); }), "deadline");
  EXPECT_EQ(refused([](Inputs& in, RunOptions&) { in.step.q = 3; }), "B");
  EXPECT_EQ(refused([](Inputs& in, RunOptions&) { in.step.q = 0; }), "q");
  EXPECT_EQ(refused([](Inputs& in, RunOptions&) { in.step.batch = 257; }), "B");
  EXPECT_EQ(refused([](Inputs& in, RunOptions&) { in.config.topk = 4096; }), "topk");
  EXPECT_EQ(refused([](Inputs& in, RunOptions&) { in.kv.pages = 1; }).substr(0, 5), "slots");
  const std::vector<int32_t> lengths = {5, 150, 90, -1};
  EXPECT_EQ(refused([&](Inputs& in, RunOptions&) { in.step.seq_lens = View<const int32_t, 1>(lengths.data(), 4); }),
            "seq_lens[3]");
}

TEST(RunCase, NamesTheCauseOfRanksErrorsAndNotTheLossOfAPeer) {
  const Case c = make_case(small());
  RunOptions options;
  options.dcp = 2;
  options.deadline = std::chrono::milliseconds(500);
  options.overlap = "sideways";
  const Error error = test::error_of([&] { run_case(inputs_of(c), options); });
  EXPECT_EQ(error.code, ErrorCode::kRefused) << error.message();
}

}  // namespace
}  // namespace dsacore
