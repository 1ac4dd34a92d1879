// Times of prepared runs over synthetic inputs: per stage and for the whole layer, rotating over several layers where
// asked, so that weights and caches come from memory as they do in a model. What `dsacore bench` prints and plots, and
// what `dsacore tune` chooses by.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "driver/agreement.h"
#include "driver/cache_pool.h"
#include "driver/run_case.h"
#include "driver/stage_work.h"
#include "io/generate.h"

namespace dsacore {

struct BenchOptions {
  CaseOptions shape;  ///< `context` one length for all requests
  RunOptions run;     ///< backend, device, target, threads, tables; one rank
  int repeat = 30;    ///< timed runs
  /// Rotated over, each with weights and caches in memory of its own. 0: one on the host; on a device 4 to 8, so that
  /// what a layer reads has left the caches before it comes round again.
  int layers = 0;
  bool verify = false;           ///< device: judge the first layer by the cpu backend before it is timed
  std::function<void()> on_run;  ///< after each run, for progress
};

/// What is laid over the tables, as in `PrepareOptions`.
struct BenchPlan {
  std::string overlap, kernels;
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
  CaseOptions shape;
  std::vector<BenchStage> stages;  ///< in the order in which they run
  std::vector<BenchStage> chains;  ///< device: stages that follow each other, "sparse_core+value"
  BenchStage layer;                ///< work: the sum of the stages'
  double floor = 0;                ///< seconds: the sum of the stages' floors
  std::string choices;             ///< kernels and overlap mode, as `PreparedLayer::choices`
  OverlapMode overlap = OverlapMode::kSerial;
  int64_t reserved_bytes = 0;
  std::string target;
  std::string device;  ///< and its driver; empty: the host
  int threads = 0;
  int layers = 0;
  std::vector<AgreementLine> verified;  ///< with `verify`

  bool agrees() const;
};

/// Layers of one shape over inputs of their own, to be timed under one plan after the other.
///
/// On a device all layers in turn are recorded once, and so is each stage of all layers alone, and their replays are
/// timed there: the whole layer overlaps its stages as it does in a model, and a stage overlaps with itself. Caches are
/// filled there from a pool, so that their size costs no time on the host.
class BenchCase {
 public:
  /// Makes the inputs. `pool` is filled from where there is a device. Throws what making, placing and running throw.
  BenchCase(const BenchOptions& options, CachePool& pool);
  ~BenchCase();
  BenchCase(const BenchCase&) = delete;
  BenchCase& operator=(const BenchCase&) = delete;

  /// Prepares all layers, warms up, times. Throws what preparing, running and verifying throw.
  BenchPoint time(const BenchPlan& plan, const Peaks& peaks);
  /// The median of the whole layer alone.
  double layer_seconds(const BenchPlan& plan);
  /// What a plan comes to, in words: kernels and overlap mode. Throws what preparing throws.
  std::string choices(const BenchPlan& plan);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Times that `on_run` is called for a plan.
int bench_runs(const BenchOptions& options);

}  // namespace dsacore
