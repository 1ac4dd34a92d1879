// The cpu backend's targets: which ones there are, that each Backend holds the code of its own target, and that asking
// is safe from many threads and leaves Highway as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "backends/cpu/bf16_ops.h"
#include "backends/cpu/cpu_features.h"
#include "plan/registry.h"

namespace dsacore {
namespace {

std::string_view ops_name(const Backend& backend) {
  return static_cast<const cpu::Bf16Ops*>(backend.target_data)->name;
}

/// `run` of every kernel of every stage, by stage.
std::map<std::string, std::vector<void (*)()>> kernels_of(const Backend& backend) {
  std::map<std::string, std::vector<void (*)()>> all;
  const auto add = [&](const std::string& stage, const auto& list) {
    for (const auto& kernel : list)
      all[stage + " " + std::string(kernel.name)].push_back(reinterpret_cast<void (*)()>(kernel.run));
  };
  add("query", backend.query);
  add("index_projection", backend.index_projection);
  add("indexer", backend.indexer);
  add("candidate_merge", backend.candidate_merge);
  add("sparse_core", backend.sparse_core);
  add("value", backend.value);
  add("gate", backend.gate);
  add("partial_merge", backend.partial_merge);
  return all;
}

TEST(CpuTargets, AreSomeOfTheCompiledOnesInTheirOrder) {
  const auto compiled = compiled_cpu_targets();
  const auto targets = cpu_targets();
  ASSERT_FALSE(targets.empty());
  auto from = compiled.begin();
  for (const std::string_view target : targets) {
    from = std::find(from, compiled.end(), target);
    ASSERT_NE(from, compiled.end()) << target;
  }
}

TEST(CpuTargets, TheBestIsTheDefault) { EXPECT_EQ(cpu_backend(""), cpu_backend(cpu_targets().front())); }

TEST(CpuTargets, UnknownOnesAndThoseOfOtherMachinesAreNull) {
  EXPECT_EQ(cpu_backend("avx9000"), nullptr);
  EXPECT_EQ(cpu_backend("AVX2"), nullptr);
  const auto targets = cpu_targets();
  for (const std::string_view target : compiled_cpu_targets()) {
    const bool runs = std::find(targets.begin(), targets.end(), target) != targets.end();
    EXPECT_EQ(cpu_backend(target) != nullptr, runs) << target;
  }
}

TEST(CpuTargets, EachHoldsItsOwnCode) {
  const std::map<std::string_view, std::string_view> ops{{"amx", "amx"},     {"avx512_bf16", "avx512_bf16"},
                                                         {"avx512", "AVX3"}, {"avx2", "AVX2"},
                                                         {"sse4", "SSE4"},   {"neon", "NEON"}};
  for (const std::string_view target : cpu_targets()) {
    const Backend& backend = *cpu_backend(target);
    EXPECT_EQ(backend.name, "cpu");
    EXPECT_EQ(backend.target, target);
    EXPECT_EQ(ops_name(backend), ops.at(target));
    EXPECT_NE(backend.packed_bytes, nullptr);
    EXPECT_NE(backend.pack, nullptr);
    EXPECT_FALSE(backend.query.empty() || backend.index_projection.empty() || backend.indexer.empty() ||
                 backend.candidate_merge.empty() || backend.sparse_core.empty() || backend.value.empty() ||
                 backend.gate.empty() || backend.partial_merge.empty());
  }
}

TEST(CpuTargets, StagesOfDifferentInstructionSetsAreDifferentFunctions) {
  // amx, avx512_bf16 and avx512 share the stages' code; the others have their own.
  std::map<std::string, std::map<std::string, std::set<void (*)()>>> by_set;  // kernel -> instruction set -> functions
  std::set<std::string> sets;
  for (const std::string_view target : cpu_targets()) {
    const std::string set = target.starts_with("avx512") || target == "amx" ? "avx512" : std::string(target);
    sets.insert(set);
    for (const auto& [kernel, functions] : kernels_of(*cpu_backend(target)))
      by_set[kernel][set].insert(functions.begin(), functions.end());
  }
  for (const auto& [kernel, functions] : by_set) {
    std::set<void (*)()> different;
    for (const auto& [set, runs] : functions) {
      EXPECT_EQ(runs.size(), 1u) << kernel << " of " << set;
      different.insert(runs.begin(), runs.end());
    }
    EXPECT_EQ(different.size(), sets.size()) << kernel;
  }
}

TEST(CpuTargets, AskingLeavesHighwayAsItWas) {
  const std::string_view before = cpu::highway_ops().name;
  for (const std::string_view target : cpu_targets()) ASSERT_NE(cpu_backend(target), nullptr);
  EXPECT_EQ(cpu::highway_ops().name, before);
  // The best target that has no operations of its own is the one that Highway chooses by itself.
  for (const std::string_view target : cpu_targets()) {
    if (target == "amx" || target == "avx512_bf16") continue;
    EXPECT_EQ(before, ops_name(*cpu_backend(target)));
    break;
  }
}

TEST(CpuTargets, MayBeAskedForFromManyThreads) {
  std::vector<std::vector<const Backend*>> found(8);
  std::vector<std::thread> threads;
  for (auto& mine : found) {
    threads.emplace_back([&mine] {
      for (const std::string_view target : compiled_cpu_targets()) mine.push_back(cpu_backend(target));
      mine.push_back(cpu_backend(cpu_targets().front()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& mine : found) EXPECT_EQ(mine, found[0]);
}

#if defined(__x86_64__)
TEST(CpuFeatures, AreThoseThatTheSystemReports) {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) flags.insert(word);
    break;
  }
  ASSERT_FALSE(flags.empty());
  const bool bf16 = flags.contains("avx512_bf16");
  EXPECT_EQ(cpu::has_avx512_bf16(), bf16);
  EXPECT_EQ(cpu::has_avx512_vbmi(), bf16 && flags.contains("avx512vbmi"));
  EXPECT_EQ(cpu::acquire_amx(), bf16 && flags.contains("amx_bf16") && flags.contains("amx_tile"));
}
#endif

}  // namespace
}  // namespace dsacore
