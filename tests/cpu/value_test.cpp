// The cpu backend's value and gate stages (step 12) against the reference backend within spec 9 and against the plain
// formula; their bits over threads, live rows and broken neighbours. On every target that the machine runs.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "cpu/agreement.h"
#include "support/targets.h"

namespace dsacore::test {
namespace {

/// Heads of one rank or, as for `proj` partials, of all ranks; the latent, W_UV and the gates are random.
struct ValueCase {
  ValueCase(int heads_, int rows_, uint32_t seed, bool gated = true) : heads(heads_), rows(rows_) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<BFloat16>& to, int64_t n, float scale) {
      to.resize(size_t(n));
      for (BFloat16& x : to) x = to_bf16(normal(random) * scale);
    };
    fill(latent, int64_t(rows) * heads * kLatent, 1.0f);
    fill(w_uv, int64_t(heads) * kValue * kLatent, 0.05f);
    if (gated) fill(gate, int64_t(rows) * gate_pitch(), 2.0f);
  }
  int64_t width() const { return int64_t(heads) * kValue; }
  int64_t gate_pitch() const { return width() + 7; }  // the gate lies in the projected row

  struct Output {
    std::vector<BFloat16> values;
    View<BFloat16, 2> view;
  };
  Output run(const Backend& backend, int threads_count = 2, int live = -1) const {
    const int n = live < 0 ? rows : live;
    Output out{std::vector<BFloat16>(size_t(n) * size_t(width()), BFloat16{0xFFFF}), {}};
    out.view = View<BFloat16, 2>(out.values.data(), n, width());
    ValueArgs args{nullptr,
                   View<const BFloat16, 3>(latent.data(), n, heads, kLatent),
                   View<const BFloat16, 3>(w_uv.data(), heads, kValue, kLatent),
                   {},
                   out.view};
    if (!gate.empty()) args.gate = View<const BFloat16, 2>(gate.data(), n, width()).with_pitch(gate_pitch());
    ShapeKey shape{};
    shape.sizes.heads = heads;
    shape.rows = rows;
    Threads threads(threads_count);
    for (const Kernel<ValueArgs>& kernel : backend.value) {
      if (!kernel.accepts(shape).ok) continue;
      Buffer<std::byte> scratch;
      const int64_t bytes = kernel.scratch_bytes(shape, threads_count);
      scratch.poison(bytes);
      kernel.run(args, {{scratch.data(), size_t(bytes)}, &threads, backend.target_data});
      return out;
    }
    ADD_FAILURE() << "no kernel accepts " << rows << " rows";
    return out;
  }

  int heads, rows;
  std::vector<BFloat16> latent, w_uv, gate;
};

std::vector<int64_t> all_rows(int rows) {
  std::vector<int64_t> all;
  for (int row = 0; row < rows; ++row) all.push_back(row);
  return all;
}

::testing::AssertionResult out_agrees(const View<BFloat16, 2>& got, const View<BFloat16, 2>& want) {
  const auto value = [](const View<BFloat16, 2>& v) {
    return [v](int64_t row, int64_t i) { return double(to_float(v(row, i))); };
  };
  using Value = std::function<double(int64_t, int64_t)>;
  return norm_agrees(Value(value(got)), Value(value(want)), all_rows(int(want.extent(0))), want.extent(1), kBoundOut,
                     "out");
}

TEST(Value, AgreesWithReference) {
  for (const auto& [heads, rows] :
       {std::pair{1, 1}, {6, 3}, {12, 8}, {96, 3}, {12, 16}, {12, 17}, {6, 64}, {96, 18}, {2, 150}}) {
    for (const bool gated : {true, false}) {
      const ValueCase c(heads, rows, uint32_t(heads + rows), gated);
      const ValueCase::Output want = c.run(reference_backend());
      for (const std::string_view target : tested_targets()) {
        SCOPED_TRACE(::testing::Message() << target << ", " << heads << " heads, " << rows << " rows, gate " << gated);
        const ValueCase::Output got = c.run(*cpu_backend(target));
        EXPECT_TRUE(out_agrees(got.view, want.view));
        // FP32 sums of these sizes leave all but a few of a thousand roundings as they are.
        int64_t near = 0;
        for (size_t i = 0; i < want.values.size(); ++i) near += got.values[i].bits != want.values[i].bits;
        EXPECT_LE(near, 4 + int64_t(want.values.size()) / 200);
      }
    }
  }
}

TEST(Value, ReadsTheLayersOwnWuvInPlace) {
  CaseOptions options;
  options.heads = 3;
  options.batch = 5;
  options.q_lora = 128;
  options.context = "1-100";
  options.pitch_pad = 3;
  const Case c = make_case(options);
  StageRunner want(c, reference_backend());
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < want.latent.size(); ++i) want.latent.data()[i] = to_bf16(normal(random));
  want.run(want.backend().value, want.value_args());
  for (const std::string_view target : tested_targets()) {
    SCOPED_TRACE(target);
    StageRunner got(c, *cpu_backend(target));
    copy(want.latent, got.latent);
    got.run(got.backend().value, got.value_args());
    EXPECT_TRUE(out_agrees(got.out, want.out));
  }
}

TEST(Value, EmptyRowsAreZero) {
  ValueCase c(6, 20, 4);
  std::fill_n(c.latent.begin() + 3 * 6 * kLatent, 6 * kLatent, BFloat16{});
  for (const std::string_view target : tested_targets()) {
    const ValueCase::Output got = c.run(*cpu_backend(target));
    for (int64_t i = 0; i < c.width(); ++i) ASSERT_EQ(to_float(got.view(3, i)), 0.0f) << target << ", column " << i;
  }
}

