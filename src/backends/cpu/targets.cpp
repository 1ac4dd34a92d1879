// The cpu backend once per instruction set: which ones this machine runs, and the Backend of each.
//
// Highway chooses a target by a state of the whole process. It is set here while the stages' lists are collected, under
// a lock, and put back: a Backend then holds the pointers of its own target and looks nothing up again.
#include <hwy/targets.h>

#include <array>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/cpu/bf16_ops.h"
#include "backends/cpu/kernels.h"

namespace dsacore {
namespace {

struct Target {
  std::string_view name;
  int64_t highway;               ///< of the stages' code
  const cpu::Bf16Ops* (*ops)();  ///< null where the machine lacks them
};

const cpu::Bf16Ops* highway_ops() { return &cpu::highway_ops(); }

constexpr std::array kTargets = {
#if defined(__x86_64__)
    Target{"amx", HWY_AVX3, cpu::amx_ops},   Target{"avx512_bf16", HWY_AVX3, cpu::avx512_bf16_ops},
    Target{"avx512", HWY_AVX3, highway_ops}, Target{"avx2", HWY_AVX2, highway_ops},
    Target{"sse4", HWY_SSE4, highway_ops},
#else
    Target{"neon", HWY_NEON, highway_ops},
#endif
};

/// Whether the machine runs a target's stages and its operations. Asks for AMX only where `target` is "amx".
bool runs(const Target& target) { return (HWY_SUPPORTED_TARGETS & target.highway) != 0 && target.ops() != nullptr; }

/// Makes Highway choose one target, for the whole process. Elsewhere in the process code that chooses meanwhile gets
/// that target: a slower one at worst, never one that the machine lacks.
class ForcedTarget {
 public:
  explicit ForcedTarget(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ~ForcedTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;
};

Backend collect(const Target& target) {
  const ForcedTarget forced(target.highway);
  return {.name = "cpu",
          .target = target.name,
          .target_data = target.ops(),
          .packed_bytes = cpu::packed_bytes,
          .pack = cpu::pack,
          .query = cpu::query_kernels(),
          .index_projection = cpu::index_projection_kernels(),
          .indexer = cpu::indexer_kernels(),
          .candidate_merge = cpu::candidate_merge_kernels(),
          .sparse_core = cpu::sparse_core_kernels(),
          .value = cpu::value_kernels(),
          .gate = cpu::gate_kernels(),
          .partial_merge = cpu::partial_merge_kernels()};
}

/// One lock for everything that reads or sets Highway's choice.
std::mutex& highway_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

const Backend* cpu_backend(std::string_view name) {
  static std::array<std::optional<Backend>, kTargets.size()> backends;
  const std::lock_guard lock(highway_mutex());
  for (size_t i = 0; i < kTargets.size(); ++i) {
    if (!name.empty() && name != kTargets[i].name) continue;
    std::optional<Backend>& backend = backends[i];
    if (!backend && runs(kTargets[i])) backend = collect(kTargets[i]);
    if (backend) return &*backend;
  }
  return nullptr;
}

std::span<const std::string_view> cpu_targets() {
  static const std::vector<std::string_view> names = [] {
    const std::lock_guard lock(highway_mutex());
    std::vector<std::string_view> found;
    for (const Target& target : kTargets) {
      if (runs(target)) found.push_back(target.name);
    }
    return found;
  }();
  return names;
}

std::span<const std::string_view> compiled_cpu_targets() {
  static constexpr auto names = [] {
    std::array<std::string_view, kTargets.size()> all;
    for (size_t i = 0; i < kTargets.size(); ++i) all[i] = kTargets[i].name;
    return all;
  }();
  return names;
}

}  // namespace dsacore
