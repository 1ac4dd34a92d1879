// The decisions of `dsacore tune`, apart from what is measured: a search over kernels and overlap modes for one shape,
// and the tables that what was found for some shapes comes to.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "driver/bench_case.h"
#include "plan/tables_file.h"
#include "threads/threads.h"

namespace dsacore {

/// What the tables say for one number of rows.
struct TunedPlan {
  std::array<std::string, kStages> kernels;  ///< by StageId; "auto": the first that accepts
  std::string overlap, unfused_overlap;

  bool operator==(const TunedPlan&) const = default;
  /// As an overlay for prepare.
  BenchPlan laid_over() const;
};

/// What there is to choose.
struct TuneSpace {
  std::array<std::vector<std::string>, kStages> kernels;  ///< by StageId: those that accept the shape
  std::vector<std::string> overlaps;
  std::string unfused_indexer;  ///< empty: there is none
};

/// How plans are told apart and measured.
struct TuneProbe {
  FunctionRef<std::string(const BenchPlan&)> choices;  ///< what a plan comes to; equal texts run alike
  FunctionRef<double(const BenchPlan&)> seconds;
};

/// Seconds of a plan, and of the one that the tables had.
struct TunedTimes {
  double before = 0, after = 0;
};

/// Changes one thing at a time: the mode, each stage's kernel, the mode again. A change stays where it gains more than
/// `gain` (0.02: 2 %), twice measured. Then the mode for an indexer that is not fused.
TunedPlan search_plan(const TunedPlan& start, const TuneSpace& space, double gain, const TuneProbe& probe,
                      TunedTimes& times);

/// What was found for a shape.
struct TunedShape {
  int heads = 0, rows = 0;
  TunedPlan plan;
};

/// Whether a kernel may be named for up to `heads` (more than `heads_below`) heads and `rows` rows, whatever the
/// formats and sizes.
using AlwaysAccepts = FunctionRef<bool(StageId stage, std::string_view kernel, int heads_below, int heads, int rows)>;

/// One entry for each number of heads, ascending, the last for all above; fewer where two would say the same. Rows take
/// the plan of the next larger number measured, those above the largest its; where its kernel does not always accept,
/// the table says nothing. `shapes`: every combination of heads and rows, at least one. `before`: the partial format's
/// table is kept.
std::vector<TablesEntry> tuned_entries(std::vector<TunedShape> shapes, const TablesEntry& before,
                                       AlwaysAccepts accepts);

}  // namespace dsacore
