// Times of the cpu backend's sparse core by target, cache format, heads and rows, with 2048 selected keys a row. Every
// iteration selects other cache rows, of a cache so large that they come from memory. DSACORE_THREADS sets the threads
// (default: all).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "format/layouts.h"
#include "plan/registry.h"

namespace dsacore {
namespace {

constexpr int64_t kCacheBytes = int64_t(1) << 30;
constexpr int kTopk = 2048;

int thread_count() {
  const char* text = std::getenv("DSACORE_THREADS");
  return text != nullptr ? std::atoi(text) : int(std::thread::hardware_concurrency());
}

const char* text_of(KvFormat format) {
  return format == KvFormat::kFp8DsMla ? "fp8_ds_mla" : format == KvFormat::kFp8 ? "fp8" : "nvfp4_ds_mla";
}

/// A cache of random rows, one for each format, filled once.
const std::vector<std::byte>& cache_of(KvFormat format) {
  static std::vector<std::byte> caches[3];
  std::vector<std::byte>& cache = caches[int(format)];
  if (!cache.empty()) return cache;
  for (auto& other : caches) std::vector<std::byte>().swap(other);
  const size_t row = size_t(row_bytes(format));
  cache.resize(size_t(kCacheBytes) / row * row);
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  constexpr size_t kPattern = 1000;
  for (size_t i = 0; i < kPattern; ++i) {
    float c[kLatent];
    BFloat16 pe[kPe];
    for (float& x : c) x = to_float(to_bf16(normal(random)));
    for (BFloat16& x : pe) x = to_bf16(normal(random));
    encode_kv(format, c, pe, 1.0f, cache.data() + i * row);
  }
  for (size_t at = kPattern * row; at < cache.size(); at += kPattern * row) {
    std::memcpy(cache.data() + at, cache.data(), std::min(kPattern * row, cache.size() - at));
  }
  return cache;
}

void sparse_core(benchmark::State& state, const Backend& backend, KvFormat format, int heads, int rows) {
  const std::vector<std::byte>& cache = cache_of(format);
  const int bytes = row_bytes(format);
  LayerModel model;
  model.sizes = {.q_lora = 1536, .heads = heads, .index_heads = 32};
  model.config.kv_format = format;
  model.config.softmax_scale = 0.07;
  const KvCache kv{const_cast<std::byte*>(cache.data()), format, int64_t(cache.size()) / bytes / 64, 64, 64, bytes};

  const int64_t steps = std::max<int64_t>(kCacheBytes / (int64_t(rows) * kTopk * bytes), 1);
  std::mt19937_64 random(2);
  std::vector<int32_t> selected(size_t(steps * rows * kTopk));
  for (int64_t row = 0; row < steps * rows; ++row) {
    const auto begin = selected.begin() + row * kTopk;
    std::generate(begin, begin + kTopk, [&] { return int32_t(random() % uint64_t(kv.pages * 64)); });
    std::sort(begin, begin + kTopk);
  }
  const std::vector<int32_t> valid(size_t(rows), kTopk);
  const int element = has_fp8_query(format) ? 1 : 2;
  std::vector<std::byte> query(size_t(rows) * size_t(heads) * kQueryRow * size_t(element));
  for (size_t i = 0; i < query.size(); ++i)
    query[i] = std::byte(element == 1 || i % 2 == 1 ? 0x30 + random() % 16 : random());
  std::vector<BFloat16> latent(size_t(rows) * size_t(heads) * kLatent);
  std::vector<float> lse(size_t(rows) * size_t(heads));

  Threads threads(thread_count());
  const Kernel<SparseCoreArgs>& kernel = backend.sparse_core[0];
  const ShapeKey shape{model.sizes, format, IndexFormat::kFp8, kTopk, rows, 1, 1, kMaxContext};
  const size_t scratch_bytes = size_t(kernel.scratch_bytes(shape, threads.count()));
  const std::unique_ptr<void, decltype(&std::free)> scratch(std::aligned_alloc(64, (scratch_bytes + 63) / 64 * 64),
                                                            std::free);
  int64_t step = 0;
  for (auto _ : state) {
    kernel.run({.model = &model,
                .query = {query.data(), heads, element},
                .topk_rows = View<const int32_t, 2>(selected.data() + step * rows * kTopk, rows, kTopk),
                .valid = View<const int32_t, 1>(valid.data(), rows),
                .kv = kv,
                .latent = View<BFloat16, 3>(latent.data(), rows, heads, kLatent),
                .lse = View<float, 2>(lse.data(), rows, heads)},
               {{static_cast<std::byte*>(scratch.get()), scratch_bytes}, &threads, backend.target_data});
    step = (step + 1) % steps;
  }
  const double flops = 2.0 * rows * heads * kTopk * (kQueryRow + kLatent);
  using benchmark::Counter;
  state.counters["GFLOP/s"] = Counter(flops * 1e-9, Counter::kIsIterationInvariantRate);
  state.counters["cache GB/s"] = Counter(double(rows) * kTopk * bytes * 1e-9, Counter::kIsIterationInvariantRate);
}

void register_all() {
  for (const KvFormat format : {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
    for (const std::string_view target : cpu_targets()) {
      const Backend* backend = cpu_backend(target);
      for (const int heads : {12, 96}) {
        for (const int rows : {1, 8}) {
          const std::string name = "sparse_core/kv=" + std::string(text_of(format)) + ",target=" + std::string(target) +
                                   ",H=" + std::to_string(heads) + ",B=" + std::to_string(rows);
          benchmark::RegisterBenchmark(
              name.c_str(), [=](benchmark::State& state) { sparse_core(state, *backend, format, heads, rows); })
              ->UseRealTime()
              ->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
}

}  // namespace
}  // namespace dsacore

int main(int argc, char** argv) {
  dsacore::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
