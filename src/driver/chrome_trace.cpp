#include "driver/chrome_trace.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

namespace dsacore {
namespace {

using nlohmann::ordered_json;

constexpr int kProcess = 1;

/// The slices in rows in which none overlaps another: each in the first that is free.
std::vector<std::vector<TraceSlice>> apart(std::vector<TraceSlice> slices) {
  std::sort(slices.begin(), slices.end(),
            [](const TraceSlice& a, const TraceSlice& b) { return a.begin_ns < b.begin_ns; });
  std::vector<std::vector<TraceSlice>> rows;
  for (TraceSlice& slice : slices) {
    auto row = std::find_if(rows.begin(), rows.end(),
                            [&](const auto& taken) { return taken.back().end_ns <= slice.begin_ns; });
    if (row == rows.end()) row = rows.emplace(rows.end());
    row->push_back(std::move(slice));
  }
  return rows;
}

int64_t earliest(const ChromeTrace& trace) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const TraceRow& row : trace.rows) {
    for (const TraceSlice& slice : row.slices) first = std::min(first, slice.begin_ns);
  }
  return first;
}

ordered_json named(const char* what, int row, const char* key, const ordered_json& value) {
  return {{"ph", "M"}, {"name", what}, {"pid", kProcess}, {"tid", row}, {"args", {{key, value}}}};
}

}  // namespace

std::string chrome_trace_text(const ChromeTrace& trace) {
  constexpr double kNsOfUs = 1000;  // the format counts in microseconds
  const int64_t first = earliest(trace);
  ordered_json events = ordered_json::array();
  events.push_back(named("process_name", 0, "name", trace.title));
  int number = 0;
  for (const TraceRow& row : trace.rows) {
    int below = 0;
    for (const std::vector<TraceSlice>& slices : apart(row.slices)) {
      ++number;
      ++below;
      events.push_back(
          named("thread_name", number, "name", below == 1 ? row.name : row.name + " (" + std::to_string(below) + ")"));
      events.push_back(named("thread_sort_index", number, "sort_index", number));
      for (const TraceSlice& slice : slices) {
        events.push_back({{"ph", "X"},
                          {"name", slice.name},
                          {"cat", slice.stage},
                          {"pid", kProcess},
                          {"tid", number},
                          {"ts", double(slice.begin_ns - first) / kNsOfUs},
                          {"dur", double(slice.end_ns - slice.begin_ns) / kNsOfUs},
                          {"args", {{"stage", slice.stage}, {"layer", slice.layer}, {"run", slice.run}}}});
      }
    }
  }
  return ordered_json{{"displayTimeUnit", "ns"}, {"traceEvents", events}}.dump(1);
}

}  // namespace dsacore
