// The picture of a benchmark: for each context the stages stacked beside their floors, and times against context on log
// axes.
#pragma once

#include <string>
#include <vector>

#include "driver/bench_case.h"

namespace dsacore::cli {

struct BenchPlot {
  std::string title, subtitle;
  std::vector<BenchPoint> points;
  Peaks peaks;
};

/// An SVG document with a light background.
std::string bench_svg(const BenchPlot& plot);

}  // namespace dsacore::cli
