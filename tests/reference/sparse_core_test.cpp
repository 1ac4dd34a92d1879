// Step 11 of the reference on rows that can be computed by hand.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "reference/fixture.h"

namespace dsacore::test {
namespace {

constexpr int kTopk = 4;

/// One query row of `heads` heads over a cache of 64 rows.
class Core {
 public:
  explicit Core(KvFormat format, int heads = 1)
      : layer(heads),
        bytes(size_t(64 * row_bytes(format)), std::byte(0xFF)),
        query_bytes(size_t(heads * kQueryRow * (has_fp8_query(format) ? 1 : 2))),
        rows(1, kTopk),
        valid(1),
        latent(1, heads, kLatent),
        lse(1, heads) {
    layer.model.config.kv_format = format;
    layer.model.config.topk = kTopk;
    query = {query_bytes.data(), heads, has_fp8_query(format) ? 1 : 2};
    rows.fill(-1);
    valid(0) = 0;
  }

  /// Latent values `a` at 0, `b` at 1 and 6 at 2, pe `p` at 0; the rest zero. With the 6 an e2m1 block has the scale 1,
  /// and small numbers are exact in every format.
  void set_row(int row, float a, float b, float p) {
    std::vector<float> c(kLatent, 0.0f);
    std::vector<BFloat16> pe(kPe, BFloat16{0});
    c[0] = a;
    c[1] = b;
    c[2] = 6;
    pe[0] = bf16(p);
    const KvFormat format = layer.model.config.kv_format;
    encode_kv(format, c.data(), pe.data(), 1, bytes.data() + row * row_bytes(format));
  }
  void set_query(int head, int i, float value) {
    if (query.element == 1) {
      query.e4m3(0, head)[i] = to_e4m3(value);
    } else {
      query.bf16(0, head)[i] = bf16(value);
    }
  }
  void select(std::vector<int32_t> physical) {
    rows.fill(-1);
    for (size_t i = 0; i < physical.size(); ++i) rows(0, i) = physical[i];
    valid(0) = int32_t(physical.size());
  }
  void run() {
    const KvFormat format = layer.model.config.kv_format;
    const KvCache kv{bytes.data(), format, 1, 64, 64, row_bytes(format)};
    run_stage(reference_backend().sparse_core,
              SparseCoreArgs{&layer.model, query, rows.view(), valid.view(), kv, latent.view(), lse.view()},
              shape_of(layer.model, 1, 1, 1, 64));
  }
  float value(int head, int i) const { return to_float(latent(0, head, i)); }

