// Options of generated cases: honoured, or refused by the name that the command line has for them.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "io/generate_support.h"

namespace dsacore::test {
namespace {

std::vector<int32_t> lengths_of(const CaseOptions& options) {
  const Case c = make_case(options);
  return {c.step.seq_lens.data(), c.step.seq_lens.data() + c.step.seq_lens.extent(0)};
}

TEST(GenerateOptions, ContextIsANumberAListOrARange) {
  CaseOptions options = small_case();
  options.batch = 5;
  options.context = "77";
  EXPECT_EQ(lengths_of(options), (std::vector<int32_t>(5, 77)));
  options.context = "1,200,30";
  EXPECT_EQ(lengths_of(options), (std::vector<int32_t>{1, 200, 30, 1, 200}));
  options.context = "9-9";
  EXPECT_EQ(lengths_of(options), (std::vector<int32_t>(5, 9)));
}

TEST(GenerateOptions, ARangeUsesBothEndsAndIsLogUniform) {
  CaseOptions options = small_case();
  options.batch = 256;
  options.context = "2-512";
  int below_32 = 0;
  const std::vector<int32_t> lengths = lengths_of(options);
  for (const int32_t length : lengths) {
    EXPECT_GE(length, 2);
    EXPECT_LE(length, 512);
    below_32 += length < 32;
  }
  EXPECT_TRUE(std::count(lengths.begin(), lengths.end(), 2) > 0);
  EXPECT_TRUE(std::count(lengths.begin(), lengths.end(), 512) > 0);
  EXPECT_NEAR(below_32, 128, 32) << "half of the octaves lie below 32";
  options.batch = 1;
  EXPECT_EQ(lengths_of(options), std::vector<int32_t>{512}) << "one request takes the long end";
}

TEST(GenerateOptions, TheLayerHasTheShapesAskedFor) {
  CaseOptions options = small_case();
  options.heads = 3;
  options.index_heads = 16;
  options.q_lora = 384;
  options.topk = 99;
  options.kv_format = KvFormat::kNvfp4DsMla;
  options.index_format = IndexFormat::kMxfp4;
  options.k_norm_bf16 = true;
  options.no_k_bias = true;
  const Case c = make_case(options);
  EXPECT_EQ(c.sizes.heads, 3);
  EXPECT_EQ(c.weights.q_a_layernorm.shape[0], 384);
  EXPECT_EQ(c.weights.kv_a_layernorm.shape[0], 512);
  EXPECT_EQ(c.weights.q_b_proj.shape[0], 3 * 192);
  EXPECT_EQ(c.weights.q_b_proj.shape[1], 384);
  EXPECT_EQ(c.weights.kv_b_proj.shape[0], 3 * 256);
  EXPECT_EQ(c.weights.kv_b_proj.shape[1], 512);
  EXPECT_EQ(c.weights.wq_b.shape[0], 16 * 128);
  EXPECT_EQ(c.weights.wq_b.shape[1], 384);
  EXPECT_EQ(c.weights.k_norm_weight.type, ElementType::kBf16);
  EXPECT_EQ(c.weights.k_norm_bias.data, nullptr);
  EXPECT_EQ(c.config.topk, 99);
  EXPECT_EQ(c.config.softmax_scale, 1 / std::sqrt(192.0));
  EXPECT_EQ(c.config.index_softmax_scale, 1 / std::sqrt(128.0));
  EXPECT_EQ(c.config.index_head_scale, 0.25);
  EXPECT_GE(c.config.q_scale_inv, 4.0f);
  EXPECT_LE(c.config.q_scale_inv, 12.0f);
  EXPECT_EQ(c.config.k_scale_inv, 1.0f) << "not of this format";
  EXPECT_EQ(c.kv.row_bytes, 352);
  EXPECT_EQ(c.index.row_bytes, 68);
}

TEST(GenerateOptions, EveryRequestMayBePadding) {
  CaseOptions options = small_case();
  options.pad_requests = 4;
  options.spare_pages = 0;
  const Case c = make_case(options);
  EXPECT_EQ(c.kv.pages, 1);
  EXPECT_EQ(lengths_of(options), std::vector<int32_t>(4, 0));
  for (int b = 0; b < 4; ++b) EXPECT_EQ(c.step.slots(b), -1);
}

// ---- refused ----

struct Refused {
  const char* name;
  std::function<void(CaseOptions&)> change;
  const char* argument;
  const char* value;
};

template <class T>
std::function<void(CaseOptions&)> set(T CaseOptions::*field, T value) {
  return [=](CaseOptions& options) { options.*field = value; };
}

std::vector<Refused> refusals() {
  std::vector<Refused> all = {
      {"NoHeads", set(&CaseOptions::heads, 0), "--heads", "0"},
      {"ManyHeads", set(&CaseOptions::heads, 129), "--heads", "129"},
      {"NoBatch", set(&CaseOptions::batch, 0), "--batch", "0"},
      {"LargeBatch", set(&CaseOptions::batch, 257), "--batch", "257"},
      {"NoQ", set(&CaseOptions::q, 0), "--q", "0"},
      {"LargeQ", set(&CaseOptions::q, 9), "--q", "9"},
      {"BatchNotOfQ", set(&CaseOptions::q, 3), "--batch", "4"},
      {"NegativePadding", set(&CaseOptions::pad_requests, -1), "--pad-requests", "-1"},
      {"TooMuchPadding", set(&CaseOptions::pad_requests, 5), "--pad-requests", "5"},
      {"Page", set(&CaseOptions::page, 96), "--page", "96"},
      {"NoPage", set(&CaseOptions::page, 0), "--page", "0"},
      {"StrideBelowPage", set<int64_t>(&CaseOptions::stride_rows, 32), "--stride-rows", "32"},
      {"StrideNegative", set<int64_t>(&CaseOptions::stride_rows, -64), "--stride-rows", "-64"},
      {"StrideHuge", set<int64_t>(&CaseOptions::stride_rows, int64_t(1) << 31), "--stride-rows", "2147483648"},
      {"CacheHuge", set<int64_t>(&CaseOptions::stride_rows, (int64_t(1) << 31) - 1), "--context", "70,3,64,130"},
      {"NoTopk", set(&CaseOptions::topk, 0), "--topk", "0"},
      {"LargeTopk", set(&CaseOptions::topk, 2049), "--topk", "2049"},
      {"FewIndexHeads", set(&CaseOptions::index_heads, 7), "--index-heads", "7"},
      {"ManyIndexHeads", set(&CaseOptions::index_heads, 65), "--index-heads", "65"},
      {"QLoraOdd", set(&CaseOptions::q_lora, 100), "--q-lora", "100"},
      {"QLoraLarge", set(&CaseOptions::q_lora, 2176), "--q-lora", "2176"},
      {"PitchNegative", set(&CaseOptions::pitch_pad, -1), "--pitch-pad", "-1"},
      {"SparesNegative", set(&CaseOptions::spare_pages, -1), "--spare-pages", "-1"},
      {"Kind", set(&CaseOptions::adversarial, std::vector<std::string>{"ties", "odd"}), "--adversarial", "odd"},
  };
  const char* contexts[] = {"",     "0", "-1",  "1-", "-",       "5-4", "1-2-3", "1,,2",
                            "1,2,", "x", "1.5", " 1", "1048577", "0-5", "1,0",   "99999999999999999999"};
  static std::vector<std::string> names;
  names.reserve(std::size(contexts));
  for (const char* context : contexts) {
    names.push_back("Context" + std::to_string(names.size()));
    all.push_back({names.back().c_str(), set(&CaseOptions::context, std::string(context)), "--context", context});
  }
  return all;
}

class RefusedOptions : public ::testing::TestWithParam<Refused> {};

TEST_P(RefusedOptions, AreNamed) {
  CaseOptions options = small_case();
  GetParam().change(options);
  const Error error = thrown_by([&] { make_case(options); });
  EXPECT_EQ(error.code, ErrorCode::kRefused);
  EXPECT_EQ(error.argument, GetParam().argument);
  EXPECT_EQ(error.value, GetParam().value);
  EXPECT_FALSE(error.allowed.empty());
}

INSTANTIATE_TEST_SUITE_P(Each, RefusedOptions, ::testing::ValuesIn(refusals()),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace dsacore::test
