// bench: its JSON and its picture.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/markup.h"
#include "cli/program.h"

namespace dsacore::test {
namespace {

using nlohmann::json;

class Bench : public ProgramTest {
 protected:
  Ran bench(const std::string& contexts, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"bench", "--context", contexts, "--q-lora", "128", "--index-heads",
                                          "8",     "--topk",    "32",     "--repeat", "4",   "--bandwidth",
                                          "10"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    for (const char* sizes : {"--heads", "--batch"}) {
      if (std::find(more.begin(), more.end(), sizes) == more.end()) arguments.insert(arguments.end(), {sizes, "2"});
    }
    return run_program(arguments);
  }
};

TEST_F(Bench, WritesJsonAndAPicture) {
  const Ran ran = bench("70,300", {"--json", "--plot", path("bench.svg"), "--layers", "2"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json result = json::parse(ran.out);
  EXPECT_EQ(result["bytes_per_second"], 10e9);
  ASSERT_EQ(result["points"].size(), 2u);
  for (const json& point : result["points"]) {
    EXPECT_EQ(point["layers"], 2);
    ASSERT_EQ(point["stages"].size(), 5u);
    double floors = 0;
    for (const json& stage : point["stages"]) {
      const json& seconds = stage["seconds"];
      EXPECT_GT(seconds["min"].get<double>(), 0) << stage["name"];
      EXPECT_LE(seconds["min"].get<double>(), seconds["median"].get<double>()) << stage["name"];
      EXPECT_LE(seconds["median"].get<double>(), seconds["p99"].get<double>()) << stage["name"];
      EXPECT_GE(stage["floor_seconds"].get<double>() * 1.0000001, stage["bytes"].get<double>() / 10e9) << stage["name"];
      floors += stage["floor_seconds"].get<double>();
    }
    EXPECT_NEAR(point["layer"]["floor_seconds"].get<double>(), floors, 1e-12);
  }
  // 2 heads: W_QB 384 x 128 and W_UK 2 x 128 x 512 are read whole.
  EXPECT_GE(result["points"][0]["stages"][0]["bytes"].get<double>(), 2 * (384 * 128 + 2 * 128 * 512));

  const std::string svg = read_text(path("bench.svg"));
  EXPECT_TRUE(well_formed(svg));
  EXPECT_TRUE(svg.starts_with("<svg "));
  for (const char* word : {"sparse_core", "whole layer", "floor", "context"})
    EXPECT_NE(svg.find(word), std::string::npos) << word;
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST_F(Bench, MeasuresEveryCombination) {
  const Ran ran = bench("70", {"--json", "--heads", "1,3", "--batch", "2,4", "--kv-format", "fp8,nvfp4_ds_mla",
                               "--overlap", "serial", "--overlap", "front"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json points = json::parse(ran.out)["points"];
  ASSERT_EQ(points.size(), 16u);
  std::set<std::string> shapes;
  for (const json& point : points) {
    shapes.insert(point["heads"].dump() + point["batch"].dump() + point["kv_format"].dump() + point["overlap"].dump());
    EXPECT_EQ(point["context"], 70);
    EXPECT_EQ(point.count("agrees"), 0u);
  }
  EXPECT_EQ(shapes.size(), 16u);
}

TEST_F(Bench, RefusesWhatItCannotMeasureOrShow) {
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{"--q", "3"}, {"--verify"}, {"--heads", "1,2", "--plot", path("two.svg")}}) {
    const Ran ran = bench("70", more);
    EXPECT_EQ(ran.status, 2) << more[0];
    EXPECT_NE(ran.err.find(more.size() > 2 ? "--plot" : more[0]), std::string::npos) << ran.err;
  }
}

TEST_F(Bench, PrintsATable) {
  const Ran ran = bench("40", {"--backend", "reference", "--plot", path("one.svg")});
  ASSERT_EQ(ran.status, 0) << ran.err;
  for (const char* word : {"median", "p99", "floor", "indexer", "layer", "reference on scalar"}) {
    EXPECT_NE(ran.out.find(word), std::string::npos) << word << "\n" << ran.out;
  }
  EXPECT_TRUE(well_formed(read_text(path("one.svg")))) << "one context";
}

}  // namespace
}  // namespace dsacore::test
