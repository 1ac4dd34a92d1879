#include "driver/peaks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "backends/cpu/bf16_ops.h"
#include "memory/aligned_bytes.h"

namespace dsacore {
namespace {

constexpr int64_t kSweepBytes = int64_t(512) << 20;
constexpr int64_t kSweepTask = int64_t(1) << 20;
constexpr int kSweeps = 4;
constexpr int kProductRuns = 40;  // of each thread

double seconds_of(FunctionRef<void()> work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

uint64_t sum_of(const std::byte* at, int64_t bytes) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < bytes; i += int64_t(sizeof(sums))) {
    uint64_t words[8];
    std::memcpy(words, at + i, sizeof(words));
    for (int j = 0; j < 8; ++j) sums[j] += words[j];
  }
  uint64_t sum = 0;
  for (uint64_t s : sums) sum += s;
  return sum;
}

/// The median, not the mean: a core that is busy with other work for a while then does not lower a rate.
double middle_of(std::vector<double>& rates) {
  const auto middle = rates.begin() + ptrdiff_t(rates.size() / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

/// Threads that have a core each.
int running_at_once(const Threads& threads) {
  return std::min(threads.count(), std::max(1, int(std::thread::hardware_concurrency())));
}

}  // namespace

double measure_read_bandwidth(Threads& threads) {
  const AlignedBytes buffer(kSweepBytes, "bandwidth sweep");
  const int64_t tasks = kSweepBytes / kSweepTask;
  std::atomic<uint64_t> keep = 0;  // so that the reads cannot be left out
  threads.for_each(tasks, [&](int64_t task, int) {
    std::memset(buffer.data() + task * kSweepTask, int(task) | 1, size_t(kSweepTask));
  });
  // The median of the parts, not the whole: a core that is busy with other work for a while then does not lower the
  // rate.
  std::vector<double> rates(size_t(tasks * kSweeps));
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    threads.for_each(tasks, [&](int64_t task, int) {
      const double seconds = seconds_of([&] { keep += sum_of(buffer.data() + task * kSweepTask, kSweepTask); });
      rates[size_t(sweep * tasks + task)] = double(kSweepTask) / seconds;
    });
  }
  return keep != 0 ? middle_of(rates) * running_at_once(threads) : 0;
}

double measure_bf16_rate(const Backend& backend, Threads& threads) {
  if (backend.target_data == nullptr) return 0;
  const cpu::Bf16Ops& ops = *static_cast<const cpu::Bf16Ops*>(backend.target_data);
  constexpr int kM = 64, kN = 256, kK = 512, kProducts = 16;
  constexpr int64_t kA = kM * kK * 2, kB = kN * kK * 2, kC = kM * kN * 4;
  const AlignedBytes buffer(threads.count() * (kA + kB + kC), "product operands");
  std::memset(buffer.data(), 0x3C, size_t(buffer.size()));  // ordinary numbers
  std::vector<double> rates(size_t(kProductRuns * threads.count()));
  threads.for_each(int64_t(rates.size()), [&](int64_t task, int worker) {
    std::byte* a = buffer.data() + worker * (kA + kB + kC);
    const cpu::BlockDot product{
        reinterpret_cast<const BFloat16*>(a),  kK, kM,   reinterpret_cast<const BFloat16*>(a + kA), 2 * kN, kN, kK,
        reinterpret_cast<float*>(a + kA + kB), kN, false};
    const double seconds = seconds_of([&] {
      for (int i = 0; i < kProducts; ++i) ops.block_dot(product);
    });
    rates[size_t(task)] = 2.0 * kM * kN * kK * kProducts / seconds;
  });
  return middle_of(rates) * running_at_once(threads);
}

}  // namespace dsacore