  TinyLayer layer;
  std::vector<std::byte> bytes;
  std::vector<std::byte> query_bytes;
  QueryRows query;
  Tensor<int32_t, 2> rows;
  Tensor<int32_t, 1> valid;
  Tensor<BFloat16, 3> latent;
  Tensor<float, 2> lse;
};

class ReferenceSparseCore : public testing::TestWithParam<KvFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, ReferenceSparseCore,
                         testing::Values(KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla),
                         [](const auto& format) { return std::string(name_of(format.param)); });

TEST_P(ReferenceSparseCore, NoRowsGiveZeroAndMinusInfinity) {
  Core core(GetParam(), 3);
  core.run();
  for (int head = 0; head < 3; ++head) {
    EXPECT_EQ(core.lse(0, head), -kInf);
    for (int i = 0; i < kLatent; ++i) ASSERT_EQ(core.latent(0, head, i).bits, 0) << head << " " << i;
  }
}

TEST_P(ReferenceSparseCore, OneRowIsItsValue) {
  Core core(GetParam());
  core.layer.model.config.softmax_scale = 0.5;
  core.set_row(17, 2, -3, 4);
  core.set_query(0, 0, 1);
  core.set_query(0, 1, 2);
  core.set_query(0, kLatent, 0.5f);
  core.select({17});
  core.run();
  EXPECT_EQ(core.value(0, 0), 2);
  EXPECT_EQ(core.value(0, 1), -3);
  EXPECT_EQ(core.value(0, 2), 6);
  EXPECT_EQ(core.value(0, 3), 0);
  EXPECT_EQ(core.lse(0, 0), 0.5f * (2 - 6 + 2));
}

TEST_P(ReferenceSparseCore, WeighsBySoftmax) {
  Core core(GetParam(), 2);
  core.set_row(3, 2, 0, 0);
  core.set_row(9, 0, 4, 1);
  core.set_row(20, 1, 0, 0);      // not selected
  core.set_query(0, kLatent, 0);  // head 0: equal weights
  core.set_query(1, kLatent, 1);  // head 1: row 9 has e times the weight
  core.select({3, 9});
  core.run();
  EXPECT_EQ(core.value(0, 0), 1);
  EXPECT_EQ(core.value(0, 1), 2);
  EXPECT_FLOAT_EQ(core.lse(0, 0), std::log(2.0f));
  const double e = std::exp(1.0);
  EXPECT_EQ(core.latent(0, 1, 0).bits, bf16(2 / (1 + e)).bits);
  EXPECT_EQ(core.latent(0, 1, 1).bits, bf16(4 * e / (1 + e)).bits);
  EXPECT_FLOAT_EQ(core.lse(0, 1), float(std::log(1 + e)));
}

TEST_P(ReferenceSparseCore, LargeLogitsDoNotOverflow) {
  Core core(GetParam());
  core.layer.model.config.softmax_scale = 100;
  core.set_row(0, 0, 1, 2);
  core.set_row(1, 0, 2, -2);
  core.set_query(0, kLatent, 8);
  core.select({0, 1});
  core.run();
  EXPECT_EQ(core.value(0, 1), 1);
  EXPECT_EQ(core.lse(0, 0), 1600);
}

TEST_P(ReferenceSparseCore, NanHarmsRowsThatSelectItAlone) {
  Core core(GetParam());
  core.set_row(0, 1, 0, 0);
  core.select({0});  // every other row of the cache is 0xFF, which is NaN in every format
  core.run();
  EXPECT_EQ(core.value(0, 0), 1);
  core.set_query(0, 5, 1);
  core.select({0, 7});
  core.run();
  EXPECT_TRUE(std::isnan(core.value(0, 0)));
  EXPECT_TRUE(std::isnan(core.lse(0, 0)));
}

TEST(ReferenceSparseCoreScales, QueryAndKeyScalesOfFp8) {
  Core core(KvFormat::kFp8);
  core.layer.model.q_scale = 0.25f;
  core.layer.model.k_scale = 2;
  core.set_row(0, 3, 0, 0);
  core.set_query(0, 0, 4);
  core.select({0});
  core.run();
  EXPECT_EQ(core.lse(0, 0), 0.25f * 2 * 4 * 3) << "both scales are in the logits";
  EXPECT_EQ(core.value(0, 0), 6) << "k_scale is in the latent, once";
}

TEST(ReferenceSparseCoreScales, KeyScaleMultipliesBeforeTheOnlyRounding) {
  Core core(KvFormat::kFp8);
  core.layer.model.k_scale = 1.0f + 0x1p-7f;
  core.set_row(0, 1, 0, 0);
  core.set_row(1, 1.125f, 0, 0);
  core.select({0, 1});
  core.run();
  const double want = 1.0625 * (1 + 0x1p-7);
  EXPECT_EQ(core.latent(0, 0, 0).bits, bf16(want).bits);
}

TEST(ReferenceSparseCoreScales, TileScalesNeedNotBePowersOfTwo) {
  Core core(KvFormat::kFp8DsMla);
  core.set_row(0, 1, 0, 0);
  const float scale = 1.0f / 3;
  std::memcpy(core.bytes.data() + KvFp8DsMla::kScalesAt, &scale, sizeof(float));
  core.bytes[0] = std::byte(to_e4m3(7.0f));
  core.set_query(0, 0, 3);
  core.select({0});
  core.run();
  EXPECT_EQ(core.lse(0, 0), float(3.0 * 7.0 * double(scale))) << "the product is not rounded to FP32 before the dot";
  EXPECT_EQ(core.latent(0, 0, 0).bits, bf16(7.0 * double(scale)).bits);
}

}  // namespace
}  // namespace dsacore::test
