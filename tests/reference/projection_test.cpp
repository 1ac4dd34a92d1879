// Steps 1 to 8 of the reference on weights and rows set by hand.
#include <cmath>
#include <cstring>

#include "reference/fixture.h"

namespace dsacore::test {
namespace {

/// Two projected rows of a tiny layer, two caches, and the outputs of both query stages.
class Projection {
 public:
  explicit Projection(KvFormat format = KvFormat::kFp8DsMla, IndexFormat index_format = IndexFormat::kFp8)
      : layer(2),
        width(layer.model.sizes.width()),
        projected(2, width + 8),
        slots(2),
        index_slots(2),
        q_c(2, 128),
        query_bytes(size_t(2 * 2 * kQueryRow * (has_fp8_query(format) ? 1 : 2)), std::byte(0xFF)),
        index_query(2, 8, kIndexDim),
        head_weights(2, 8),
        kv_bytes(size_t(3 * 128 * row_bytes(format)), std::byte(0xEE)),
        index_bytes(size_t(4 * 64 * row_bytes(index_format)), std::byte(0xEE)) {
    layer.model.config.kv_format = format;
    layer.model.config.index_format = index_format;
    query = {query_bytes.data(), 2, has_fp8_query(format) ? 1 : 2};
    kv = {kv_bytes.data(), format, 2, 128, 192, row_bytes(format)};
    index = {index_bytes.data(), index_format, 4, row_bytes(index_format)};
    slots.fill(-1);
    index_slots.fill(-1);
    for (int b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < width; ++i) projected(b, i) = bf16(0);
      for (int i = 0; i < 128; ++i) projected(b, i) = bf16(i % 2 == 0 ? 2 : -2);  // normalised: +-1
    }
  }
  View<const BFloat16, 2> live() const {
    return View<const BFloat16, 2>(projected.view().data(), 2, width).with_pitch(width + 8);
  }
  void run_query() {
    run_stage(reference_backend().query, QueryArgs{&layer.model, live(), slots.view(), kv, q_c.view(), query},
              shape_of(layer.model, 2, 1, 1, 64));
  }
  void run_index() {
    run_stage(reference_backend().index_projection,
              IndexProjectionArgs{&layer.model, live(), q_c.view(), index_slots.view(), index, index_query.view(),
                                  head_weights.view()},
              shape_of(layer.model, 2, 1, 1, 64));
  }

