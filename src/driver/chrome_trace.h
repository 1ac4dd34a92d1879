// A timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing show.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dsacore {

/// Something that took time; times count from any one moment.
struct TraceSlice {
  std::string name;
  std::string stage;
  int layer = 0;
  int run = 0;
  int64_t begin_ns = 0, end_ns = 0;
};

struct TraceRow {
  std::string name;
  std::vector<TraceSlice> slices;  ///< in any order
};

struct ChromeTrace {
  std::string title;
  std::vector<TraceRow> rows;  ///< from top to bottom
};

/// Slices of a row that overlap get rows of their own below it, "NAME (2)" and so on: viewers drop what overlaps in
/// one. The earliest slice begins at 0.
std::string chrome_trace_text(const ChromeTrace& trace);

}  // namespace dsacore
