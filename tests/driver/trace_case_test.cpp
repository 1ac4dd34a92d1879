// trace_case on the host: rows of layers, stages and workers that fit into each other, and the same bits.
#include "driver/trace_case.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "io/generate.h"

namespace dsacore {
namespace {

TEST(TraceCase, ShowsLayersStagesAndWorkers) {
  CaseOptions shape;
  shape.heads = 4;
  shape.batch = 4;
  shape.context = "5,150,90,33";
  shape.topk = 24;
  shape.index_heads = 8;
  shape.q_lora = 128;
  const Case made = make_case(shape);
  TraceOptions options;
  options.run.threads = 2;
  options.layers = 2;
  options.repeat = 3;
  const TraceResult result = trace_case(inputs_of(made), options);
  EXPECT_TRUE(result.changed_layers.empty());
  EXPECT_GT(result.plain_seconds, 0);
  EXPECT_GT(result.traced_seconds, 0);
  ASSERT_EQ(result.trace.rows.size(), 4u);
  const std::vector<TraceSlice>& layers = result.trace.rows[0].slices;
  const std::vector<TraceSlice>& stages = result.trace.rows[1].slices;
  ASSERT_EQ(layers.size(), 6u);
  ASSERT_EQ(stages.size(), 30u);
  for (size_t i = 0; i < stages.size(); ++i) {
    const TraceSlice& layer = layers[i / 5];
    EXPECT_EQ(stages[i].layer, int(i / 5 % 2));
    EXPECT_EQ(stages[i].run, int(i / 10));
    EXPECT_EQ(stages[i].stage, stages[i % 5].stage);
    EXPECT_GE(stages[i].begin_ns, layer.begin_ns);
    EXPECT_LE(stages[i].end_ns, layer.end_ns);
    if (i > 0) {
      EXPECT_GE(stages[i].begin_ns, stages[i - 1].end_ns);
    }
  }
  for (size_t row : {2, 3}) {
    for (const TraceSlice& busy : result.trace.rows[row].slices) {
      EXPECT_LT(busy.begin_ns, busy.end_ns);
      EXPECT_TRUE(std::any_of(stages.begin(), stages.end(), [&](const TraceSlice& stage) {
        return stage.stage == busy.stage && stage.begin_ns <= busy.begin_ns && busy.end_ns <= stage.end_ns;
      })) << busy.stage;
    }
  }
  ASSERT_EQ(result.parts.size(), 5u);
  EXPECT_EQ(result.parts[0].stage, "query");
  EXPECT_EQ(result.parts[0].seconds.size(), 6u);
  EXPECT_EQ(result.parts[4].stage, "value");
}

}  // namespace
}  // namespace dsacore
