// Plans: what follows from a key, what two keys share, and the reasons that a report shows.
#include "plan/plan.h"

#include <gtest/gtest.h>

namespace dsacore {
namespace {

Verdict always(const ShapeKey&) { return {}; }
Verdict few_rows(const ShapeKey& shape) {
  if (shape.rows <= 16) return {};
  return {false, "rows above 16"};
}
int64_t no_scratch(const ShapeKey&, int) { return 0; }
int prepared = 0;
void count(const ShapeKey&) { ++prepared; }
template <class Args>
void nothing(const Args&, const Workspace&) {}

constexpr Kernel<NormArgs> kNorms[] = {{"rows", always, no_scratch, nothing<NormArgs>}};
constexpr Kernel<QueryArgs> kQueries[] = {{"few", few_rows, no_scratch, nothing<QueryArgs>, count},
                                          {"many", always, no_scratch, nothing<QueryArgs>}};
constexpr Kernel<IndexProjectionArgs> kIndexProjections[] = {
    {"plain", always, no_scratch, nothing<IndexProjectionArgs>},
    {.name = "front",
     .accepts = few_rows,
     .scratch_bytes = no_scratch,
     .run = nothing<IndexProjectionArgs>,
     .prepare = count,
     .front = true}};
constexpr Kernel<IndexerArgs> kIndexers[] = {
    {.name = "fused", .accepts = always, .scratch_bytes = no_scratch, .run = nothing<IndexerArgs>, .fused = true},
    {"stock", always, no_scratch, nothing<IndexerArgs>}};
constexpr Kernel<CandidateMergeArgs> kCandidateMerges[] = {{"merge", always, no_scratch, nothing<CandidateMergeArgs>}};
constexpr Kernel<SparseCoreArgs> kCores[] = {{"core", always, no_scratch, nothing<SparseCoreArgs>}};
constexpr Kernel<ValueArgs> kValues[] = {{"value", always, no_scratch, nothing<ValueArgs>}};
constexpr Kernel<GateArgs> kGates[] = {{"gate", always, no_scratch, nothing<GateArgs>}};
constexpr Kernel<PartialMergeArgs> kPartialMerges[] = {{"by_lse", always, no_scratch, nothing<PartialMergeArgs>}};

Backend backend() {
  return {.name = "test",
          .target = "none",
          .target_data = nullptr,
          .packed_bytes = nullptr,
          .pack = nullptr,
          .query = kQueries,
          .index_projection = kIndexProjections,
          .indexer = kIndexers,
          .candidate_merge = kCandidateMerges,
          .sparse_core = kCores,
          .value = kValues,
          .gate = kGates,
          .partial_merge = kPartialMerges,
          .norm = kNorms};
}

ShapeKey shape(int rows) { return {{1536, 12, 32}, KvFormat::kFp8DsMla, IndexFormat::kFp8, 2048, rows, 1, 1, 8192}; }

Plan plan_of(int rows, const char* overlap, const char* kernels = "", bool has_side = true) {
  Tables tables;
  override_tables(tables, kernels, overlap);
  return make_plan(backend(), has_side, plan_key(shape(rows), tables, std::nullopt));
}

/// "norm=rows query=few ..."
std::string kernels_of(const Plan& plan) {
  std::string text;
  plan.for_each_kernel([&](StageId stage, const auto& kernel) {
    text += (text.empty() ? "" : " ") + std::string(name_of(stage)) + "=" + std::string(kernel.name);
  });
  return text;
}

std::vector<std::string> others_of(const Plan& plan, StageId stage) {
  std::vector<std::string> lines;
  for (const PassedOver& other : plan.others[static_cast<size_t>(stage)]) {
    lines.push_back(std::string(other.kernel) + ": " + other.reason);
  }
  return lines;
}

using Lines = std::vector<std::string>;

TEST(Plan, HoldsTheKernelsThatTheModeRuns) {
  EXPECT_EQ(kernels_of(plan_of(4, "serial")),
            "query=few index_projection=plain indexer=fused sparse_core=core value=value");
  EXPECT_EQ(kernels_of(plan_of(4, "fork")),
            "norm=rows query=few index_projection=plain indexer=fused sparse_core=core value=value");
  for (const char* mode : {"front", "late_front"}) {
    EXPECT_EQ(kernels_of(plan_of(4, mode)),
              "query=few index_projection=front indexer=fused sparse_core=core value=value");
  }
  EXPECT_EQ(kernels_of(plan_of(64, "front")),
            "norm=rows query=many index_projection=plain indexer=fused sparse_core=core value=value")
      << "no front accepts";
}

TEST(Plan, SaysWhyNotTheOthers) {
  EXPECT_EQ(others_of(plan_of(4, "serial"), StageId::kIndexProjection), Lines{"front: an earlier one accepts"});
  EXPECT_EQ(others_of(plan_of(4, "front"), StageId::kIndexProjection), Lines{"plain: overlap front takes a front"});
  EXPECT_EQ(others_of(plan_of(64, "front"), StageId::kIndexProjection), Lines{"front: rows above 16"});
  EXPECT_EQ(others_of(plan_of(4, "front", "index_projection=front"), StageId::kIndexProjection),
            Lines{"plain: the tables name others"});
}

TEST(Plan, AFrontIsTakenOnlyWhereTheTablesLetIt) {
  EXPECT_EQ(plan_of(4, "front", "index_projection=plain").index_projection->name, "plain");
  EXPECT_EQ(plan_of(4, "front", "index_projection=plain").overlap, OverlapMode::kFork);
  EXPECT_EQ(plan_of(4, "front", "index_projection=plain|front").index_projection->name, "front");
  EXPECT_EQ(plan_of(4, "serial", "index_projection=plain|front").index_projection->name, "plain");
}

TEST(Plan, TheStockIndexerIsTakenByTableWhereTheFusedOneCouldRun) {
  const char* kernels = "indexer=1-8:stock,9-256:fused";
  EXPECT_EQ(plan_of(4, "front", kernels).indexer->name, "stock");
  EXPECT_EQ(plan_of(16, "front", kernels).indexer->name, "fused");
}

TEST(Plan, BackendsOfTheHostKeepTheModeThatIsAskedFor) {
  const Plan plan = plan_of(4, "late_front", "", false);
  EXPECT_EQ(plan.overlap, OverlapMode::kLateFront);
  EXPECT_EQ(plan.index_projection->name, "plain");
  EXPECT_FALSE(plan.launches.uses_side());
}

TEST(Plan, OfSeveralRanksHasTheirKernelsAndTheTablesPartials) {
  Tables tables;
  tables.partial = RowTable::parse("partial", "1-15:bf16,16-256:proj");
  for (const auto& [rows, partial] : {std::pair(4, PartialFormat::kBf16), {16, PartialFormat::kProj}}) {
    const Plan plan = make_plan(backend(), false, plan_key(shape(rows), tables, PartialFormat::kAuto));
    EXPECT_EQ(plan.partial(), partial) << rows;
    EXPECT_NE(plan.candidate_merge, nullptr);
    EXPECT_NE(plan.partial_merge, nullptr);
    EXPECT_NE(plan.gate, nullptr);
  }
  EXPECT_EQ(make_plan(backend(), false, plan_key(shape(4), tables, PartialFormat::kProj)).partial(),
            PartialFormat::kProj);
}

TEST(Plan, RunsAlikeWhereKernelsAndModeAreTheSame) {
  EXPECT_TRUE(run_alike(plan_of(4, "front"), plan_of(16, "front")));
  EXPECT_FALSE(run_alike(plan_of(4, "front"), plan_of(17, "front"))) << "another query";
  EXPECT_FALSE(run_alike(plan_of(4, "front"), plan_of(4, "late_front"))) << "another mode";
  EXPECT_FALSE(run_alike(plan_of(4, "front"), plan_of(4, "front", "indexer=stock")));
}

TEST(Plans, KeepsOneForEachKeyAndPreparesItsKernelsOnce) {
  Plans plans(nullptr);
  prepared = 0;
  const Plan& first = plans.keep(plan_of(4, "late_front"));
  EXPECT_EQ(prepared, 2) << "the query and the front";
  EXPECT_EQ(&plans.keep(plan_of(4, "late_front")), &first);
  EXPECT_EQ(prepared, 2);
  EXPECT_EQ(plans.size(), 1);
  for (int rows = 5; rows <= 16; ++rows) plans.keep(plan_of(rows, "late_front"));
  EXPECT_EQ(plans.size(), 13);
  EXPECT_EQ(&plans.keep(plan_of(4, "late_front")), &first) << "it stays where it is";
  EXPECT_NE(&plans.keep(plan_of(4, "serial")), &first);
  ShapeKey longer = shape(4);
  longer.max_context += 1;
  Tables tables;
  override_tables(tables, "", "late_front");
  EXPECT_NE(&plans.keep(make_plan(backend(), true, plan_key(longer, tables, std::nullopt))), &first);
}

}  // namespace
}  // namespace dsacore
