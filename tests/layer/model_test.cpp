#include "layer/model.h"

#include "support/layer.h"

namespace dsacore {
namespace {

Case small_case() {
  CaseOptions options;
  options.heads = 2;
  options.batch = 2;
  options.context = "40";
  options.q_lora = 128;
  options.index_heads = 8;
  options.topk = 16;
  options.kv_format = KvFormat::kFp8;
  return make_case(options);
}

TEST(Model, HoldsWeightsAndScales) {
  const Case c = small_case();
  const OwnedModel owned = make_model(c.config, c.weights);
  const LayerModel& m = owned.model;
  EXPECT_EQ(m.sizes.heads, 2);
  EXPECT_EQ(m.sizes.q_lora, 128);
  EXPECT_EQ(m.sizes.index_heads, 8);
  EXPECT_EQ(m.q_scale, 1.0f / c.config.q_scale_inv);
  EXPECT_EQ(m.k_scale, 1.0f / c.config.k_scale_inv);
  EXPECT_EQ(m.attention_scale(), float(c.config.softmax_scale * double(m.q_scale) * double(m.k_scale)));
  EXPECT_EQ(m.w_uv().row(1), m.kv_b.row(1, kNope));
  EXPECT_EQ(m.k_norm_bias(5), static_cast<const float*>(c.weights.k_norm_bias.data)[5]);
}

TEST(Model, AMissingBiasIsZero) {
  Case c = small_case();
  c.weights.k_norm_bias = {};
  const OwnedModel owned = make_model(c.config, c.weights);
  for (int i = 0; i < kIndexDim; ++i) EXPECT_EQ(owned.model.k_norm_bias(i), 0.0f);
}

struct Refusal {
  const char* argument;
  void (*spoil)(Case&);
};

class ModelRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(ModelRefuses, NamingTheArgument) {
  Case c = small_case();
  GetParam().spoil(c);
  const Error error = test::error_of([&] { make_model(c.config, c.weights); });
  EXPECT_EQ(error.code, ErrorCode::kRefused);
  EXPECT_EQ(error.argument, GetParam().argument);
  EXPECT_FALSE(error.value.empty());
  EXPECT_FALSE(error.allowed.empty());
}

INSTANTIATE_TEST_SUITE_P(
    Spec10, ModelRefuses,
    ::testing::Values(Refusal{"topk", [](Case& c) { c.config.topk = 0; }},
                      Refusal{"topk", [](Case& c) { c.config.topk = 2049; }},
                      Refusal{"eps", [](Case& c) { c.config.eps = -1; }},
                      Refusal{"eps", [](Case& c) { c.config.eps = std::nan(""); }},
                      Refusal{"softmax_scale", [](Case& c) { c.config.softmax_scale = 0; }},
                      Refusal{"index_softmax_scale", [](Case& c) { c.config.index_softmax_scale = std::nan(""); }},
                      Refusal{"index_head_scale", [](Case& c) { c.config.index_head_scale = -1; }},
                      Refusal{"q_scale_inv", [](Case& c) { c.config.q_scale_inv = 0; }},
                      Refusal{"k_scale_inv", [](Case& c) { c.config.k_scale_inv = -2; }},
                      Refusal{"indexer.wq_b.weight", [](Case& c) { c.weights.wq_b.type = ElementType::kU8; }},
                      Refusal{"indexer.wq_b.weight", [](Case& c) { c.weights.wq_b.shape[0] = 7 * kIndexDim; }},
                      Refusal{"indexer.wq_b.weight", [](Case& c) { c.weights.wq_b.shape[0] = 65 * kIndexDim; }},
                      Refusal{"indexer.wq_b.weight", [](Case& c) { c.weights.wq_b.shape[0] += 1; }},
                      Refusal{"indexer.wq_b.weight", [](Case& c) { c.weights.wq_b.data = nullptr; }},
                      Refusal{"q_b_proj.weight", [](Case& c) { c.weights.q_b_proj.shape[1] = 256; }},
                      Refusal{"q_b_proj.weight", [](Case& c) { c.weights.q_b_proj.shape[0] = 129 * kHeadQuery; }},
                      Refusal{"q_b_proj.weight", [](Case& c) { c.weights.q_b_proj.shape[0] = 0; }},
                      Refusal{"kv_b_proj.weight", [](Case& c) { c.weights.kv_b_proj.shape[0] -= 1; }},
                      Refusal{"kv_b_proj.weight", [](Case& c) { c.weights.kv_b_proj.type = ElementType::kF32; }},
                      Refusal{"q_a_layernorm.weight", [](Case& c) { c.weights.q_a_layernorm.rank = 2; }},
                      Refusal{"q_lora", [](Case& c) { c.weights.q_a_layernorm.shape[0] = 100; }},
                      Refusal{"q_lora", [](Case& c) { c.weights.q_a_layernorm.shape[0] = 2176; }},
                      Refusal{"kv_a_layernorm.weight", [](Case& c) { c.weights.kv_a_layernorm.shape[0] = 511; }},
                      Refusal{"indexer.k_norm.weight", [](Case& c) { c.weights.k_norm_weight.data = nullptr; }},
                      Refusal{"indexer.k_norm.weight",
                              [](Case& c) { c.weights.k_norm_weight.type = ElementType::kI32; }},
                      Refusal{"indexer.k_norm.bias", [](Case& c) { c.weights.k_norm_bias.shape[0] = 64; }}));

}  // namespace
}  // namespace dsacore
