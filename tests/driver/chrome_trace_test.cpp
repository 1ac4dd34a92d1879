// The timeline's JSON: rows in their order, times from the first beginning, nothing overlapping within a row.
#include "driver/chrome_trace.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace dsacore {
namespace {

using nlohmann::json;

/// Slices (name, ts, dur) by the name of their row.
std::map<std::string, std::vector<std::tuple<std::string, double, double>>> rows_of(const json& trace) {
  std::map<int, std::string> names;
  std::map<std::string, std::vector<std::tuple<std::string, double, double>>> rows;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "M" && event["name"] == "thread_name") names[event["tid"]] = event["args"]["name"];
    if (event["ph"] == "X") rows[names.at(event["tid"])].emplace_back(event["name"], event["ts"], event["dur"]);
  }
  return rows;
}

TEST(ChromeTrace, CountsMicrosecondsFromTheFirstBeginning) {
  ChromeTrace trace{"a title", {{"main stream", {{"b", "query", 1, 2, 7500, 9000}}}, {"side stream", {}}}};
  trace.rows[1].slices.push_back({"a \"quoted\" name", "value", 0, 0, 5000, 6001});
  const json parsed = json::parse(chrome_trace_text(trace));
  EXPECT_EQ(parsed["displayTimeUnit"], "ns");
  const auto rows = rows_of(parsed);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows.at("main stream"), (decltype(rows)::mapped_type{{"b", 2.5, 1.5}}));
  EXPECT_EQ(rows.at("side stream"), (decltype(rows)::mapped_type{{"a \"quoted\" name", 0, 1.001}}));
  for (const json& event : parsed["traceEvents"]) {
    if (event["name"] == "process_name") {
      EXPECT_EQ(event["args"]["name"], "a title");
    }
    if (event["name"] == "b") {
      EXPECT_EQ(event["args"], (json{{"stage", "query"}, {"layer", 1}, {"run", 2}}));
    }
  }
}

TEST(ChromeTrace, PutsWhatOverlapsIntoRowsOfItsOwn) {
  // "b" begins before "a" has ended, "c" when "a" has and "b" has not, "d" when both have.
  const ChromeTrace trace{
      "",
      {{"row", {{"d", "", 0, 0, 40, 50}, {"a", "", 0, 0, 0, 10}, {"c", "", 0, 0, 10, 30}, {"b", "", 0, 0, 9, 20}}}}};
  const auto rows = rows_of(json::parse(chrome_trace_text(trace)));
  ASSERT_EQ(rows.size(), 2u);
  const auto names = [&](const char* row) {
    std::string all;
    for (const auto& slice : rows.at(row)) all += std::get<0>(slice);
    return all;
  };
  EXPECT_EQ(names("row"), "acd");
  EXPECT_EQ(names("row (2)"), "b");
}

TEST(ChromeTrace, OfNothingIsValid) {
  const json parsed = json::parse(chrome_trace_text({"nothing", {{"row", {}}}}));
  EXPECT_EQ(parsed["traceEvents"].size(), 1u) << "the title";
}

}  // namespace
}  // namespace dsacore
