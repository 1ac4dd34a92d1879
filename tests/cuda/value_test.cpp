// The cuda backend's value and gate stages (step 12) and the padding, against the reference backend within spec 9; the
// bits of a row over batch sizes and broken neighbours; rows that must be zero; times. Tests named Small are those that
// run under the sanitizers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <thread>

#include "backends/cuda/kernels.h"
#include "cpu/agreement.h"
#include "cuda/device_stages.h"
#include "cuda/sparse_core_case.h"
#include "cuda/timing.h"

namespace dsacore::test {
namespace {

constexpr int64_t kGatePad = 7;  // the gate lies in a projected row of odd width

std::vector<BFloat16> normal_values(int64_t n, float scale, uint32_t seed) {
  std::vector<BFloat16> values(static_cast<size_t>(n));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  // A million draws, repeated from elsewhere: enough variety, and quick.
  const size_t drawn = std::min<size_t>(values.size(), 1000003);
  for (size_t i = 0; i < drawn; ++i) values[i] = to_bf16(normal(random) * scale);
  for (size_t i = drawn; i < values.size(); ++i) values[i] = values[i - drawn];
  return values;
}

/// The value kernels that read latents; sparse_core_test.cpp has those that merge what a sparse core leaves.
std::vector<Kernel<ValueArgs>> latent_kernels() {
  std::vector<Kernel<ValueArgs>> kernels;
  for (const Kernel<ValueArgs>& kernel : cuda::value_kernels()) {
    if (!kernel.parts) kernels.push_back(kernel);
  }
  return kernels;
}

/// A device copy of host values.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host) : buffer_(int64_t(host.size() * sizeof(T))) {
    cuda::check(cudaMemcpy(buffer_.data(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }

 private:
  DeviceBuffer buffer_;
};

/// Host inputs of a step 12, and how a kernel is run on the first `n` of its rows.
struct ValueCase {
  ValueCase(int heads_, int rows_, uint32_t seed, bool gated = true) : heads(heads_), rows(rows_) {
    latent = normal_values(int64_t(rows) * heads * kLatent, 1.0f, seed);
    w_uv = normal_values(int64_t(heads) * kValue * kLatent, 0.05f, seed + 1);
    if (gated) gate = normal_values(int64_t(rows) * gate_pitch(), 2.0f, seed + 2);
  }
  int64_t width() const { return int64_t(heads) * kValue; }
  int64_t gate_pitch() const { return width() + kGatePad; }
  ShapeKey shape() const {
    ShapeKey key{};
    key.sizes.heads = heads;
    key.rows = rows;
    key.q = q;
    return key;
  }

  std::vector<BFloat16> reference() const {
    std::vector<BFloat16> out(size_t(rows) * size_t(width()), BFloat16{0xFFFF});
    ValueArgs args{nullptr,
                   View<const BFloat16, 3>(latent.data(), rows, heads, kLatent),
                   View<const BFloat16, 3>(w_uv.data(), heads, kValue, kLatent),
                   {},
                   View<BFloat16, 2>(out.data(), rows, width())};
    if (!gate.empty()) args.gate = View<const BFloat16, 2>(gate.data(), rows, width()).with_pitch(gate_pitch());
    Threads threads(int(std::thread::hardware_concurrency()));
    reference_backend().value[0].run(args, {{}, &threads, nullptr});
    return out;
  }

  int heads, rows, q = 1;
  std::vector<BFloat16> latent, w_uv, gate;
  std::vector<int32_t> seq_lens;  // empty: not given
};

/// A case on the device.
class ValueOnDevice {
 public:
  explicit ValueOnDevice(const ValueCase& c)
      : case_(c),
        latent_(c.latent),
        w_uv_(c.w_uv),
        gate_(c.gate),
        seq_lens_(c.seq_lens),
        out_((c.rows * c.width() + 1) * 2) {}

  /// Runs a kernel on the first `n` rows; `shift` elements move `out` off its alignment.
  std::vector<BFloat16> run(const Kernel<ValueArgs>& kernel, int n, int shift = 0) {
    const int64_t width = case_.width();
    out_.poison();
    const View<BFloat16, 2> out(reinterpret_cast<BFloat16*>(out_.data()) + shift, n, width);
    ValueArgs args{nullptr,
                   View<const BFloat16, 3>(latent_.data(), n, case_.heads, kLatent),
                   View<const BFloat16, 3>(w_uv_.data(), case_.heads, kValue, kLatent),
                   {},
                   out};
    if (!case_.gate.empty()) args.gate = View<const BFloat16, 2>(gate_.data(), n, width).with_pitch(case_.gate_pitch());
    if (!case_.seq_lens.empty()) {
      args.seq_lens = View<const int32_t, 1>(seq_lens_.data(), int64_t(case_.seq_lens.size()));
      args.q = case_.q;
    }
    const ShapeKey shape = case_.shape();
    EXPECT_TRUE(kernel.accepts(shape).ok);
    if (kernel.prepare != nullptr) kernel.prepare(shape);
    const int64_t bytes = kernel.scratch_bytes(shape, 1);
    DeviceBuffer scratch(bytes);
    kernel.run(args, {{scratch.data(), size_t(bytes)}, nullptr, nullptr, {}});
    sync();
    std::vector<BFloat16> host(size_t(n) * size_t(width));
    cuda::check(cudaMemcpy(host.data(), out.data(), host.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }

 private:
  const ValueCase& case_;
  OnDevice<BFloat16> latent_, w_uv_, gate_;
  OnDevice<int32_t> seq_lens_;
  DeviceBuffer out_;
};

std::vector<int64_t> all_rows(int rows) {
  std::vector<int64_t> all;
  for (int row = 0; row < rows; ++row) all.push_back(row);
  return all;
}

::testing::AssertionResult out_agrees(const std::vector<BFloat16>& got, const std::vector<BFloat16>& want, int rows,
                                      int64_t width) {
  const auto value = [width](const std::vector<BFloat16>& v) {
    return [&v, width](int64_t row, int64_t i) { return double(to_float(v[size_t(row * width + i)])); };
  };
  using Value = std::function<double(int64_t, int64_t)>;
  const auto verdict = norm_agrees(Value(value(got)), Value(value(want)), all_rows(rows), width, kBoundOut, "out");
  if (!verdict) {
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::abs(bf16_order(got[i]) - bf16_order(want[i])) > 8) {
        return ::testing::AssertionFailure()
               << verdict.message() << "; first far: row " << int64_t(i) / width << ", head "
               << int64_t(i) % width / kValue << ", column " << i % kValue << ": " << to_float(got[i]) << " (bits "
               << got[i].bits << "), must be " << to_float(want[i]);
      }
    }
  }
  return verdict;
}

/// Both kernels, at every count of rows, against the reference; a row's bits must be those of the largest count.
void check_heads(int heads, const std::vector<int>& row_counts, bool gated) {
  const ValueCase c(heads, row_counts.back(), uint32_t(heads), gated);
  const std::vector<BFloat16> want = c.reference();
  ValueOnDevice device(c);
  for (const Kernel<ValueArgs>& kernel : latent_kernels()) {
    const std::vector<BFloat16> most = device.run(kernel, c.rows);
    for (const int rows : row_counts) {
      SCOPED_TRACE(::testing::Message() << kernel.name << ", " << heads << " heads, " << rows << " rows, gate "
                                        << gated);
      const std::vector<BFloat16> got = device.run(kernel, rows);
      const int64_t bytes = int64_t(got.size()) * 2;
      ASSERT_TRUE(out_agrees(got, want, rows, c.width()));
      EXPECT_TRUE(same_bytes(got.data(), most.data(), bytes, "out beside fewer rows"));
      EXPECT_TRUE(same_bytes(device.run(kernel, rows).data(), got.data(), bytes, "out of a second run"));
      int64_t near = 0;  // FP32 sums of these sizes leave all but a few of a thousand roundings as they are
      for (size_t i = 0; i < got.size(); ++i) near += got[i].bits != want[i].bits;
      EXPECT_LE(near, 4 + int64_t(got.size()) / 100);
    }
  }
}

TEST(Value, SmallAgreesWithReference) {
  for (const bool gated : {true, false}) {
    check_heads(1, {1, 8, 9}, gated);
    check_heads(3, {2, 17}, gated);
  }
  check_heads(5, {67}, true);
}

TEST(Value, AgreesWithReference) {
  for (const int heads : {1, 5, 6, 12, 24, 48, 96, 128}) check_heads(heads, {1, 2, 3, 8, 17, 64, 100, 256}, true);
  check_heads(96, {1, 8, 40}, false);
}

TEST(Value, SmallZeroRowsWhateverTheyHold) {
  for (const int q : {1, 3}) {
    ValueCase c(3, 27, 4);
    c.q = q;
    const ValueCase clean = c;
    // Requests 1 and 4 are empty, and the last two are not given.
    c.seq_lens.assign(size_t(27 / q - 2), 100);
    c.seq_lens[1] = c.seq_lens[4] = 0;
    const auto dead = [&](int row) { return row / q == 1 || row / q == 4 || row / q >= int(c.seq_lens.size()); };
    for (int row = 0; row < c.rows; ++row) {
      if (!dead(row)) continue;
      std::fill_n(c.latent.begin() + int64_t(row) * 3 * kLatent, 3 * kLatent, BFloat16{0x7FC0});
      std::fill_n(c.gate.begin() + row * c.gate_pitch(), c.width(), BFloat16{0xFFC1});
    }
    ValueOnDevice device(c), clean_device(clean);
    for (const Kernel<ValueArgs>& kernel : latent_kernels()) {
      SCOPED_TRACE(kernel.name);
      const std::vector<BFloat16> got = device.run(kernel, c.rows);
      std::vector<BFloat16> want = clean_device.run(kernel, c.rows);
      for (int row = 0; row < c.rows; ++row) {
        if (dead(row)) std::fill_n(want.begin() + row * c.width(), c.width(), BFloat16{0});
      }
      EXPECT_TRUE(same_bytes(got.data(), want.data(), int64_t(got.size()) * 2, "out"));
    }
  }
}

TEST(Value, SmallOutOffItsAlignment) {
  const ValueCase c(2, 9, 5);
  ValueOnDevice device(c);
  for (const Kernel<ValueArgs>& kernel : latent_kernels()) {
    const std::vector<BFloat16> straight = device.run(kernel, c.rows);
    const std::vector<BFloat16> shifted = device.run(kernel, c.rows, 1);
    EXPECT_TRUE(same_bytes(shifted.data(), straight.data(), int64_t(straight.size()) * 2, kernel.name.data()));
  }
}

TEST(Value, SmallBrokenRowHarmsItself) {
  for (const uint16_t bits : {0x7FC0, 0xFF80, 0x7F7F}) {
    const ValueCase c(2, 20, 7);
    ValueCase spoilt = c;
    const int broken = 11;
    for (int i = 0; i < 2 * kLatent; i += 5) spoilt.latent[size_t(broken * 2 * kLatent + i)] = {bits};
    spoilt.gate[size_t(broken * c.gate_pitch() + 3)] = {bits};
    ValueOnDevice device(c), spoilt_device(spoilt);
    for (const Kernel<ValueArgs>& kernel : latent_kernels()) {
      const std::vector<BFloat16> want = device.run(kernel, c.rows);
      std::vector<BFloat16> got = spoilt_device.run(kernel, c.rows);
      std::copy_n(want.begin() + broken * c.width(), c.width(), got.begin() + broken * c.width());
      EXPECT_TRUE(same_bytes(got.data(), want.data(), int64_t(got.size()) * 2, kernel.name.data()));
    }
  }
}

TEST(Value, SmallReadsTheLayersOwnWuvInPlace) {
  CaseOptions options;
  options.heads = 3;
  options.batch = 5;
  options.q_lora = 128;
  options.context = "1-100";
  options.pitch_pad = 3;
  const Case c = make_case(options);
  StageRunner want(c, reference_backend());
  const std::vector<BFloat16> latent = normal_values(want.latent.size(), 1, 9);
  std::copy(latent.begin(), latent.end(), want.latent.data());
  want.run(want.backend().value, want.value_args());
  const std::vector<BFloat16> wanted(want.out.data(), want.out.data() + want.out.size());
  DeviceRunner device(c);
  put(want.latent, device.latent);
  for (const Kernel<ValueArgs>& kernel : latent_kernels()) {
    device.run(cuda::value_kernels(), device.value_args(), kernel.name);
    EXPECT_TRUE(out_agrees(fetch(device.out), wanted, 5, 3 * kValue)) << kernel.name;
  }
}

// ---- gate alone ----

std::vector<BFloat16> run_gate(const std::vector<BFloat16>& v, const std::vector<BFloat16>& gate, int n,
                               const std::vector<int32_t>& seq_lens = {}, int q = 1) {
  const int rows = int(v.size()) / n;
  const OnDevice<BFloat16> device_v(v), device_gate(gate);
  const OnDevice<int32_t> device_lens(seq_lens);
  DeviceBuffer out(int64_t(v.size()) * 2);
  GateArgs args{View<const BFloat16, 2>(device_v.data(), rows, n), View<const BFloat16, 2>(device_gate.data(), rows, n),
                View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), rows, n)};
  if (!seq_lens.empty()) args.seq_lens = View<const int32_t, 1>(device_lens.data(), int64_t(seq_lens.size()));
  args.q = q;
  cuda::gate_kernels()[0].run(args, {{}, nullptr, nullptr, {}});
  return fetch(args.out);
}

TEST(Gate, SmallEveryGateValue) {
  std::vector<BFloat16> v, gate;
  for (const float value : {1.0f, -0.7f, 300.0f, 1e-20f}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      v.push_back(to_bf16(value));
      gate.push_back({uint16_t(bits)});
    }
  }
  const std::vector<BFloat16> out = run_gate(v, gate, 1024);
  int64_t near = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    const double g = double(to_float(gate[i]));
    if (std::isnan(g)) {
      ASSERT_TRUE(is_nan(to_float(out[i]))) << "gate bits " << gate[i].bits;
      continue;
    }
    const BFloat16 want = to_bf16(double(to_float(v[i])) * (1.0 / (1.0 + std::exp(-g))));
    const int gap = std::abs(bf16_order(out[i]) - bf16_order(want));
    ASSERT_LE(gap, 1) << "v " << to_float(v[i]) << ", gate " << g << ": " << to_float(out[i]) << ", must be "
                      << to_float(want);
    near += gap;
  }
  EXPECT_LE(near, int64_t(v.size()) / 1000);
}

