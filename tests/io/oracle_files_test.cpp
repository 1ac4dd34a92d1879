// Files that the NumPy oracle wrote: read here and written again they have the same bytes.
#include <gtest/gtest.h>

#include "io/io_support.h"
#include "io/layer_file.h"
#include "io/out_file.h"
#include "io/step_file.h"

namespace dsacore::test {
namespace {

class OracleCase : public ::testing::TestWithParam<const char*> {
 protected:
  std::string path(const char* file) const {
    return std::string(DSACORE_ORACLE_DIR) + "/cases/" + GetParam() + "/" + file + ".safetensors";
  }
  TempFolder folder_;
};

TEST_P(OracleCase, LayerFileHasTheSameBytes) {
  const LayerFile layer = read_layer_file(path("layer"));
  EXPECT_TRUE(layer.unknown.tensors.empty());
  EXPECT_TRUE(layer.unknown.metadata.empty());
  write_layer_file(folder_.file("layer"), layer.config, layer.weights);
  EXPECT_TRUE(same_bytes(read_bytes(folder_.file("layer")), read_bytes(path("layer"))));
}

TEST_P(OracleCase, StepFileHasTheSameBytes) {
  const LayerFile layer = read_layer_file(path("layer"));
  StepFile step = read_step_file(path("step"));
  check_agreement(layer, step);
  EXPECT_TRUE(step.unknown.tensors.empty());
  EXPECT_TRUE(step.unknown.metadata.empty());
  write_step_file(folder_.file("step"), step.step, step.kv, step.index);
  EXPECT_TRUE(same_bytes(read_bytes(folder_.file("step")), read_bytes(path("step"))));
}

TEST_P(OracleCase, OutputFileHasTheSameBytes) {
  const OutFile out = read_out_file(path("expected"));
  EXPECT_TRUE(out.unknown.tensors.empty());
  for (const auto& [name, view] : out.tensors.named()) EXPECT_FALSE(view->empty()) << name;
  write_out_file(folder_.file("out"), out.tensors);
  EXPECT_TRUE(same_bytes(read_bytes(folder_.file("out")), read_bytes(path("expected"))));
}

TEST_P(OracleCase, CachesKeepTheShapeOfTheStep) {
  const StepFile step = read_step_file(path("step"));
  const OutFile out = read_out_file(path("expected"));
  const TensorView kv = cache_tensor(step.kv, step.flat);
  ASSERT_EQ(kv.rank, out.tensors.kv_cache.rank);
  for (int i = 0; i < kv.rank; ++i) EXPECT_EQ(kv.shape[i], out.tensors.kv_cache.shape[i]);
  const TensorView index = cache_tensor(step.index);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(index.shape[i], out.tensors.index_cache.shape[i]);
}

INSTANTIATE_TEST_SUITE_P(Each, OracleCase,
                         ::testing::Values("1-fp8_ds_mla-fp8", "2-fp8-mxfp4", "3-nvfp4_ds_mla-fp8",
                                           "4-fp8_ds_mla-mxfp4", "5-q3-padded", "6-ties"),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return "Case" + name;
                         });

}  // namespace
}  // namespace dsacore::test