  TinyLayer layer;
  int64_t width;
  Tensor<BFloat16, 2> projected;
  Tensor<int64_t, 1> slots, index_slots;
  Tensor<BFloat16, 2> q_c;
  std::vector<std::byte> query_bytes;
  QueryRows query;
  Tensor<uint8_t, 3> index_query;
  Tensor<float, 2> head_weights;
  std::vector<std::byte> kv_bytes, index_bytes;
  KvCache kv;
  IndexCache index;
};

TEST(ReferenceQuery, NormalisesQC) {
  Projection p;
  p.layer.q_norm(3) = bf16(0.75f);
  p.layer.model.config.eps = 12;  // mean of squares is 4, so the factor is 1 / sqrt(16)
  p.run_query();
  EXPECT_EQ(to_float(p.q_c(0, 0)), 0.5f);
  EXPECT_EQ(to_float(p.q_c(1, 2)), 0.5f);
  EXPECT_EQ(to_float(p.q_c(0, 1)), -0.5f);
  EXPECT_EQ(to_float(p.q_c(0, 3)), -0.375f);
}

TEST(ReferenceQuery, ProjectsNopeThroughWUkAndKeepsPe) {
  Projection p;
  // Head 1: nope row 5 is q_c[0] * 3, pe row 2 is q_c[1] + q_c[3] * 0.5; W_UK[5] puts it at latent 7 with weight 2.
  p.layer.w_qb(kHeadQuery + 5, 0) = bf16(3);
  p.layer.w_qb(kHeadQuery + kNope + 2, 1) = bf16(1);
  p.layer.w_qb(kHeadQuery + kNope + 2, 3) = bf16(0.5f);
  p.layer.kv_b(1, 5, 7) = bf16(2);
  p.layer.kv_b(1, kNope + 5, 7) = bf16(64);  // W_UV, which this stage must not touch
  p.run_query();
  for (int i = 0; i < kQueryRow; ++i) {
    EXPECT_EQ(to_float(p.query.bf16(0, 0)[i]), 0) << i;
    EXPECT_EQ(to_float(p.query.bf16(1, 1)[i]), i == 7 ? 6.0f : i == kLatent + 2 ? -1.5f : 0.0f) << i;
  }
}

TEST(ReferenceQuery, RoundsXBeforeWUk) {
  Projection p;
  p.layer.w_qb(0, 0) = bf16(1);
  p.layer.w_qb(0, 2) = bf16(0x1p-8);  // x = 1 + 2^-8 is a midpoint and rounds to 1
  p.layer.kv_b(0, 0, 0) = bf16(1);
  p.layer.w_qb(1, 4) = bf16(1);
  p.layer.kv_b(0, 1, 0) = bf16(0x1p-7);
  p.run_query();
  EXPECT_EQ(to_float(p.query.bf16(0, 0)[0]), 1.0f + 0x1p-7f);
}

TEST(ReferenceQuery, QuantisesForFp8Caches) {
  for (const KvFormat format : {KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
    Projection p(format);
    p.layer.model.config.q_scale_inv = 100;
    p.layer.w_qb(kNope, 0) = bf16(3);
    p.layer.w_qb(kNope + 1, 0) = bf16(-5);
    p.layer.w_qb(kNope + 2, 0) = bf16(0x1p-20f);
    p.run_query();
    EXPECT_EQ(p.query.e4m3(0, 0)[kLatent], to_e4m3(300.0f));
    EXPECT_EQ(p.query.e4m3(0, 0)[kLatent + 1], 0xFE) << "-500 saturates";
    EXPECT_EQ(p.query.e4m3(1, 0)[kLatent + 2], 0);
  }
}

TEST(ReferenceQuery, WritesTheCacheRowOfItsSlotAlone) {
  for (const KvFormat format : {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
    Projection p(format);
    p.layer.model.config.k_scale_inv = 2;
    p.layer.kv_norm(9) = bf16(5);
    const int64_t at = p.layer.model.sizes.kv_a_at();
    for (int i = 0; i < kLatent; ++i) p.projected(1, at + i) = bf16(i % 3 == 0 ? -4 : 4);
    for (int i = 0; i < kPe; ++i) p.projected(1, at + kLatent + i) = bf16(i - 20);
    p.slots(1) = 128 + 70;  // page 1, offset 70: physical row 192 + 70
    p.run_query();
    std::vector<float> c(kLatent);
    std::vector<BFloat16> pe(kPe);
    for (int i = 0; i < kLatent; ++i) c[size_t(i)] = (i % 3 == 0 ? -1.0f : 1.0f) * (i == 9 ? 5 : 1);
    for (int i = 0; i < kPe; ++i) pe[size_t(i)] = bf16(i - 20);
    std::vector<std::byte> want(p.kv_bytes.size(), std::byte(0xEE));
    encode_kv(format, c.data(), pe.data(), 2, want.data() + (192 + 70) * row_bytes(format));
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_EQ(int(p.kv_bytes[i]), int(want[i])) << name_of(format) << " byte " << i;
  }
}

TEST(ReferenceIndexProjection, QuantisesWithAPowerOfTwoScalePerHead) {
  Projection p;
  p.run_query();  // q_c = +1, -1, ...
  p.layer.w_iq(2 * kIndexDim + 0, 0) = bf16(600);
  p.layer.w_iq(2 * kIndexDim + 1, 1) = bf16(3);
  p.layer.w_iq(3 * kIndexDim + 7, 0) = bf16(448);
  const int64_t wv = p.layer.model.sizes.wv_at();
  for (int h = 0; h < 8; ++h) p.projected(0, wv + h) = bf16(h + 1);
  p.run_index();
  EXPECT_EQ(p.index_query(0, 2, 0), to_e4m3(300.0f)) << "600 / 448 rounds up to a scale of 2";
  EXPECT_EQ(p.index_query(0, 2, 1), to_e4m3(-1.5f));
  EXPECT_EQ(p.head_weights(0, 2), 3 * 2.0f);
  EXPECT_EQ(p.index_query(0, 3, 7), to_e4m3(448.0f)) << "exactly 448 keeps the scale 1";
  EXPECT_EQ(p.head_weights(0, 3), 4.0f);
  EXPECT_EQ(p.index_query(0, 0, 5), 0);
  EXPECT_EQ(p.head_weights(0, 0), 0x1p-42f) << "a zero head has the scale of 1e-10 / 448";
}

TEST(ReferenceIndexProjection, HeadWeightsMultiplyLeftToRightInFp32) {
  Projection p;
  p.run_query();
  p.layer.model.config.index_softmax_scale = 1 / std::sqrt(128.0);
  p.layer.model.config.index_head_scale = 1 / std::sqrt(8.0);
  const int64_t wv = p.layer.model.sizes.wv_at();
  p.layer.w_iq(0, 0) = bf16(1);
  for (int b = 0; b < 2; ++b) p.projected(b, wv) = bf16(b == 0 ? 1.7f : -0.3f);
  p.run_index();
  for (int b = 0; b < 2; ++b) {
    const float s = 0x1p-8f;  // 1 / 448 rounded up
    float w = to_float(p.projected(b, wv)) * s;
    w = w * float(1 / std::sqrt(128.0));
    w = w * float(1 / std::sqrt(8.0));
    EXPECT_EQ(p.head_weights(b, 0), w) << b;
  }
}

/// wk alternates around a mean of 10 with a variance of 9.
void expect_key(IndexFormat format, double eps, float size) {
  Projection p(KvFormat::kFp8DsMla, format);
  p.run_query();
  p.layer.model.config.eps = eps;
  const int64_t wk = p.layer.model.sizes.wk_at();
  for (int i = 0; i < kIndexDim; ++i) p.projected(0, wk + i) = bf16(10 + (i % 2 == 0 ? 3 : -3));
  p.layer.k_norm_weight(4) = 1.5f;
  p.layer.k_norm_bias(5) = 0.25f;
  p.layer.k_norm_weight(6) = 1.1875f;  // between two codes, so that the least error of the norm shows
  p.index_slots(0) = 2 * 64 + 33;
  p.run_index();
  std::vector<float> key(kIndexDim);
  for (int i = 0; i < kIndexDim; ++i) key[size_t(i)] = i % 2 == 0 ? size : -size;
  key[4] *= 1.5f;
  key[5] += 0.25f;
  key[6] *= 1.1875f;
  std::vector<std::byte> want(p.index_bytes.size(), std::byte(0xEE));
  encode_index(format, key.data(), 33, want.data() + 2 * 64 * row_bytes(format));
  for (size_t i = 0; i < want.size(); ++i)
    ASSERT_EQ(int(p.index_bytes[i]), int(want[i])) << name_of(format) << " byte " << i;
}

TEST(ReferenceIndexProjection, WritesTheNormalisedKeyOfItsSlotAlone) {
  for (const IndexFormat format : {IndexFormat::kFp8, IndexFormat::kMxfp4}) {
    ASSERT_NO_FATAL_FAILURE(expect_key(format, 0, 1));
    ASSERT_NO_FATAL_FAILURE(expect_key(format, 7, 0.75f)) << "3 / sqrt(9 + 7)";
  }
}

TEST(ReferenceProjection, NanHarmsItsRowAlone) {
  Projection p;
  p.projected(0, 5) = bf16(kNan);
  p.layer.w_qb(kNope, 0) = bf16(1);
  p.layer.w_iq(0, 0) = bf16(1);
  p.run_query();
  p.run_index();
  EXPECT_TRUE(std::isnan(to_float(p.query.bf16(0, 0)[kLatent])));
  EXPECT_EQ(p.index_query(0, 0, 0), kE4m3Nan);
  EXPECT_EQ(to_float(p.query.bf16(1, 0)[kLatent]), 1);
  EXPECT_EQ(e4m3_to_float(p.index_query(1, 0, 0)), 256) << "1 / 2^-8";
}

}  // namespace
}  // namespace dsacore::test
