// Times of the cpu backend's stages around the weights (query, index_projection, value) by target, heads and rows.
// Every iteration takes the next of many layers, so that the weights come from memory; bytes_per_second counts weights
// alone. DSACORE_THREADS sets the threads (default: all).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "format/layouts.h"
#include "plan/registry.h"

namespace dsacore {
namespace {

constexpr int64_t kWeightBytes = int64_t(1) << 30;  // of all layers together
constexpr int kQLora = 1536, kIndexHeads = 32;

int thread_count() {
  const char* text = std::getenv("DSACORE_THREADS");
  return text != nullptr ? std::atoi(text) : int(std::thread::hardware_concurrency());
}

/// Random BF16 numbers around zero, as one block that all layers take their weights from.
const std::vector<BFloat16>& weight_block() {
  static const std::vector<BFloat16> block = [] {
    std::vector<BFloat16> b(size_t(kWeightBytes) / 2);
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal(0, 0.03f);
    const size_t pattern = 1000003;
    for (size_t i = 0; i < pattern; ++i) b[i] = to_bf16(normal(random));
    for (size_t at = pattern; at < b.size(); at += pattern)
      std::copy_n(b.begin(), std::min(pattern, b.size() - at), b.begin() + int64_t(at));
    return b;
  }();
  return block;
}

/// A step of the given size, and the weights of as many layers as the block holds.
struct Bench {
  Bench(const Backend& backend_, KvFormat format, int heads, int rows_)
      : backend(backend_), rows(rows_), threads(thread_count()) {
    model.sizes = {.q_lora = kQLora, .heads = heads, .index_heads = kIndexHeads};
    model.config.kv_format = format;
    model.config.index_softmax_scale = model.config.index_head_scale = 0.1;
    weight_block();  // made before the first iteration is timed
    std::mt19937_64 random(2);
    std::normal_distribution<float> normal;
    norm.assign(kMaxQLora, to_bf16(1.0f));
    k_norm.assign(kIndexDim, 1.0f);
    const auto fill = [&](std::vector<BFloat16>& to, int64_t n) {
      to.resize(size_t(n));
      for (BFloat16& x : to) x = to_bf16(normal(random));
    };
    fill(projected, rows * model.sizes.width());
    fill(q_c, int64_t(rows) * kQLora);
    fill(latent, int64_t(rows) * heads * kLatent);
    out.resize(size_t(rows) * size_t(heads) * kValue);
    query.resize(size_t(rows) * size_t(heads) * kQueryRow * 2);
    index_query.resize(size_t(rows) * kIndexHeads * kIndexDim);
    head_weights.resize(size_t(rows) * kIndexHeads);
    cache.resize(size_t(rows) * 64 * 656);
    for (int row = 0; row < rows; ++row) slots.push_back(int64_t(row) * 64 + row % 64);
    model.q_norm = View<const BFloat16, 1>(norm.data(), kQLora);
    model.kv_norm = View<const BFloat16, 1>(norm.data(), kLatent);
    model.k_norm_weight = model.k_norm_bias = View<const float, 1>(k_norm.data(), kIndexDim);
    shape.sizes = model.sizes;
    shape.kv_format = format;
    shape.rows = rows;
  }

  /// Points the model at the next layer's weights, of `elements` elements together.
  void next_layer(int64_t elements) {
    const BFloat16* w = weight_block().data() + at;
    const int64_t heads = model.sizes.heads;
    at += elements;
    if (at + elements > int64_t(weight_block().size())) at = 0;
    model.w_iq = View<const BFloat16, 2>(w, kIndexHeads * kIndexDim, kQLora);
    model.w_qb = View<const BFloat16, 2>(w, heads * kHeadQuery, kQLora);
    model.packed = reinterpret_cast<const std::byte*>(w + heads * kHeadQuery * kQLora);
    model.kv_b = View<const BFloat16, 3>(w, heads, kKvB, kLatent);
  }

