// PlacedInputs: copies of inputs in a backend's memory, here the host's: same values, own bytes, caches brought back.
#include "driver/placed_inputs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "driver/run_case.h"
#include "io/generate.h"
#include "support/layer.h"

namespace dsacore {
namespace {

Case paged() {
  CaseOptions options;
  options.heads = 2;
  options.batch = 4;
  options.q = 2;
  options.context = "40,150";
  options.q_lora = 128;
  options.index_heads = 8;
  options.topk = 16;
  options.page = 128;
  options.stride_rows = 256;
  options.pitch_pad = 8;
  options.index_table = true;
  return make_case(options);
}

TEST(PlacedInputs, GiveWhatTheInputsGive) {
  const Case here = paged(), there = paged();
  const Inputs host = inputs_of(there);
  const PlacedInputs placed(host, host_memory());
  EXPECT_NE(placed.inputs().kv.data, host.kv.data);
  EXPECT_NE(placed.inputs().weights.kv_b_proj.data, host.weights.kv_b_proj.data);
  EXPECT_EQ(placed.inputs().step.projected.stride(0), host.step.projected.stride(0));
  EXPECT_EQ(placed.inputs().step.block_table.extent(1), host.step.block_table.extent(1));
  EXPECT_GE(placed_bytes(host), cache_bytes(host.kv) + cache_bytes(host.index));

  const RunResult expected = run_case(inputs_of(here), {});
  const RunResult got = run_case(placed.inputs(), {});
  ASSERT_EQ(got.outputs.out.size(), expected.outputs.out.size());
  EXPECT_EQ(std::memcmp(got.outputs.out.data(), expected.outputs.out.data(), got.outputs.out.size() * 2), 0);
  placed.fetch_caches(host);
  EXPECT_TRUE(std::equal(host.kv.data, host.kv.data + cache_bytes(host.kv), here.kv.data)) << "the new rows came back";
  EXPECT_TRUE(std::equal(host.index.data, host.index.data + cache_bytes(host.index), here.index.data));
}

}  // namespace
}  // namespace dsacore
