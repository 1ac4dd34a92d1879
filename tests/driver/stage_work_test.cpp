// The bytes and FLOPs that floors are counted with, against numbers worked out by hand.
#include "driver/stage_work.h"

#include <gtest/gtest.h>

#include "io/generate.h"

namespace dsacore {
namespace {

/// 2 heads, 8 index heads, q_lora 128, topk 32; requests of 10 and 100 keys.
Case small() {
  CaseOptions options;
  options.heads = 2;
  options.batch = 2;
  options.context = "10,100";
  options.topk = 32;
  options.index_heads = 8;
  options.q_lora = 128;
  return make_case(options);
}

TEST(StageWork, CountsAMultiplyAndAnAddAsTwo) {
  const Case c = small();
  const Inputs in = inputs_of(c);
  EXPECT_EQ(stage_work(StageId::kQuery, in).flops, 2.0 * 2 * 2 * (192 * 128 + 128 * 512));
  EXPECT_EQ(stage_work(StageId::kIndexProjection, in).flops, 2.0 * 2 * 8 * 128 * 128);
  EXPECT_EQ(stage_work(StageId::kIndexer, in).flops, 2.0 * 100 * 8 * 128) << "10 keys are selected without a score";
  EXPECT_EQ(stage_work(StageId::kSparseCore, in).flops, 2.0 * (10 + 32) * 2 * (576 + 512));
  EXPECT_EQ(stage_work(StageId::kValueProjection, in).flops, 2.0 * 2 * 2 * 512 * 128);
}

TEST(StageWork, CountsCacheRowsAndWeights) {
  const Case c = small();
  const Inputs in = inputs_of(c);
  EXPECT_GT(stage_work(StageId::kQuery, in).bytes, 2.0 * 2 * (192 * 128 + 128 * 512));
  EXPECT_GT(stage_work(StageId::kIndexer, in).bytes, 100.0 * 132);
  EXPECT_LT(stage_work(StageId::kIndexer, in).bytes, 100.0 * 132 + 4096);
  EXPECT_EQ(stage_work(StageId::kSparseCore, in).bytes, (10.0 + 32) * 656 + 2 * 2 * 576 * 2 + 2 * 2 * 512 * 2);
}

TEST(StageWork, FloorIsTheLongerOfMovingAndComputing) {
  EXPECT_EQ(floor_seconds({100, 10}, {10, 10}), 10);
  EXPECT_EQ(floor_seconds({10, 100}, {10, 10}), 10);
  EXPECT_EQ(floor_seconds({10, 100}, {10, 0}), 1) << "a rate that is not known bounds nothing";
}

}  // namespace
}  // namespace dsacore
