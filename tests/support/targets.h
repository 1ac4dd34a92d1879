// The cpu targets that a test forces in turn.
#pragma once

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/registry.h"

namespace dsacore::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
inline constexpr bool kSanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

/// Every target that this machine runs. Under thread sanitizer only the best one, since work is shared out in the same
/// way on all, and a run takes twenty times as long there.
inline std::vector<std::string_view> tested_targets() {
  const auto all = cpu_targets();
  return {all.begin(), kThreadSanitizer ? all.begin() + 1 : all.end()};
}

/// The first of the tested targets of each Highway instruction set, for code that does not multiply in BF16.
inline std::vector<std::string_view> tested_instruction_sets() {
  std::vector<std::string_view> targets = tested_targets();
  const auto is_avx512 = [](std::string_view target) { return target == "amx" || target.starts_with("avx512"); };
  bool found = false;
  std::erase_if(targets, [&](std::string_view target) { return is_avx512(target) && std::exchange(found, true); });
  return targets;
}

}  // namespace dsacore::test
