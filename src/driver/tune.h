// tune: measures kernels and overlap modes on the machine in hand and gives the tables that serve it best.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "driver/bench_case.h"
#include "driver/tune_search.h"

namespace dsacore {

struct TuneOptions {
  CaseOptions shape;                ///< formats, q, context, sizes; heads and rows come from the lists
  RunOptions run;                   ///< backend, device, target, threads, the tables to start from
  std::vector<int> heads, batches;  ///< batches: multiples of q
  int repeat = 30;                  ///< timed runs of each plan
  double gain = 0.02;               ///< what a change must gain to stay
  std::function<void(const std::string& shape)> on_shape;  ///< before each shape, for progress
};

/// What was found for a shape, in words.
struct TuneFinding {
  int heads = 0, rows = 0;
  TunedTimes times;  ///< seconds of a layer
  std::string before, after;
};

struct TuneResult {
  std::vector<TuneFinding> findings;
  std::string text;  ///< of the tables file
};

/// `date` and `program` go into the file. Throws what making, preparing and running throw, and `kRefused` naming
/// "--batches" where one is no multiple of q.
TuneResult tune(const TuneOptions& options, const std::string& date, const std::string& program);

}  // namespace dsacore