  template <class Args>
  void run(std::span<const Kernel<Args>> kernels, const Args& args) {
    for (const Kernel<Args>& kernel : kernels) {
      if (!kernel.accepts(shape).ok) continue;
      const size_t bytes = size_t(kernel.scratch_bytes(shape, threads.count()));
      if (scratch.size() < bytes + 64) scratch.resize(bytes + 64);
      std::byte* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
      const auto begin = std::chrono::steady_clock::now();
      kernel.run(args, {{aligned, bytes}, &threads, backend.target_data});
      fastest = std::min(fastest, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      return;
    }
  }

  /// Counts weights of `bytes` an iteration; "best" is the iteration least disturbed by others on the machine.
  void report(benchmark::State& state, int64_t bytes) const {
    state.SetBytesProcessed(state.iterations() * bytes);
    state.counters["best_us"] = fastest * 1e6;
    state.counters["best_GB/s"] = double(bytes) / fastest * 1e-9;
  }

  View<const BFloat16, 2> projected_view() const {
    return View<const BFloat16, 2>(projected.data(), rows, model.sizes.width());
  }
  View<const int64_t, 1> slots_view() const { return View<const int64_t, 1>(slots.data(), rows); }

  const Backend& backend;
  int rows;
  Threads threads;
  LayerModel model;
  ShapeKey shape{};
  int64_t at = 0;
  double fastest = 1e30;  // seconds
  std::vector<BFloat16> norm, projected, q_c, latent, out;
  std::vector<float> k_norm, head_weights;
  std::vector<std::byte> query, cache, scratch;
  std::vector<uint8_t> index_query;
  std::vector<int64_t> slots;
};

void time_query(benchmark::State& state, const Backend& backend, KvFormat format, int heads, int rows) {
  Bench b(backend, format, heads, rows);
  const int64_t elements = int64_t(heads) * (kHeadQuery * kQLora + kLatent * kNope);
  const KvCache kv{b.cache.data(), format, rows, 64, 64, row_bytes(format)};
  for (auto _ : state) {
    b.next_layer(elements);
    b.run(backend.query,
          QueryArgs{&b.model, b.projected_view(), b.slots_view(), kv, View<BFloat16, 2>(b.q_c.data(), rows, kQLora),
                    QueryRows{b.query.data(), heads, has_fp8_query(format) ? 1 : 2}});
  }
  b.report(state, elements * 2);
}

void time_index_projection(benchmark::State& state, const Backend& backend, int rows) {
  Bench b(backend, KvFormat::kFp8, 1, rows);
  const int64_t elements = int64_t(kIndexHeads) * kIndexDim * kQLora;
  const IndexCache index{b.cache.data(), IndexFormat::kFp8, rows, row_bytes(IndexFormat::kFp8)};
  for (auto _ : state) {
    b.next_layer(elements);
    b.run(
        backend.index_projection,
        IndexProjectionArgs{&b.model, b.projected_view(), View<const BFloat16, 2>(b.q_c.data(), rows, kQLora),
                            b.slots_view(), index, View<uint8_t, 3>(b.index_query.data(), rows, kIndexHeads, kIndexDim),
                            View<float, 2>(b.head_weights.data(), rows, kIndexHeads)});
  }
  b.report(state, elements * 2);
}

void time_value(benchmark::State& state, const Backend& backend, int heads, int rows) {
  Bench b(backend, KvFormat::kFp8, heads, rows);
  const int64_t elements = int64_t(heads) * kKvB * kLatent;
  const View<const BFloat16, 2> gate =
      View<const BFloat16, 2>(b.projected.data() + b.model.sizes.gate_at(), rows, int64_t(heads) * kValue)
          .with_pitch(b.model.sizes.width());
  for (auto _ : state) {
    b.next_layer(elements);
    b.run(backend.value,
          ValueArgs{&b.model, View<const BFloat16, 3>(b.latent.data(), rows, heads, kLatent), b.model.w_uv(), gate,
                    View<BFloat16, 2>(b.out.data(), rows, int64_t(heads) * kValue)});
  }
  b.report(state, elements);  // half of kv_b_proj
}

void register_target(std::string_view target) {
  const Backend& backend = *cpu_backend(target);
  const auto add = [](const std::string& name, auto&& f) {
    benchmark::RegisterBenchmark(name.c_str(), f)->UseRealTime()->Unit(benchmark::kMicrosecond);
  };
  const std::string prefix = std::string(target) + "/";
  for (const int rows : {1, 8, 64}) {
    const std::string suffix = "B=" + std::to_string(rows);
    for (const int heads : {12, 96}) {
      const std::string of = "H=" + std::to_string(heads) + "/" + suffix;
      add(prefix + "query/fp8_ds_mla/" + of,
          [&backend, heads, rows](benchmark::State& s) { time_query(s, backend, KvFormat::kFp8DsMla, heads, rows); });
      add(prefix + "query/fp8/" + of,
          [&backend, heads, rows](benchmark::State& s) { time_query(s, backend, KvFormat::kFp8, heads, rows); });
      add(prefix + "value/" + of,
          [&backend, heads, rows](benchmark::State& s) { time_value(s, backend, heads, rows); });
    }
    add(prefix + "index_projection/" + suffix,
        [&backend, rows](benchmark::State& s) { time_index_projection(s, backend, rows); });
  }
}

}  // namespace
}  // namespace dsacore

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  for (const std::string_view target : dsacore::cpu_targets()) dsacore::register_target(target);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