TEST(Gate, SmallZeroRowsAndNanInItsRow) {
  const int n = 3 * kValue;
  std::vector<BFloat16> v = normal_values(6 * n, 1, 8), gate = normal_values(6 * n, 2, 9);
  const std::vector<BFloat16> clean = run_gate(v, gate, n);
  std::fill_n(v.begin() + 2 * n, n, BFloat16{0x7FC0});         // a live row
  std::fill_n(gate.begin() + 4 * n, 2 * n, BFloat16{0x7FC0});  // of a request of length 0
  const std::vector<BFloat16> got = run_gate(v, gate, n, {5, 7, 0}, 2);
  for (int i = 0; i < 6 * n; ++i) {
    if (i / n == 2) {
      ASSERT_TRUE(is_nan(to_float(got[size_t(i)]))) << i;
    } else {
      ASSERT_EQ(got[size_t(i)].bits, i / n >= 4 ? 0 : clean[size_t(i)].bits) << i;
    }
  }
}

// ---- padding ----

/// A device tensor whose every byte is poison.
template <class T, class... Extents>
View<T, sizeof...(Extents)> poisoned(std::vector<std::unique_ptr<DeviceBuffer>>& keep, Extents... extents) {
  keep.push_back(std::make_unique<DeviceBuffer>((int64_t(extents) * ...) * int64_t(sizeof(T))));
  return View<T, sizeof...(Extents)>(reinterpret_cast<T*>(keep.back()->data()), extents...);
}
template <class T>
void expect_rows(const std::vector<T>& got, int64_t row, int64_t first_padded, T padding, const char* name) {
  T poison;
  std::memset(static_cast<void*>(&poison), kPoison, sizeof(T));
  for (int64_t i = 0; i < int64_t(got.size()); ++i) {
    const T want = i / row < first_padded ? poison : padding;
    ASSERT_EQ(std::memcmp(&got[size_t(i)], &want, sizeof(T)), 0)
        << name << " at row " << i / row << ", column " << i % row;
  }
}

