// Traces of replays on a device: every kernel under its stage, layer and queue, and the same bits. Skipped where
// CUPTI's library is not found.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "driver/trace_case.h"
#include "dsacore/status.h"
#include "io/generate.h"

namespace dsacore::test {
namespace {

CaseOptions shape() {
  CaseOptions options;
  options.batch = 1;
  options.context = "8192";
  return options;
}

class CudaTrace : public ::testing::TestWithParam<const char*> {};

TEST_P(CudaTrace, ShowsEveryStageOnItsQueue) {
  const Case made = make_case(shape());
  TraceOptions options;
  options.run.backend = BackendKind::kCuda;
  options.run.overlap = GetParam();
  options.layers = 3;
  options.repeat = 4;
  TraceResult result;
  try {
    result = trace_case(inputs_of(made), options);
  } catch (const Exception& e) {
    if (e.error().argument == "CUPTI") GTEST_SKIP() << e.what();
    throw;
  }
  EXPECT_TRUE(result.changed_layers.empty());
  const bool forks = std::string(GetParam()) == "fork" || std::string(GetParam()) == "front";
  ASSERT_EQ(result.trace.rows.size(), forks ? 2u : 1u);
  std::map<std::string, int> of_stage;
  bool overlap = false;
  for (const TraceRow& row : result.trace.rows) {
    const TraceSlice* before = nullptr;
    for (const TraceSlice& slice : row.slices) {
      ++of_stage[slice.stage];
      EXPECT_EQ(slice.stage == "query" && forks, row.name == "side stream") << slice.name;
      EXPECT_LT(slice.begin_ns, slice.end_ns);
      if (before != nullptr) {
        overlap |= slice.begin_ns < before->end_ns;
        EXPECT_GE(std::pair(slice.run, slice.layer), std::pair(before->run, before->layer)) << "in their order";
      }
      before = &slice;
    }
  }
  EXPECT_TRUE(overlap) << "programmatic dependent launch";
  EXPECT_EQ(of_stage.count(""), 0u) << "every kernel is of a stage";
  for (const char* stage : {"query", "index_projection", "indexer", "sparse_core", "value"}) {
    EXPECT_GE(of_stage[stage], 12) << stage;
    EXPECT_EQ(of_stage[stage] % 12, 0) << stage;
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, CudaTrace, ::testing::Values("serial", "front", "fork", "late", "late_front"));

}  // namespace
}  // namespace dsacore::test
