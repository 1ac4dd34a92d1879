// Chooses the kernel of a stage for a shape: the first that the tables let it take and that accepts; and tells why not
// the others.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dsacore/status.h"
#include "plan/registry.h"
#include "plan/row_table.h"
#include "plan/stage_id.h"

namespace dsacore {

/// A kernel that was not taken.
struct PassedOver {
  std::string_view kernel;
  std::string reason;
};

template <class Args>
struct Choice {
  const Kernel<Args>* kernel = nullptr;
  std::vector<PassedOver> others;
};

/// Whether a table's word lets a kernel be taken: `auto` any, else those that it names (`a|b`).
bool allows(std::string_view word, std::string_view kernel);

/// `word` is what the tables say of the stage. Throws `kRefused` where it names a kernel that does not exist, or none
/// that accepts; `kUnsupported` where it is `auto` and none accepts.
template <class Args>
Choice<Args> choose(StageId stage, std::span<const Kernel<Args>> kernels, const ShapeKey& shape,
                    std::string_view word) {
  const std::string argument = "kernel of " + std::string(name_of(stage));
  const auto refuse = [&](std::string allowed) {
    throw Exception({ErrorCode::kRefused, argument, std::string(word), std::move(allowed)});
  };
  Choice<Args> choice;
  std::string known = "auto";
  std::string reasons;
  for (const Kernel<Args>& kernel : kernels) {
    known += ", " + std::string(kernel.name);
    const Verdict verdict = kernel.accepts(shape);
    const bool allowed = allows(word, kernel.name);
    if (allowed && !verdict.ok) {
      reasons += (reasons.empty() ? "" : "; ") + std::string(kernel.name) + ": " + verdict.reason;
    }
    if (choice.kernel == nullptr && allowed && verdict.ok) {
      choice.kernel = &kernel;
    } else {
      choice.others.push_back({kernel.name, !verdict.ok ? verdict.reason
                                            : allowed   ? "an earlier one accepts"
                                                        : "the tables name others"});
    }
  }
  if (word != "auto") {
    for (std::string_view name : split(word, '|')) {
      const auto named = [&](const Kernel<Args>& kernel) { return kernel.name == name; };
      if (std::none_of(kernels.begin(), kernels.end(), named)) refuse("allowed: " + known);
    }
    if (choice.kernel == nullptr) refuse(reasons);
  }
  if (choice.kernel == nullptr) throw Exception({ErrorCode::kUnsupported, argument, "none", reasons});
  return choice;
}

}  // namespace dsacore