TEST(Pad, SmallWritesWhatEmptyRowsHold) {
  for (const auto& [rows, live, heads, topk] : {std::tuple{4, 1, 3, 16}, {8, 8, 2, 512}, {9, 0, 5, 100}}) {
    std::vector<std::unique_ptr<DeviceBuffer>> keep;
    const PadArgs args{.live_rows = live,
                       .topk_tokens = poisoned<int32_t>(keep, rows, topk),
                       .topk_rows = poisoned<int32_t>(keep, rows, topk),
                       .valid = poisoned<int32_t>(keep, rows),
                       .latent = poisoned<BFloat16>(keep, rows, heads, kLatent),
                       .lse = poisoned<float>(keep, rows, heads),
                       .out = poisoned<BFloat16>(keep, rows, heads * kValue)};
    cuda::enqueue_pad(args, {{}, nullptr, nullptr, {}});
    expect_rows(fetch(args.topk_tokens), topk, live, -1, "topk_tokens");
    expect_rows(fetch(args.topk_rows), topk, live, -1, "topk_rows");
    expect_rows(fetch(args.valid), 1, live, 0, "valid");
    expect_rows(fetch(args.latent), heads * kLatent, live, BFloat16{0}, "latent");
    expect_rows(fetch(args.lse), heads, live, -INFINITY, "lse");
    expect_rows(fetch(args.out), heads * kValue, live, BFloat16{0}, "out");
  }
}

