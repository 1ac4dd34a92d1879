// trace: the timeline that it writes, from sizes and from files, and what it refuses.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/program.h"
#include "dsacore/version.h"

namespace dsacore::test {
namespace {

using nlohmann::json;

class Trace : public ProgramTest {
 protected:
  Ran trace(const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"trace", "--out", path("trace.json")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  }
  Ran trace_sizes(const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"--heads",  "2",   "--batch",       "2", "--context", "70,300",
                                          "--q-lora", "128", "--index-heads", "8", "--topk",    "32"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return trace(arguments);
  }
  /// Slices of a row, by its name.
  std::vector<json> slices_of(const std::string& row) const {
    const json trace = json::parse(read_text(path("trace.json")));
    int number = -1;
    std::vector<json> slices;
    for (const json& event : trace["traceEvents"]) {
      if (event["name"] == "thread_name" && event["args"]["name"] == row) number = event["tid"];
      if (event["ph"] == "X" && event["tid"] == number) slices.push_back(event);
    }
    return slices;
  }
};

TEST_F(Trace, OfSizesShowsEveryStageOfEveryLayerAndRun) {
  const Ran ran = trace_sizes({"--layers", "2", "--repeat", "2", "--threads", "2"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_NE(ran.out.find("the same bits"), std::string::npos) << ran.out;
  std::set<std::string> seen;
  for (const json& slice : slices_of("stages")) {
    EXPECT_GT(slice["dur"].get<double>(), 0);
    EXPECT_GE(slice["ts"].get<double>(), 0);
    seen.insert(slice["name"].get<std::string>() + slice["args"]["layer"].dump() + slice["args"]["run"].dump());
  }
  std::set<std::string> all;
  for (const std::string stage : {"query", "index_projection", "indexer", "sparse_core", "value"}) {
    for (const char* which : {"00", "01", "10", "11"}) all.insert(stage + which);
  }
  EXPECT_EQ(seen, all);
  EXPECT_EQ(slices_of("layers").size(), 4u);
  EXPECT_GT(slices_of("worker 0").size() + slices_of("worker 1").size(), 0u);
}

TEST_F(Trace, OfFilesLeavesThemAsTheyAre) {
  generate();
  const std::string before = read_text(step());
  const Ran ran =
      trace({"--layer", layer(), "--step", step(), "--backend", "reference", "--layers", "1", "--repeat", "1"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(slices_of("stages").size(), 5u);
  EXPECT_EQ(read_text(step()), before);
}

TEST_F(Trace, RefusesWhatItCannotReadOrWrite) {
  EXPECT_EQ(trace({"--layer", "x"}).status, 2);
  EXPECT_EQ(trace({"--layer", path("none"), "--step", path("none")}).status, 2);
  const Ran ran = run_program({"trace", "--heads", "1", "--batch", "1", "--context", "9", "--q-lora", "128", "--topk",
                               "4", "--index-heads", "8", "--out", path("none/trace.json")});
  EXPECT_EQ(ran.status, 2);
  EXPECT_NE(ran.err.find("none/trace.json"), std::string::npos) << ran.err;
  EXPECT_FALSE(std::filesystem::exists(path("trace.json")));
}

TEST_F(Trace, WithoutItsDeviceSaysSo) {
  const Ran ran = trace_sizes({"--backend", "cuda"});
  if (ran.status == 0) GTEST_SKIP() << "there is a device";
  EXPECT_NE(ran.err.find(backends() == "reference cpu" ? "not built in" : "CUDA d"), std::string::npos) << ran.err;
  EXPECT_FALSE(std::filesystem::exists(path("trace.json")));
}

}  // namespace
}  // namespace dsacore::test
