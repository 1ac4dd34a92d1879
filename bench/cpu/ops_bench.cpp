// Speed of Bf16Ops for each cpu target that this machine runs, at the sizes that the stages use.
// FLOP/s count two per product; bytes/s of rows_dot count the matrix once. A "cold" matrix is one of a set larger than
// the caches.
#include <benchmark/benchmark.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/cpu/bf16_ops.h"
#include "plan/registry.h"

namespace dsacore {
namespace {

/// 64-byte aligned BF16 numbers in -1..1.
class Numbers {
 public:
  explicit Numbers(int64_t count) : storage_(size_t(count) + 32) {
    uint32_t state = 1;
    for (BFloat16& x : storage_) {
      state = state * 1664525u + 1013904223u;
      x.bits = uint16_t(0x3C00u | (state >> 16 & 0x83FFu));
    }
  }
  BFloat16* data() {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    return storage_.data() + (64 - address % 64) % 64 / sizeof(BFloat16);
  }

 private:
  std::vector<BFloat16> storage_;
};

void rows_dot(benchmark::State& state, const cpu::Bf16Ops* ops, int n, int k, int b, int copies) {
  const int64_t size = int64_t(n) * k;
  Numbers w(size * copies), x(int64_t(b) * k);
  std::vector<float> y(size_t(b) * size_t(n));
  int copy = 0;
  for (auto _ : state) {
    ops->rows_dot({.w = w.data() + copy * size,
                   .w_pitch = k,
                   .n = n,
                   .x = x.data(),
                   .x_pitch = k,
                   .b = b,
                   .k = k,
                   .y = y.data(),
                   .y_pitch = n});
    copy = (copy + 1) % copies;
    benchmark::ClobberMemory();
  }
  state.counters["FLOP/s"] = benchmark::Counter(2.0 * double(size) * b, benchmark::Counter::kIsIterationInvariantRate);
  state.SetBytesProcessed(state.iterations() * size * int64_t(sizeof(BFloat16)));
}

void block_dot(benchmark::State& state, const cpu::Bf16Ops* ops, int m, int n, int k, int copies) {
  const int64_t size = int64_t(m) * k;
  Numbers a(size * copies), b(int64_t(k) * n);
  std::vector<float> c(size_t(m) * size_t(n));
  int copy = 0;
  for (auto _ : state) {
    ops->block_dot({.a = a.data() + copy * size,
                    .a_pitch = k,
                    .m = m,
                    .b = b.data(),
                    .b_pitch = 2 * n,
                    .n = n,
                    .k = k,
                    .c = c.data(),
                    .c_pitch = n,
                    .accumulate = false});
    copy = (copy + 1) % copies;
    benchmark::ClobberMemory();
  }
  state.counters["FLOP/s"] = benchmark::Counter(2.0 * double(size) * n, benchmark::Counter::kIsIterationInvariantRate);
}

void decode_e4m3(benchmark::State& state, const cpu::Bf16Ops* ops, int64_t n) {
  std::vector<uint8_t> codes(static_cast<size_t>(n));
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = uint8_t(i * 37);
  Numbers values(n);
  for (auto _ : state) {
    ops->decode_e4m3(codes.data(), values.data(), n);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * n);
}

void register_target(const std::string& target) {
  const auto* ops = static_cast<const cpu::Bf16Ops*>(cpu_backend(target)->target_data);
  constexpr int kColdCopies = 64;  // 453 MB of the matrix below
  for (const int b : {1, 2, 4, 8, 16}) {
    const std::string name = "rows_dot/" + target + "/n:2304/k:1536/b:" + std::to_string(b);
    benchmark::RegisterBenchmark((name + "/cold").c_str(), rows_dot, ops, 2304, 1536, b, kColdCopies);
    benchmark::RegisterBenchmark(("rows_dot/" + target + "/n:64/k:1536/b:" + std::to_string(b)).c_str(), rows_dot, ops,
                                 64, 1536, b, 1);
  }
  constexpr std::array<std::array<int, 3>, 4> kBlocks{{{64, 32, 128}, {64, 16, 576}, {12, 512, 64}, {6, 512, 64}}};
  for (const auto& [m, n, k] : kBlocks) {
    const std::string name =
        "block_dot/" + target + "/m:" + std::to_string(m) + "/n:" + std::to_string(n) + "/k:" + std::to_string(k);
    benchmark::RegisterBenchmark(name.c_str(), block_dot, ops, m, n, k, 1);
  }
  benchmark::RegisterBenchmark(("block_dot/" + target + "/m:2304/n:64/k:1536/cold").c_str(), block_dot, ops, 2304, 64,
                               1536, kColdCopies);
  benchmark::RegisterBenchmark(("decode_e4m3/" + target).c_str(), decode_e4m3, ops, 8192);
}

}  // namespace
}  // namespace dsacore

int main(int argc, char** argv) {
  for (const std::string_view target : dsacore::cpu_targets()) dsacore::register_target(std::string(target));
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
