// Chooses the kernel of a stage for a shape: the one that the table names, else the first that accepts; and tells why
// not the others.
#pragma once

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

/// Throws `kRefused` where the table names a kernel that does not exist or does not accept, `kUnsupported` where none
/// accepts.
template <class Args>
Choice<Args> choose(StageId stage, std::span<const Kernel<Args>> kernels, const ShapeKey& shape,
                    const RowTable& table) {
  const std::string argument = "kernel of " + std::string(name_of(stage));
  const std::string_view wanted = table.find(shape.rows).value_or("auto");
  Choice<Args> choice;
  std::string names;
  std::string reasons;
  for (const Kernel<Args>& kernel : kernels) {
    names += (names.empty() ? "" : ", ") + std::string(kernel.name);
    const Verdict verdict = kernel.accepts(shape);
    if (!verdict.ok) {
      choice.others.push_back({kernel.name, verdict.reason});
      reasons += (reasons.empty() ? "" : "; ") + std::string(kernel.name) + ": " + verdict.reason;
      if (kernel.name == wanted) throw Exception({ErrorCode::kRefused, argument, std::string(wanted), verdict.reason});
    } else if (choice.kernel == nullptr && (wanted == "auto" || wanted == kernel.name)) {
      choice.kernel = &kernel;
    } else {
      choice.others.push_back(
          {kernel.name, choice.kernel != nullptr ? "an earlier one accepts" : "the table names another"});
    }
  }
  if (choice.kernel == nullptr && wanted != "auto") {
    throw Exception({ErrorCode::kRefused, argument, std::string(wanted), "allowed: auto, " + names});
  }
  if (choice.kernel == nullptr) throw Exception({ErrorCode::kUnsupported, argument, "none", reasons});
  return choice;
}

}  // namespace dsacore
