// Step 12 of the reference: W_UV and the gate.
#include <cmath>

#include "reference/fixture.h"

namespace dsacore::test {
namespace {

constexpr int kHeads = 2;

/// Two rows of two heads; W_UV[h] takes latent element `2 * i + h` into `v_h[i]`.
class Value {
 public:
  Value() : layer(kHeads), latent(2, kHeads, kLatent), gate(2, kHeads * kValue), out(2, kHeads * kValue) {
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kValue; ++i) layer.kv_b(h, kNope + i, 2 * i + h) = bf16(1);
      for (int b = 0; b < 2; ++b) {
        for (int j = 0; j < kLatent; ++j) latent(b, h, j) = bf16(float(j) + 0.5f * float(h) - 100 * float(b));
      }
    }
    gate.fill(bf16(0));
  }
  void run(bool gated) {
    const View<const BFloat16, 3> w_uv =
        View<const BFloat16, 3>(layer.model.kv_b.row(0, kNope), kHeads, kValue, kLatent)
            .with_pitch(layer.model.kv_b.stride(0));
    run_stage(reference_backend().value,
              ValueArgs{&layer.model, latent.view(), w_uv, gated ? gate.view() : View<BFloat16, 2>(), out.view()},
              shape_of(layer.model, 2, 1, 1, 64));
  }
  float v(int b, int h, int i) const { return to_float(latent(b, h, 2 * i + h)); }

  TinyLayer layer;
  Tensor<BFloat16, 3> latent;
  Tensor<BFloat16, 2> gate, out;
};

TEST(ReferenceValue, ProjectsEachHeadByItsOwnWeights) {
  Value value;
  value.run(false);
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kValue; ++i)
        ASSERT_EQ(to_float(value.out(b, h * kValue + i)), value.v(b, h, i)) << b << h << i;
    }
  }
}

TEST(ReferenceValue, Gates) {
  Value value;
  value.gate(0, 1) = bf16(kInf);
  value.gate(0, 2) = bf16(-kInf);
  value.gate(0, 3) = bf16(1);
  value.gate(1, 4) = bf16(-200);
  value.run(true);
  EXPECT_EQ(to_float(value.out(0, 10)), to_float(bf16(double(value.v(0, 0, 10)) / 2))) << "sigmoid(0) is a half";
  EXPECT_EQ(to_float(value.out(0, 1)), value.v(0, 0, 1));
  EXPECT_EQ(to_float(value.out(0, 2)), 0);
  EXPECT_EQ(value.out(0, 3).bits, bf16(double(value.v(0, 0, 3)) / (1 + std::exp(-1.0))).bits);
  EXPECT_NEAR(to_float(value.out(1, 4)), 0, 1e-30);
}

TEST(ReferenceValue, RoundsBeforeTheGate) {
  Value value;
  // v = 1 + 2^-8 rounds to 1 before it is halved; one rounding at the end would give 0.501953125 or keep the bit.
  value.layer.kv_b(0, kNope, 2) = bf16(0x1p-8);
  for (int j = 0; j < kLatent; ++j) value.latent(0, 0, j) = bf16(j == 0 || j == 2 ? 1 : 0);
  value.run(true);
  EXPECT_EQ(to_float(value.out(0, 0)), 0.5f);
}

TEST(ReferenceValue, NanStaysInItsHead) {
  Value value;
  value.latent(0, 1, 7) = bf16(kNan);
  value.run(true);
  for (int i = 0; i < kValue; ++i) {
    EXPECT_TRUE(std::isnan(to_float(value.out(0, kValue + i))));
    EXPECT_FALSE(std::isnan(to_float(value.out(0, i))));
    EXPECT_FALSE(std::isnan(to_float(value.out(1, kValue + i))));
  }
}

TEST(ReferenceGate, IsTheGateOfTheValueStage) {
  Value value;
  for (int i = 0; i < kHeads * kValue; ++i) value.gate(1, i) = bf16(std::sin(i) * 4);
  value.run(true);
  Tensor<BFloat16, 2> v(2, kHeads * kValue), out(2, kHeads * kValue);
  for (int b = 0; b < 2; ++b) {
    for (int i = 0; i < kHeads * kValue; ++i) v(b, i) = bf16(value.v(b, i / kValue, i % kValue));
  }
  run_stage(reference_backend().gate, GateArgs{v.view(), value.gate.view(), out.view()}, {});
  for (int b = 0; b < 2; ++b) {
    for (int i = 0; i < kHeads * kValue; ++i) ASSERT_EQ(out(b, i).bits, value.out(b, i).bits) << b << " " << i;
  }
}

}  // namespace
}  // namespace dsacore::test
