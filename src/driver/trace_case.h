// Timelines of prepared runs: of the stages and the workers on the host, of kernels and streams on a device. What
// `dsacore trace` writes. Tracing must not change what a run gives, so the same runs are made without it first.
#pragma once

#include <string>
#include <vector>

#include "driver/chrome_trace.h"
#include "driver/inputs.h"
#include "driver/run_case.h"

namespace dsacore {

struct TraceOptions {
  RunOptions run;     ///< backend, device, target, threads, tables, overlap; one rank
  int layers = 4;     ///< that take turns, each with a copy of the inputs
  int repeat = 3;     ///< traced runs of each
  std::string cupti;  ///< cuda: the file of CUPTI's library; empty: searched for
};

/// The slices of one name in one row of the timeline, all runs together.
struct TracedPart {
  std::string row, stage, name;
  std::vector<double> seconds;
  /// By how much it began before what precedes it in its row had ended; at most 0 where it waited.
  std::vector<double> early_seconds;
};

struct TraceResult {
  ChromeTrace trace;
  std::vector<TracedPart> parts;  ///< in the order in which they first began; the workers are left out
  int threads = 0;
  std::vector<std::string> choices;
  double plain_seconds = 0;         ///< all layers once, without tracing, median
  double traced_seconds = 0;        ///< the same under tracing
  std::vector<int> changed_layers;  ///< whose output has other bits under tracing; must be empty
};

/// The middle one, the larger of two; 0 of none.
double median(std::vector<double> values);

/// Runs `layers` layers over copies of the inputs, in turn: on a device recorded once and replayed. Throws what
/// preparing and running throw, and what the device's tracer does.
TraceResult trace_case(const Inputs& inputs, const TraceOptions& options);

}  // namespace dsacore