TEST(Value, SameBitsWithAnyThreadsAndLiveRows) {
  for (const auto& [heads, rows] : {std::pair{15, 12}, {13, 130}}) {
    const ValueCase c(heads, rows, 6);
    for (const std::string_view target : tested_targets()) {
      SCOPED_TRACE(target);
      const Backend& backend = *cpu_backend(target);
      const ValueCase::Output one = c.run(backend, 1);
      for (const int threads : {2, 3, 7}) {
        const ValueCase::Output other = c.run(backend, threads);
        EXPECT_TRUE(same_bytes(other.values.data(), one.values.data(), int64_t(one.values.size()) * 2, "out"))
            << threads;
      }
      for (const int live : {1, 2, 7, rows - 1}) {
        const ValueCase::Output fewer = c.run(backend, 2, live);
        EXPECT_TRUE(same_bytes(fewer.values.data(), one.values.data(), int64_t(fewer.values.size()) * 2, "out"))
            << live;
      }
    }
  }
}

TEST(Value, BrokenRowHarmsItself) {
  for (const int rows : {9, 40}) {
    for (const uint16_t bits : {0x7FC0, 0xFF80, 0x7F7F}) {
      const ValueCase c(6, rows, 7);
      ValueCase spoilt = c;
      const int broken = rows / 2;
      for (int i = 0; i < 6 * kLatent; i += 5) spoilt.latent[size_t(broken * 6 * kLatent + i)] = {bits};
      spoilt.gate[size_t(broken * c.gate_pitch() + 3)] = {bits};
      for (const std::string_view target : tested_targets()) {
        SCOPED_TRACE(target);
        const ValueCase::Output want = c.run(*cpu_backend(target));
        ValueCase::Output got = spoilt.run(*cpu_backend(target));
        std::copy_n(want.view.row(broken), c.width(), got.view.row(broken));
        EXPECT_TRUE(same_bytes(got.values.data(), want.values.data(), int64_t(want.values.size()) * 2, "out"));
      }
    }
  }
}

/// Runs the gate alone on rows of `n` columns.
std::vector<BFloat16> run_gate(const Backend& backend, const std::vector<BFloat16>& v,
                               const std::vector<BFloat16>& gate, int n) {
  const int rows = int(v.size()) / n;
  std::vector<BFloat16> out(v.size(), BFloat16{0xFFFF});
  Threads threads(2);
  const GateArgs args{View<const BFloat16, 2>(v.data(), rows, n), View<const BFloat16, 2>(gate.data(), rows, n),
                      View<BFloat16, 2>(out.data(), rows, n)};
  backend.gate[0].run(args, {{}, &threads, backend.target_data});
  return out;
}

TEST(Gate, EveryGateValue) {
  // Every BF16 number as gate, with v from a few magnitudes.
  std::vector<BFloat16> v, gate;
  for (const float value : {1.0f, -0.7f, 300.0f, 1e-20f}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      v.push_back(to_bf16(value));
      gate.push_back({uint16_t(bits)});
    }
  }
  for (const std::string_view target : tested_targets()) {
    const std::vector<BFloat16> out = run_gate(*cpu_backend(target), v, gate, 128);
    int64_t near = 0;
    for (size_t i = 0; i < v.size(); ++i) {
      const double g = double(to_float(gate[i]));
      if (std::isnan(g)) {
        ASSERT_TRUE(is_nan(to_float(out[i]))) << target << ", gate bits " << gate[i].bits;
        continue;
      }
      const BFloat16 want = to_bf16(double(to_float(v[i])) * (1.0 / (1.0 + std::exp(-g))));
      const int gap = std::abs(bf16_order(out[i]) - bf16_order(want));
      ASSERT_LE(gap, 1) << target << ", v " << to_float(v[i]) << ", gate " << g << ": " << to_float(out[i])
                        << ", must be " << to_float(want);
      near += gap;
    }
    EXPECT_LE(near, int64_t(v.size()) / 1000) << target;
  }
}

TEST(Gate, AgreesWithReferenceAndKeepsNanInItsRow) {
  const int n = 12 * kValue;
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  std::vector<BFloat16> v(size_t(5 * n)), gate(size_t(5 * n));
  for (BFloat16& x : v) x = to_bf16(normal(random));
  for (BFloat16& x : gate) x = to_bf16(normal(random) * 2);
  const std::vector<BFloat16> want = run_gate(reference_backend(), v, gate, n);
  for (const std::string_view target : tested_targets()) {
    SCOPED_TRACE(target);
    const std::vector<BFloat16> got = run_gate(*cpu_backend(target), v, gate, n);
    int64_t near = 0;
    for (size_t i = 0; i < want.size(); ++i) near += std::abs(bf16_order(got[i]) - bf16_order(want[i]));
    EXPECT_LE(near, int64_t(want.size()) / 1000);
    std::vector<BFloat16> spoilt = v;
    for (int i = 0; i < n; ++i) spoilt[size_t(2 * n + i)] = {0x7FC0};
    std::vector<BFloat16> other = run_gate(*cpu_backend(target), spoilt, gate, n);
    for (int i = 0; i < n; ++i) EXPECT_TRUE(is_nan(to_float(other[size_t(2 * n + i)])));
    std::copy_n(got.begin() + 2 * n, n, other.begin() + 2 * n);
    EXPECT_TRUE(same_bytes(other.data(), got.data(), int64_t(got.size()) * 2, "out"));
  }
}

}  // namespace
}  // namespace dsacore::test
