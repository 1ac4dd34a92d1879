// What a stage of a step must move and compute at least: the floor under its time. Counted from the inputs, for one
// rank.
#pragma once

#include "driver/inputs.h"
#include "plan/stage_id.h"

namespace dsacore {

struct Work {
  double bytes = 0;  ///< read once and written once, each cache row once per request (indexer) or row (sparse core)
  double flops = 0;  ///< a multiply and an add are two
};

/// Stages of a single rank; others have no work of their own.
Work stage_work(StageId stage, const Inputs& inputs);

/// What the machine can do; 0: not known.
struct Peaks {
  double bytes_per_second = 0;
  double flops_per_second = 0;
};

/// Seconds that the work takes at least: the longer of moving and computing.
double floor_seconds(const Work& work, const Peaks& peaks);

}  // namespace dsacore
