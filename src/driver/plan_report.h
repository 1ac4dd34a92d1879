// What would be chosen and reserved for a shape, and why not the other kernels: the plan of a real prepare with weights
// of zeros, in words. What `dsacore inspect --plan` prints.
#pragma once

#include <string>
#include <vector>

#include "driver/run_case.h"
#include "driver/shape_text.h"

namespace dsacore {

struct PlanReport {
  struct PassedOver {
    std::string kernel, reason;
  };
  struct Stage {
    std::string name;
    std::string kernel;
    std::vector<PassedOver> others;
  };
  std::string target;
  int threads = 0;
  std::string tables;                  ///< where the tables came from
  std::vector<Stage> stages;           ///< that run in this mode
  int rows = 0;                        ///< of the plan: B, or the capacity of `plan_rows` that serves it
  std::string overlap;                 ///< mode, after the fallbacks
  std::string partial;                 ///< under DCP, else empty
  std::vector<ReservedItem> reserved;  ///< of one rank
  int64_t reserved_bytes = 0;
};

/// `options`: backend, target, threads (of all ranks), tables, overlap, kernels, plan_rows, partial, deadline. Throws
/// what prepare throws.
PlanReport plan_report(const ProblemShape& shape, const RunOptions& options);

}  // namespace dsacore
