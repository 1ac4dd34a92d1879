// Times of prepared runs over synthetic inputs: per stage and for the whole layer, rotating over several layers where
// asked, so that weights and caches come from memory as they do in a model. What `dsacore bench` prints and plots.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "driver/run_case.h"
#include "driver/stage_work.h"
#include "io/generate.h"

namespace dsacore {

struct BenchOptions {
  CaseOptions shape;  ///< `context` one length for all requests
  RunOptions run;     ///< backend, target, threads, tables, overlap; one rank
  int repeat = 30;    ///< timed runs
  /// Rotated over, each with weights and caches in memory of its own. 0: one on the host; on a device 8, or 6 or 4
  /// where its memory is short.
  int layers = 0;
  std::function<void()> on_run;  ///< after each run, for progress
};

/// One stage, or the whole layer.
struct BenchStage {
  std::string name;
  std::vector<double> seconds;  ///< a value a run, ascending; on a device the mean over the layers of a replay
  Work work;                    ///< mean over the layers

  double percentile(double share) const;  ///< 0.5: the median
  double median() const { return percentile(0.5); }
};

struct BenchPoint {
  std::string context;
  std::vector<BenchStage> stages;  ///< in the order in which they run
  BenchStage layer;                ///< work: the sum of the stages'
  double floor = 0;                ///< seconds: the sum of the stages' floors
  std::vector<std::string> choices;
  int64_t reserved_bytes = 0;
  std::string target;
  int threads = 0;
  int layers = 0;
};

/// Makes the inputs, warms up, times. Throws what preparing and running throw.
///
/// On a device all layers in turn are recorded once, and so is each stage of all layers alone, and their replays are
/// timed there: the whole layer overlaps its stages as it does in a model, and a stage overlaps with itself.
BenchPoint bench_case(const BenchOptions& options, const Peaks& peaks);

/// Times that `on_run` is called.
int bench_runs(const BenchOptions& options);

}  // namespace dsacore
