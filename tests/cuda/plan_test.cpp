// The plans that the cuda backend's own kernels give, which need no GPU to be chosen.
#include "plan/plan.h"

#include <gtest/gtest.h>

namespace dsacore {
namespace {

Plan plan_of(int heads, int rows, const std::string& overlap, const std::string& kernels = {}) {
  Tables tables;
  override_tables(tables, kernels, overlap);
  const ShapeKey shape{{1536, heads, 32}, KvFormat::kFp8DsMla, IndexFormat::kFp8, 2048, rows, 1, 1, 8192};
  return make_plan(cuda_backend(), true, plan_key(shape, tables, std::nullopt));
}

TEST(CudaPlan, TheFrontModesTakeAFrontAndSayWhatTheyTakeItFor) {
  for (const char* mode : {"front", "late_front"}) {
    const Plan plan = plan_of(12, 8, mode);
    EXPECT_TRUE(plan.index_projection->front) << mode;
    EXPECT_EQ(plan.norm, nullptr);
    bool told = false;
    for (const PassedOver& other : plan.others[static_cast<size_t>(StageId::kIndexProjection)]) {
      EXPECT_NE(other.kernel, plan.index_projection->name);
      told = told || other.reason == "overlap " + std::string(mode) + " takes a front";
    }
    EXPECT_TRUE(told) << mode;
  }
  EXPECT_FALSE(plan_of(12, 8, "serial").index_projection->front);
}

TEST(CudaPlan, AQueryThatComesLateFindsTheNormDone) {
  const Plan late = plan_of(96, 8, "late");
  EXPECT_TRUE(late.query_finds_q_c());
  EXPECT_NE(late.norm, nullptr);
  EXPECT_FALSE(late.index_projection->front);
  EXPECT_FALSE(late.front_leaves_q_c());
  const Plan late_front = plan_of(96, 8, "late_front");
  EXPECT_TRUE(late_front.query_finds_q_c());
  EXPECT_EQ(late_front.norm, nullptr);
  EXPECT_TRUE(late_front.index_projection->front);
  EXPECT_TRUE(late_front.front_leaves_q_c());
  EXPECT_EQ(plan_of(96, 8, "late_front", "index_projection=front").overlap, OverlapMode::kLateFront) << "needs no norm";
  EXPECT_EQ(plan_of(96, 8, "late", "index_projection=front").overlap, OverlapMode::kLateFront) << "reads no q_c";
  EXPECT_EQ(plan_of(96, 8, "late_front", "index_projection=plain").overlap, OverlapMode::kLate) << "leaves no q_c";
  for (const char* mode : {"serial", "fork", "front"}) {
    EXPECT_FALSE(plan_of(96, 8, mode).query_finds_q_c()) << mode;
    EXPECT_FALSE(plan_of(96, 8, mode).front_leaves_q_c()) << mode;
  }
}

TEST(CudaPlan, ALayerChoosesAmongTheKernelsThatItIsGiven) {
  EXPECT_EQ(plan_of(12, 8, "serial").sparse_core->name, "few_heads");
  EXPECT_EQ(plan_of(12, 8, "serial", "sparse_core=many_heads").sparse_core->name, "many_heads");
  EXPECT_EQ(plan_of(12, 8, "serial", "sparse_core=many_heads|few_heads").sparse_core->name, "few_heads");
  EXPECT_THROW(plan_of(12, 8, "serial", "sparse_core=many_heads;value=merge"), Exception) << "no parts to merge";
  EXPECT_EQ(plan_of(12, 8, "serial").value->name, "merge");
  EXPECT_EQ(plan_of(96, 6, "serial").sparse_core->name, "few_heads");
  EXPECT_EQ(plan_of(96, 8, "serial").value->name, "fused");
  EXPECT_EQ(plan_of(12, 8, "front", "indexer=1-16:stock").indexer->name, "stock");
}

TEST(CudaPlan, RowsThatRunAlikeMayShareACapacity) {
  EXPECT_TRUE(run_alike(plan_of(12, 1, "front"), plan_of(12, 16, "front")));
  EXPECT_FALSE(run_alike(plan_of(12, 1, "front"), plan_of(12, 65, "front"))) << "no front accepts";
  EXPECT_TRUE(run_alike(plan_of(96, 1, "front"), plan_of(96, 64, "front")));
}

}  // namespace
}  // namespace dsacore
