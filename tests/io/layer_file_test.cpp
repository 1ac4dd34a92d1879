// Layer files: what is read back is what was written, and one test for every way in which a layer file can be wrong.
#include "io/layer_file.h"

#include <gtest/gtest.h>

#include <functional>

#include "io/io_support.h"

namespace dsacore::test {
namespace {

bool same_tensor(const TensorRef& a, const TensorRef& b) {
  if (a.type != b.type || a.rank != b.rank) return false;
  int64_t bytes = element_bytes(a.type);
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] != b.shape[i]) return false;
    bytes *= a.shape[i];
  }
  return std::memcmp(a.data, b.data, size_t(bytes)) == 0;
}

class LayerFileOf : public ::testing::TestWithParam<KvFormat> {};

TEST_P(LayerFileOf, ReadsBackWhatWasWritten) {
  const TempFolder folder;
  CaseOptions options = small_case();
  options.kv_format = GetParam();
  options.index_format = IndexFormat::kMxfp4;
  const Case c = make_case(options);
  write_layer_file(folder.file("layer"), c.config, c.weights);
  LayerFile first = read_layer_file(folder.file("layer"));
  const LayerFile layer = std::move(first);  // views must outlive a move
  EXPECT_EQ(layer.config.kv_format, c.config.kv_format);
  EXPECT_EQ(layer.config.index_format, c.config.index_format);
  EXPECT_EQ(layer.config.topk, c.config.topk);
  EXPECT_EQ(layer.config.eps, c.config.eps);
  EXPECT_EQ(layer.config.softmax_scale, c.config.softmax_scale);
  EXPECT_EQ(layer.config.index_softmax_scale, c.config.index_softmax_scale);
  EXPECT_EQ(layer.config.index_head_scale, c.config.index_head_scale);
  EXPECT_EQ(layer.config.q_scale_inv, c.config.q_scale_inv);
  EXPECT_EQ(layer.config.k_scale_inv, c.config.k_scale_inv);
  EXPECT_EQ(layer.sizes.q_lora, 128);
  EXPECT_EQ(layer.sizes.heads, 2);
  EXPECT_EQ(layer.sizes.index_heads, 8);
  EXPECT_TRUE(same_tensor(layer.weights.q_a_layernorm, c.weights.q_a_layernorm));
  EXPECT_TRUE(same_tensor(layer.weights.kv_a_layernorm, c.weights.kv_a_layernorm));
  EXPECT_TRUE(same_tensor(layer.weights.q_b_proj, c.weights.q_b_proj));
  EXPECT_TRUE(same_tensor(layer.weights.kv_b_proj, c.weights.kv_b_proj));
  EXPECT_TRUE(same_tensor(layer.weights.wq_b, c.weights.wq_b));
  EXPECT_TRUE(same_tensor(layer.weights.k_norm_weight, c.weights.k_norm_weight));
  EXPECT_TRUE(same_tensor(layer.weights.k_norm_bias, c.weights.k_norm_bias));
  EXPECT_TRUE(layer.unknown.tensors.empty());
  EXPECT_TRUE(layer.unknown.metadata.empty());
}

