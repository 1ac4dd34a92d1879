// tune: what the search takes and leaves, the tables that come of it, and a small run on the cpu backend.
#include "driver/tune.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "support/layer.h"

namespace dsacore {
namespace {

constexpr size_t kQueryAt = static_cast<size_t>(StageId::kQuery), kIndexerAt = static_cast<size_t>(StageId::kIndexer);

TuneSpace two_of_each() {
  TuneSpace space;
  space.kernels[kQueryAt] = {"fused", "split"};
  space.kernels[kIndexerAt] = {"fused", "stock"};
  space.overlaps = {"serial", "fork", "late"};
  space.unfused_indexer = "stock";
  return space;
}

TunedPlan serial() {
  TunedPlan plan;
  plan.overlap = plan.unfused_overlap = "serial";
  return plan;
}

/// A machine on which plans take what a test says, 100 where it says nothing, and which counts what it measured.
class Machine {
 public:
  std::map<std::string, std::vector<double>> seconds;  ///< by "overlap kernels": one value a measurement, the last kept
  std::map<std::string, int> measured;

  TunedPlan search(const TunedPlan& start, const TuneSpace& space) {
    const auto text = [](const BenchPlan& plan) { return plan.overlap + " " + plan.kernels; };
    const auto time = [&](const BenchPlan& plan) {
      const int before = measured[text(plan)]++;
      const auto found = seconds.find(text(plan));
      if (found == seconds.end()) return 100.0;
      return found->second[std::min(size_t(before), found->second.size() - 1)];
    };
    return search_plan(start, space, 0.02, {text, time}, times);
  }
  TunedTimes times;
};

TEST(TuneSearch, TakesWhatGains) {
  Machine machine;
  machine.seconds = {{"fork ", {90}}, {"late ", {80}}, {"late query=split", {70}}};
  const TunedPlan found = machine.search(serial(), two_of_each());
  EXPECT_EQ(found.overlap, "late");
  EXPECT_EQ(found.kernels[kQueryAt], "split");
  EXPECT_EQ(found.kernels[kIndexerAt], "");
  EXPECT_EQ(machine.times.before, 100);
  EXPECT_EQ(machine.times.after, 70);
}

TEST(TuneSearch, TriesTheModesAgainWithAnotherKernel) {
  Machine machine;
  machine.seconds = {{"serial query=split", {90}}, {"fork query=split", {60}}};
  EXPECT_EQ(machine.search(serial(), two_of_each()).overlap, "fork");
}

TEST(TuneSearch, LeavesWhatGainsTooLittleOrOnlyOnce) {
  Machine machine;
  machine.seconds = {{"fork ", {98.5}}, {"late ", {80, 99}}};
  EXPECT_EQ(machine.search(serial(), two_of_each()), serial());
  EXPECT_EQ(machine.times.after, 100);
}

TEST(TuneSearch, MeasuresPlansThatRunAlikeOnce) {
  Machine machine;
  TuneSpace space = two_of_each();
  space.overlaps = {"serial", "serial", "serial"};
  machine.search(serial(), space);
  EXPECT_EQ(machine.measured["serial "], 1);
}

TEST(TuneSearch, TheUnfusedModeIsNeverALateOne) {
  Machine machine;
  machine.seconds = {{"late indexer=stock", {10}}, {"fork indexer=stock", {50}}};
  TuneSpace space = two_of_each();
  space.kernels[kIndexerAt] = {"fused"};
  const TunedPlan found = machine.search(serial(), space);
  EXPECT_EQ(found.unfused_overlap, "fork");
  EXPECT_EQ(found.overlap, "serial");
}

TunedPlan plan_of(const char* query, const char* overlap) {
  TunedPlan plan;
  plan.kernels[kQueryAt] = query;
  plan.overlap = overlap;
  plan.unfused_overlap = "fork";
  return plan;
}

TEST(TunedEntries, RowsTakeThePlanOfTheNextLargerOne) {
  const auto accepts = [](StageId, std::string_view, int, int, int rows) { return rows <= 12; };
  TablesEntry before;
  before.backend = "cuda";
  before.tables.partial = RowTable::parse("partial", "proj");
  const std::vector<TablesEntry> entries = tuned_entries({{96, 1, plan_of("", "serial")},
                                                          {96, 16, plan_of("", "serial")},
                                                          {12, 16, plan_of("split", "late")},
                                                          {12, 4, plan_of("fused", "front")},
                                                          {12, 1, plan_of("auto", "front")}},
                                                         before, accepts);
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].max_heads, 12);
  EXPECT_EQ(entries[0].tables.kernels[kQueryAt].text(), "2-4:fused,5-12:split") << "it must accept, else no name";
  EXPECT_EQ(entries[0].tables.overlap.text(), "1-4:front,5-256:late");
  EXPECT_EQ(entries[0].tables.unfused_overlap.text(), "1-256:fork");
  EXPECT_EQ(entries[0].tables.partial.text(), "proj");
  EXPECT_EQ(entries[1].max_heads, 0);
  EXPECT_EQ(entries[1].tables.kernels[kQueryAt].text(), "");
}

TEST(TunedEntries, AskForAllHeadsOfAnEntry) {
  std::vector<std::pair<int, int>> asked;
  const auto accepts = [&](StageId, std::string_view, int below, int heads, int) {
    asked.emplace_back(below, heads);
    return true;
  };
  const TunedPlan plan = plan_of("split", "late");
  const std::vector<TablesEntry> entries = tuned_entries({{12, 1, plan}, {24, 1, plan}}, {}, accepts);
  EXPECT_EQ(asked.front(), std::pair(0, 12));
  EXPECT_EQ(asked.back(), std::pair(12, kMaxHeads));
  EXPECT_EQ(entries.size(), 1u) << "both say the same";
}

TuneOptions small_tune() {
  TuneOptions options;
  options.heads = {2, 3};
  options.batches = {2, 18};
  options.shape.q = 2;
  options.shape.context = "90";
  options.shape.q_lora = 128;
  options.shape.index_heads = 8;
  options.shape.topk = 16;
  options.repeat = 2;
  return options;
}

TEST(Tune, GivesAFileThatLoads) {
  TuneOptions options = small_tune();
  int shapes = 0;
  options.on_shape = [&](const std::string&) { ++shapes; };
  const TuneResult result = tune(options, "2026-01-02", "a program");
  EXPECT_EQ(shapes, 4);
  ASSERT_EQ(result.findings.size(), 4u);
  EXPECT_GT(result.findings[3].times.before, 0);
  EXPECT_NE(result.findings[3].after.find("query=many_rows"), std::string::npos) << result.findings[3].after;
  const Context context;
  const Tables tables = read_tables(result.text, "text", "cpu", context.cpu_target(), 2);
  EXPECT_EQ(tables.overlap_of(256), OverlapMode::kSerial);
  EXPECT_EQ(read_tables(result.text, "text", "cuda", "sm_90a", 12).overlap.text(),
            read_tables(builtin_tables(), "built-in", "cuda", "sm_90a", 12).overlap.text());
  EXPECT_NE(result.text.find("2026-01-02"), std::string::npos);
}

TEST(Tune, RefusesRowsThatAreNoMultipleOfQ) {
  TuneOptions options = small_tune();
  options.batches = {4, 3};
  const Error error = test::error_of([&] { tune(options, "", ""); });
  EXPECT_EQ(error.argument, "--batches");
  EXPECT_EQ(error.value, "3");
}

}  // namespace
}  // namespace dsacore