// ---- times ----

/// Bytes that a step 12 cannot avoid, at the read bandwidth of the memory.
double floor_us(int heads, int rows) {
  constexpr double kBytesPerUs = 4.5e6;
  const double weights = double(heads) * kValue * kLatent * 2;
  const double row = double(heads) * (kLatent + 2 * kValue) * 2;
  return (weights + rows * row) / kBytesPerUs;
}

/// `count` numbers from 1 to 2: zeros would cost less power, and time.
std::vector<float> numbers_to_time(int64_t count) {
  std::mt19937 random(1);
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& x : numbers) x = 1 + float(random() % (1 << 23)) * 0x1p-23f;
  return numbers;
}

/// Fills kv_b_proj of several layers, each of `layer` elements; all have the same numbers.
void fill_layers(const DeviceBuffer& kv_b, int64_t layer) {
  std::vector<BFloat16> weights;
  for (const float x : numbers_to_time(layer)) weights.push_back(to_bf16(x));
  for (int64_t at = 0; at < kv_b.bytes(); at += layer * 2) {
    cuda::check(cudaMemcpy(kv_b.data() + at, weights.data(), size_t(layer * 2), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
}

/// Weights of as many layers as it takes to keep them out of L2; latent, gate and out stay, as they do in a step.
TEST(Value, Times) {
  std::printf("%-6s %4s %4s | %9s %6s | %s\n", "kernel", "H", "B", "us", "floor", "us behind a kernel of 5 us");
  for (const int heads : {12, 96}) {
    const int64_t layer = int64_t(heads) * kKvB * kLatent;  // kv_b_proj
    const int layers = int(std::max<int64_t>(4, 200'000'000 / (layer * 2)));
    const DeviceBuffer kv_b(layer * layers * 2);
    fill_layers(kv_b, layer);
    for (const int rows : {1, 8, 64, 256}) {
      ValueCase c(heads, rows, 1);
      c.w_uv.clear();
      c.seq_lens.assign(size_t(rows), 100);
      const OnDevice<BFloat16> latent(c.latent), gate(c.gate);
      const OnDevice<int32_t> seq_lens(c.seq_lens);
      DeviceBuffer out(rows * c.width() * 2);
      for (const Kernel<ValueArgs>& kernel : latent_kernels()) {
        if (kernel.prepare != nullptr) kernel.prepare(c.shape());
        const int64_t bytes = kernel.scratch_bytes(c.shape(), 1);
        DeviceBuffer scratch(bytes);
        const auto enqueue = [&](int i, Queue queue) {
          const auto* weights = reinterpret_cast<const BFloat16*>(kv_b.data()) + (i % layers) * layer + kNope * kLatent;
          const ValueArgs args{nullptr,
                               View<const BFloat16, 3>(latent.data(), rows, heads, kLatent),
                               View<const BFloat16, 3>(weights, heads, kValue, kLatent).with_pitch(kKvB * kLatent),
                               View<const BFloat16, 2>(gate.data(), rows, c.width()).with_pitch(c.width()),
                               View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), rows, c.width()),
                               View<const int32_t, 1>(seq_lens.data(), rows),
                               1};
          kernel.run(args, {{scratch.data(), size_t(bytes)}, nullptr, nullptr, queue});
        };
        const double us = graph_us(layers, enqueue);
        const double behind = graph_us(layers, [&](int i, Queue queue) {
          enqueue_spin(5, queue);
          enqueue(i, queue);
        });
        const double alone = graph_us(layers, [&](int, Queue queue) { enqueue_spin(5, queue); });
        std::printf("%-6s %4d %4d | %9.2f %6.2f | %+.2f of %.2f\n", kernel.name.data(), heads, rows, us,
                    floor_us(heads, rows), behind - alone, alone);
      }
    }
  }
}

/// Of the kernel that merges: behind a core whose parts lie in L2, as in a step.
TEST(Value, MergeTimes) {
  const Kernel<ValueArgs>& kernel = cuda::value_kernels()[0];
  ASSERT_TRUE(kernel.parts);
  std::printf("%-6s %4s %4s | %9s | %s\n", "kernel", "H", "B", "us", "us behind a kernel of 5 us");
  const double alone = graph_us(30, [&](int, Queue queue) { enqueue_spin(5, queue); });
  for (const int heads : {6, 12, 16}) {
    constexpr int kLayers = 30, kTopk = 2048;
    const int64_t layer = int64_t(heads) * kKvB * kLatent;
    const DeviceBuffer kv_b(layer * kLayers * 2);
    fill_layers(kv_b, layer);
    LayerModel model;
    model.sizes.heads = heads;
    for (const int rows : {1, 2, 8, 16, 32, 48, 64, 128}) {
      ValueCase c(heads, rows, 1);
      const OnDevice<BFloat16> latent(c.latent), gate(c.gate);
      const OnDevice<int32_t> lengths(std::vector<int32_t>(size_t(rows), kTopk));
      ShapeKey shape = c.shape();
      shape.topk = kTopk;
      shape.ranks = 1;
      const int64_t part_bytes = kernel_named(cuda::sparse_core_kernels(), "few_heads").scratch_bytes(shape, 1);
      const OnDevice<float> parts(numbers_to_time(part_bytes / int64_t(sizeof(float))));
      DeviceBuffer lse(rows * heads * 4), out(rows * c.width() * 2);
      const SparseCoreArgs core{
          .model = &model,
          .query = {nullptr, heads, 2},
          .topk_rows = View<const int32_t, 2>(lengths.data(), rows, kTopk),
          .valid = View<const int32_t, 1>(lengths.data(), rows),
          .kv = {},
          .latent = View<BFloat16, 3>(latent.data(), rows, heads, kLatent),
          .lse = View<float, 2>(reinterpret_cast<float*>(lse.data()), rows, heads),
      };
      const auto enqueue = [&](int i, Queue queue) {
        const auto* weights = reinterpret_cast<const BFloat16*>(kv_b.data()) + i * layer + kNope * kLatent;
        ValueArgs args{nullptr,
                       {},
                       View<const BFloat16, 3>(weights, heads, kValue, kLatent).with_pitch(kKvB * kLatent),
                       View<const BFloat16, 2>(gate.data(), rows, c.width()).with_pitch(c.width()),
                       View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), rows, c.width()),
                       View<const int32_t, 1>(lengths.data(), rows),
                       1};
        args.core = &core;
        args.parts = reinterpret_cast<std::byte*>(parts.data());
        kernel.run(args, {{}, nullptr, nullptr, queue});
      };
      const double us = graph_us(kLayers, enqueue);
      const double behind = graph_us(kLayers, [&](int i, Queue queue) {
        enqueue_spin(5, queue);
        enqueue(i, queue);
      });
      std::printf("%-6s %4d %4d | %9.2f | %+.2f of %.2f\n", kernel.name.data(), heads, rows, us, behind - alone, alone);
    }
  }
}

}  // namespace
}  // namespace dsacore::test