INSTANTIATE_TEST_SUITE_P(Formats, LayerFileOf,
                         ::testing::Values(KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

TEST(LayerFile, TheBiasMayBeAbsentAndTheNormBf16) {
  const TempFolder folder;
  CaseOptions options = small_case();
  options.no_k_bias = true;
  options.k_norm_bf16 = true;
  const Case c = make_case(options);
  write_layer_file(folder.file("layer"), c.config, c.weights);
  const LayerFile layer = read_layer_file(folder.file("layer"));
  EXPECT_EQ(layer.weights.k_norm_bias.data, nullptr);
  EXPECT_EQ(layer.weights.k_norm_weight.type, ElementType::kBf16);
}

TEST(LayerFile, IgnoresWhatItDoesNotKnowAndSaysSo) {
  const TempFolder folder;
  const Case c = make_case(small_case());
  write_layer_file(folder.file("layer"), c.config, c.weights);
  FileParts parts(folder.file("layer"));
  parts.metadata["author"] = "somebody";
  parts.tensors.push_back({"rotary", parts.at("kv_a_layernorm.weight")});
  // Scales that this format does not need are known, and their type does not matter.
  parts.tensors.push_back({"q_scale_inv", parts.at("kv_a_layernorm.weight")});
  parts.write(folder.file("more"));
  const LayerFile layer = read_layer_file(folder.file("more"));
  EXPECT_EQ(layer.unknown.tensors, std::vector<std::string>{"rotary"});
  EXPECT_EQ(layer.unknown.metadata, std::vector<std::string>{"author"});
}

TEST(LayerFile, AnUnknownTypeIsAnErrorWhereTheTensorIsNeeded) {
  const TempFolder folder;
  const Case c = make_case(small_case());
  write_layer_file(folder.file("layer"), c.config, c.weights);
  std::string bytes = read_bytes(folder.file("layer"));
  const size_t at = bytes.find("\"indexer.wq_b.weight\":{\"dtype\":\"BF16\"");
  ASSERT_NE(at, std::string::npos);
  bytes.replace(bytes.find("BF16", at), 4, "Q4_0");
  write_bytes(folder.file("quantised"), bytes);
  const Error error = thrown_by([&] { read_layer_file(folder.file("quantised")); });
  EXPECT_EQ(error.code, ErrorCode::kRefused);
  EXPECT_EQ(error.argument, folder.file("quantised") + ": indexer.wq_b.weight");
  EXPECT_EQ(error.value, "Q4_0 [1024, 128]");
  EXPECT_EQ(error.allowed, "must be BF16 of 2 axes");
}

// ---- one wrong thing each ----

struct Wrong {
  const char* name;
  std::function<void(FileParts&)> change;
  ErrorCode code;
  std::string argument;
  std::string value;
};

std::function<void(FileParts&)> set(std::string key, std::string value) {
  return [=](FileParts& parts) { parts.metadata[key] = value; };
}
std::function<void(FileParts&)> drop_key(std::string key) {
  return [=](FileParts& parts) { parts.metadata.erase(key); };
}
std::function<void(FileParts&)> drop(std::string name) {
  return [=](FileParts& parts) { parts.at(name).data = nullptr; };
}
std::function<void(FileParts&)> retype(std::string name, ElementType type) {
  return [=](FileParts& parts) { parts.retype(name, type); };
}
std::function<void(FileParts&)> reshape(std::string name, std::vector<int64_t> shape) {
  return [=](FileParts& parts) { parts.reshape(name, shape); };
}

std::vector<Wrong> wrong_layers() {
  constexpr ErrorCode kMalformed = ErrorCode::kMalformedFile;
  constexpr ErrorCode kRefused = ErrorCode::kRefused;
  std::vector<Wrong> wrong = {
      {"NoFormat", drop_key("format"), kMalformed, "format", "absent"},
      {"OtherFormat", set("format", "dsacore.step"), kRefused, "format", "dsacore.step"},
      {"NoVersion", drop_key("version"), kMalformed, "version", "absent"},
      {"LaterVersion", set("version", "2"), kRefused, "version", "2"},
      {"VersionWithZero", set("version", "1.0"), kRefused, "version", "1.0"},
      {"NoKvFormat", drop_key("kv_format"), kMalformed, "kv_format", "absent"},
      {"KvFormat", set("kv_format", "fp16"), kRefused, "kv_format", "fp16"},
      {"NoIndexFormat", drop_key("index_format"), kMalformed, "index_format", "absent"},
      {"IndexFormat", set("index_format", "fp8_ds_mla"), kRefused, "index_format", "fp8_ds_mla"},
      {"NoTopk", drop_key("topk"), kMalformed, "topk", "absent"},
      {"TopkZero", set("topk", "0"), kRefused, "topk", "0"},
      {"TopkLarge", set("topk", "2049"), kRefused, "topk", "2049"},
      {"TopkHuge", set("topk", "99999999999999999999"), kMalformed, "topk", "\"99999999999999999999\""},
      {"TopkEmpty", set("topk", ""), kMalformed, "topk", "\"\""},
      {"TopkSpace", set("topk", " 32"), kMalformed, "topk", "\" 32\""},
      {"TopkPlus", set("topk", "+32"), kMalformed, "topk", "\"+32\""},
      {"TopkHex", set("topk", "0x20"), kMalformed, "topk", "\"0x20\""},
      {"TopkFraction", set("topk", "32.0"), kMalformed, "topk", "\"32.0\""},
      {"EpsText", set("eps", "1e-6f"), kMalformed, "eps", "\"1e-6f\""},
      {"EpsNan", set("eps", "nan"), kMalformed, "eps", "\"nan\""},
      {"EpsOverflow", set("eps", "1e999"), kMalformed, "eps", "\"1e999\""},
      {"ScaleInfinite", set("softmax_scale", "inf"), kMalformed, "softmax_scale", "\"inf\""},
      {"ScaleComma", set("index_softmax_scale", "0,5"), kMalformed, "index_softmax_scale", "\"0,5\""},
      {"NoHeadScale", drop_key("index_head_scale"), kMalformed, "index_head_scale", "absent"},
      {"NormType", retype("q_a_layernorm.weight", ElementType::kU8), kRefused, "q_a_layernorm.weight", "U8 [128]"},
      {"NormAxes", reshape("q_a_layernorm.weight", {1, 128}), kRefused, "q_a_layernorm.weight", "BF16 [1, 128]"},
      {"NormEmpty", reshape("q_a_layernorm.weight", {0}), kRefused, "q_a_layernorm.weight", "BF16 [0]"},
      {"KvNorm", reshape("kv_a_layernorm.weight", {511}), kRefused, "kv_a_layernorm.weight", "BF16 [511]"},
      {"HeadsFraction", reshape("q_b_proj.weight", {383, 128}), kRefused, "q_b_proj.weight", "BF16 [383, 128]"},
      {"HeadsNone", reshape("q_b_proj.weight", {0, 128}), kRefused, "q_b_proj.weight", "BF16 [0, 128]"},
      {"QLoraDisagrees", reshape("q_b_proj.weight", {384, 127}), kRefused, "q_b_proj.weight", "BF16 [384, 127]"},
      {"HeadsDisagree", reshape("kv_b_proj.weight", {256, 512}), kRefused, "kv_b_proj.weight", "BF16 [256, 512]"},
      {"LatentDisagrees", reshape("kv_b_proj.weight", {512, 511}), kRefused, "kv_b_proj.weight", "BF16 [512, 511]"},
      {"WqBType", retype("indexer.wq_b.weight", ElementType::kU8), kRefused, "indexer.wq_b.weight", "U8 [1024, 128]"},
      {"WqBAxes", reshape("indexer.wq_b.weight", {8, 128, 128}), kRefused, "indexer.wq_b.weight", "BF16 [8, 128, 128]"},
      {"IndexHeadsFraction", reshape("indexer.wq_b.weight", {1023, 128}), kRefused, "indexer.wq_b.weight",
       "BF16 [1023, 128]"},
      {"WqBColumns", reshape("indexer.wq_b.weight", {1024, 64}), kRefused, "indexer.wq_b.weight", "BF16 [1024, 64]"},
      {"KNorm", reshape("indexer.k_norm.weight", {127}), kRefused, "indexer.k_norm.weight", "F32 [127]"},
      {"KNormType", retype("indexer.k_norm.weight", ElementType::kI32), kRefused, "indexer.k_norm.weight", "I32 [128]"},
      {"KBias", reshape("indexer.k_norm.bias", {127}), kRefused, "indexer.k_norm.bias", "F32 [127]"},
      {"NoQScale", drop("q_scale_inv"), kMalformed, "q_scale_inv", "absent"},
      {"NoKScale", drop("k_scale_inv"), kMalformed, "k_scale_inv", "absent"},
      {"ScaleType", retype("q_scale_inv", ElementType::kI32), kRefused, "q_scale_inv", "I32 [1]"},
      {"ScaleAxes", reshape("q_scale_inv", {}), kRefused, "q_scale_inv", "F32 []"},
      {"ScaleEmpty", reshape("k_scale_inv", {0}), kRefused, "k_scale_inv", "F32 [0]"},
  };
  for (const char* name : {"q_a_layernorm.weight", "kv_a_layernorm.weight", "q_b_proj.weight", "kv_b_proj.weight",
                           "indexer.wq_b.weight", "indexer.k_norm.weight"}) {
    wrong.push_back({name, drop(name), kMalformed, name, "absent"});
  }
  return wrong;
}

class WrongLayer : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongLayer, IsRefusedByName) {
  const TempFolder folder;
  CaseOptions options = small_case();
  options.kv_format = KvFormat::kFp8;
  const Case c = make_case(options);
  write_layer_file(folder.file("layer"), c.config, c.weights);
  FileParts parts(folder.file("layer"));
  GetParam().change(parts);
  const std::string path = folder.file("wrong");
  parts.write(path);
  const Error error = thrown_by([&] { read_layer_file(path); });
  EXPECT_EQ(error.code, GetParam().code) << error.message();
  EXPECT_EQ(error.argument, path + ": " + GetParam().argument);
  EXPECT_EQ(error.value, GetParam().value);
  EXPECT_FALSE(error.allowed.empty());
}

std::string test_name(const ::testing::TestParamInfo<Wrong>& tested) {
  std::string name = tested.param.name;
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Each, WrongLayer, ::testing::ValuesIn(wrong_layers()), test_name);

}  // namespace
}  // namespace dsacore::test
