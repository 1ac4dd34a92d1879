// Times of the cpu backend's indexer by target, index format, rows and context, with topk 2048 and 32 index heads.
// Index pages are scattered over a cache so large that every iteration reads from memory; the cache lies in huge pages
// where the system has them. DSACORE_THREADS sets the threads (default: all).
//
// Counters: ns_per_key (and row), GB/s of the index cache, GFLOP/s of the dot products. What bounds a target shows in
// which of the two stands still: the memory's bandwidth, or the arithmetic of its dot product.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "format/layouts.h"
#include "format/paging.h"
#include "memory/aligned_bytes.h"
#include "plan/registry.h"

namespace dsacore {
namespace {

constexpr int64_t kCacheBytes = int64_t(1) << 30;
constexpr int kTopk = 2048;
constexpr int kHeads = 32;

int thread_count() {
  const char* text = std::getenv("DSACORE_THREADS");
  return text != nullptr ? std::atoi(text) : int(std::thread::hardware_concurrency());
}

int64_t page_bytes_of(IndexFormat format) { return int64_t(kIndexPage) * row_bytes(format); }
int64_t pages_of_cache(IndexFormat format) { return kCacheBytes / page_bytes_of(format); }

/// A cache of normal keys, filled once for each format.
std::byte* cache_of(IndexFormat format) {
  static AlignedBytes caches[2];
  AlignedBytes& cache = caches[int(format)];
  if (cache.size() > 0) return cache.data();
  for (AlignedBytes& other : caches) other = {};
  const size_t page_bytes = size_t(page_bytes_of(format));
  cache = AlignedBytes(kCacheBytes, "index cache");
  // Codes come from a long table of encoded keys, from a random place for each token: so no two keys are equal.
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  const size_t value_bytes = size_t(with_layout(format, [](auto layout) { return layout.kValueBytes; }));
  const size_t scale_bytes = size_t(row_bytes(format)) - value_bytes;
  std::vector<std::byte> page(page_bytes), codes, scales;
  for (int i = 0; i < 4000; ++i) {
    float key[kIndexDim];
    for (float& x : key) x = to_float(to_bf16(normal(random)));
    encode_index(format, key, 0, page.data());
    codes.insert(codes.end(), page.begin(), page.begin() + std::ptrdiff_t(value_bytes));
    const auto scale = page.begin() + std::ptrdiff_t(kIndexPage * value_bytes);
    scales.insert(scales.end(), scale, scale + std::ptrdiff_t(scale_bytes));
  }
  for (int64_t i = 0; i < pages_of_cache(format); ++i) {
    std::byte* at = cache.data() + i * page_bytes_of(format);
    for (size_t t = 0; t < kIndexPage; ++t) {
      std::memcpy(at + t * value_bytes, codes.data() + random() % (codes.size() - value_bytes), value_bytes);
      std::memcpy(at + kIndexPage * value_bytes + t * scale_bytes,
                  scales.data() + random() % (scales.size() / scale_bytes) * scale_bytes, scale_bytes);
    }
  }
  return cache.data();
}

void indexer(benchmark::State& state, const Backend& backend, IndexFormat format, int rows, int64_t context) {
  const int bytes = row_bytes(format);
  LayerModel model;
  model.sizes = {.q_lora = 1536, .heads = 12, .index_heads = kHeads};
  model.config.index_format = format;
  const IndexCache index{cache_of(format), format, pages_of_cache(format), bytes};

  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> queries(size_t(rows) * kHeads * kIndexDim);
  std::vector<float> weights(size_t(rows) * kHeads);
  for (uint8_t& code : queries) code = to_e4m3(normal(random) * 100);
  for (float& weight : weights) weight = normal(random) * 0.01f;
  std::vector<int32_t> order(static_cast<size_t>(index.pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const int64_t width = pages_of(context, kIndexPage);
  const std::vector<int32_t> lengths(static_cast<size_t>(rows), int32_t(context));
  std::vector<int32_t> table(size_t(rows) * size_t(width)), tokens(size_t(rows) * kTopk),
      physical(size_t(rows) * kTopk);
  std::vector<int32_t> valid(static_cast<size_t>(rows));
  const IndexerArgs args{.model = &model,
                         .q = 1,
                         .shard = {},
                         .seq_lens = View<const int32_t, 1>(lengths.data(), rows),
                         .block_table = View<const int32_t, 2>(table.data(), rows, width),
                         .index_block_table = {},
                         .page = kIndexPage,
                         .stride_rows = kIndexPage,
                         .index = index,
                         .index_query = View<const uint8_t, 3>(queries.data(), rows, kHeads, kIndexDim),
                         .head_weights = View<const float, 2>(weights.data(), rows, kHeads),
                         .topk_tokens = View<int32_t, 2>(tokens.data(), rows, kTopk),
                         .topk_rows = View<int32_t, 2>(physical.data(), rows, kTopk),
                         .valid = View<int32_t, 1>(valid.data(), rows),
                         .candidates = {}};

  const ShapeKey shape{model.sizes, KvFormat::kFp8DsMla, format, kTopk, rows, 1, 1, context};
  const Kernel<IndexerArgs>& kernel = backend.indexer[0];
  Threads threads(thread_count());
  const int64_t scratch_bytes = kernel.scratch_bytes(shape, threads.count());
  const AlignedBytes scratch(scratch_bytes, "scratch");
  size_t at = 0;
  double least = INFINITY;
  for (auto _ : state) {
    for (int32_t& page : table) page = order[at++ % order.size()];
    const auto begin = std::chrono::steady_clock::now();
    kernel.run(args, {{scratch.data(), size_t(scratch_bytes)}, &threads, backend.target_data});
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    state.SetIterationTime(seconds);
    least = std::min(least, seconds);
  }
  const double keys = double(rows) * double(context);
  state.counters["min_us"] = least * 1e6;
  state.counters["min_ns_per_key"] = least * 1e9 / keys;
  state.counters["GB/s"] = keys * bytes / least * 1e-9;
  state.counters["GFLOP/s"] = keys * 2 * kHeads * kIndexDim / least * 1e-9;
}

void register_all() {
  struct Shape {
    int rows;
    int64_t context;
  };
  for (const IndexFormat format : {IndexFormat::kFp8, IndexFormat::kMxfp4}) {
    for (const std::string_view target : cpu_targets()) {
      for (const Shape shape : {Shape{1, 8192}, {1, 32768}, {1, 131072}, {1, 1048576}, {8, 32768}}) {
        const std::string name = "indexer/" + std::string(target) + (format == IndexFormat::kFp8 ? "/fp8" : "/mxfp4") +
                                 "/B:" + std::to_string(shape.rows) + "/context:" + std::to_string(shape.context);
        const auto run = [=](benchmark::State& state) {
          indexer(state, *cpu_backend(target), format, shape.rows, shape.context);
        };
        benchmark::RegisterBenchmark(name.c_str(), run)->UseManualTime()->Unit(benchmark::kMicrosecond);
      }
    }
  }
}

}  // namespace
}  // namespace dsacore

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  dsacore::register_all();
  benchmark::RunSpecifiedBenchmarks();
}
