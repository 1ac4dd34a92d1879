// generate -> run -> check -> inspect, as a user goes.
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "format/numeric.h"
#include "io/out_file.h"

namespace dsacore::test {
namespace {

using nlohmann::json;

class Chain : public ProgramTest {};

std::vector<double> values_of(const TensorView& tensor) {
  std::vector<double> values;
  for (int64_t i = 0; i < tensor.elements(); ++i) values.push_back(double(to_float(tensor.as<BFloat16>()[i])));
  return values;
}

double relative_error(const std::vector<double>& got, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

TEST_F(Chain, GeneratesRunsChecksInspects) {
  generate();
  const Ran ran = run("out.safetensors", {"--dump", "all", "--threads", "2"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_TRUE(ran.err.empty()) << ran.err;
  EXPECT_NE(ran.out.find("B=4 q=1 H=4 index_heads=8 q_lora=128 topk=16, 4 requests up to 90 tokens"), std::string::npos)
      << ran.out;

  const Ran checked = run_program({"check", "--layer", layer(), "--step", step()});
  EXPECT_EQ(checked.status, 0) << checked.out << checked.err;
  EXPECT_NE(checked.out.find("the backends agree"), std::string::npos) << checked.out;

  for (const auto& [file, word] :
       {std::pair(layer(), "q_b_proj.weight"), {step(), "block_table"}, {path("out.safetensors"), "lse"}}) {
    const Ran inspected = run_program({"inspect", file});
    EXPECT_EQ(inspected.status, 0) << inspected.err;
    EXPECT_NE(inspected.out.find(word), std::string::npos) << inspected.out;
  }
}

TEST_F(Chain, GeneratesTheSameBytesAgain) {
  generate();
  const std::string layer_bytes = read_text(layer()), step_bytes = read_text(step());
  generate();
  EXPECT_EQ(layer_bytes, read_text(layer()));
  EXPECT_EQ(step_bytes, read_text(step()));
}

TEST_F(Chain, TakesTheOptionsOfTheCase) {
  generate({"--q",
            "2",
            "--kv-format",
            "nvfp4_ds_mla",
            "--index-format",
            "mxfp4",
            "--page",
            "128",
            "--stride-rows",
            "384",
            "--index-table",
            "--pitch-pad",
            "8",
            "--pad-requests",
            "1",
            "--slots",
            "mixed",
            "--spare-pages",
            "1",
            "--k-norm",
            "bf16",
            "--no-k-bias"});
  const json about = json::parse(run_program({"inspect", step(), "--json"}).out);
  EXPECT_EQ(about["facts"]["q"], 2);
  EXPECT_EQ(about["facts"]["lengths"]["padded"], 1);
  EXPECT_EQ(about["facts"]["kv_cache"]["page"], 128);
  EXPECT_EQ(about["facts"]["kv_cache"]["stride_rows"], 384);
  EXPECT_EQ(about["facts"]["kv_cache"]["row_bytes"], 352);
  EXPECT_EQ(about["facts"]["index_cache"]["row_bytes"], 68);
  EXPECT_EQ(about["facts"]["index block table"], true);
  const json of_layer = json::parse(run_program({"inspect", layer(), "--json"}).out);
  EXPECT_EQ(of_layer["facts"]["index key bias"], false);
  const Ran ran = run("out.safetensors", {"--dump", "all"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  const OutFile out = read_out_file(path("out.safetensors"));
  EXPECT_EQ(out.tensors.kv_cache.rank, 2) << "a flat cache stays flat";
  EXPECT_EQ(run_program({"check", "--layer", layer(), "--step", step()}).status, 0);
}

TEST_F(Chain, TakesAdversarialValuesWithAndWithoutAList) {
  generate({"--adversarial"});
  EXPECT_EQ(run_program({"check", "--layer", layer(), "--step", step()}).status, 0);
  generate({"--adversarial", "ties,zero"});
  EXPECT_EQ(run_program({"check", "--layer", layer(), "--step", step()}).status, 0);
}

TEST_F(Chain, RunsTheOraclesCases) {
  for (const char* name :
       {"1-fp8_ds_mla-fp8", "2-fp8-mxfp4", "3-nvfp4_ds_mla-fp8", "4-fp8_ds_mla-mxfp4", "5-q3-padded", "6-ties"}) {
    const std::string folder = std::string(DSACORE_ORACLE_CASES) + "/" + name;
    const Ran checked =
        run_program({"check", "--layer", folder + "/layer.safetensors", "--step", folder + "/step.safetensors"});
    EXPECT_EQ(checked.status, 0) << name << "\n" << checked.out << checked.err;
  }
}

TEST_F(Chain, WritesOnlyTheOutputWithoutADump) {
  generate();
  ASSERT_EQ(run("out.safetensors").status, 0);
  const OutFile out = read_out_file(path("out.safetensors"));
  EXPECT_FALSE(out.tensors.out.empty());
  for (const auto& [name, tensor] : out.tensors.named()) EXPECT_TRUE(name == "out" || tensor->empty()) << name;
}

TEST_F(Chain, LeavesTheStepFileAsItWas) {
  generate();
  const std::string before = read_text(step());
  ASSERT_EQ(run("out.safetensors", {"--dump", "all"}).status, 0);
  EXPECT_TRUE(before == read_text(step()));
}

class Ranks : public Chain, public ::testing::WithParamInterface<std::tuple<int, const char*, int>> {};

TEST_P(Ranks, GiveWhatOneRankGives) {
  const auto [ranks, partial, interleave] = GetParam();
  generate();
  ASSERT_EQ(run("one.safetensors", {"--dump", "all"}).status, 0);
  const std::vector<std::string> more = {"--dump",    "all",   "--dcp",        std::to_string(ranks),
                                         "--partial", partial, "--interleave", std::to_string(interleave)};
  const Ran ran = run("ranks.safetensors", more);
  ASSERT_EQ(ran.status, 0) << ran.err;
  const OutFile one = read_out_file(path("one.safetensors")), several = read_out_file(path("ranks.safetensors"));
  EXPECT_LT(relative_error(values_of(several.tensors.out), values_of(one.tensors.out)), 8e-3);
  for (int64_t i = 0; i < one.tensors.topk_tokens.elements(); ++i) {
    ASSERT_EQ(one.tensors.topk_tokens.as<int32_t>()[i], several.tensors.topk_tokens.as<int32_t>()[i]) << "at " << i;
  }
  EXPECT_TRUE(several.tensors.topk_rows.empty());
  EXPECT_TRUE(several.tensors.kv_cache.empty());
  EXPECT_EQ(several.tensors.latent.empty(), std::string(partial) == "proj");
  const Ran checked = run_program({"check", "--layer", layer(), "--step", step(), "--dcp", std::to_string(ranks),
                                   "--partial", partial, "--interleave", std::to_string(interleave)});
  EXPECT_EQ(checked.status, 0) << checked.out << checked.err;
}

INSTANTIATE_TEST_SUITE_P(Formats, Ranks,
                         ::testing::Values(std::tuple(2, "bf16", 1), std::tuple(2, "proj", 1), std::tuple(4, "bf16", 3),
                                           std::tuple(4, "proj", 64)));

TEST_F(Chain, PrintsJson) {
  generate();
  const Ran ran = run("out.safetensors", {"--json", "--backend", "reference"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json summary = json::parse(ran.out);
  EXPECT_EQ(summary["backend"], "reference");
  EXPECT_EQ(summary["target"], "scalar");
  EXPECT_EQ(summary["shape"]["longest"], 90);
  EXPECT_EQ(summary["stages"].size(), 5u);
  EXPECT_GT(summary["run_seconds"].get<double>(), 0);
  int64_t reserved = 0;
  for (const json& item : summary["reserved"]) reserved += item["bytes"].get<int64_t>();
  EXPECT_EQ(summary["reserved_bytes"], reserved);

  const json checked = json::parse(run_program({"check", "--layer", layer(), "--step", step(), "--json"}).out);
  EXPECT_EQ(checked["agree"], true);
  EXPECT_EQ(checked["lines"].size(), 12u) << "every tensor of a dump";
}

TEST_F(Chain, ReadsTheEnvironment) {
  generate();
  const std::vector<std::string> arguments = {"run",  "--layer", layer(),   "--step",
                                              step(), "--out",   path("o"), "--json"};
  const json summary = json::parse(run_program(arguments, {"DSACORE_THREADS=3"}).out);
  EXPECT_EQ(summary["threads"], 3);
  const Ran refused = run_program(arguments, {"DSACORE_CPU_TARGET=mmx"});
  EXPECT_EQ(refused.status, 2);
  EXPECT_NE(refused.err.find("DSACORE_CPU_TARGET = mmx"), std::string::npos) << refused.err;
}

TEST_F(Chain, ShowsAPlan) {
  const Ran ran = run_program(
      {"inspect", "--plan", "kv=fp8,index=mxfp4,B=4,q=2,H=4,len=9000,dcp=2,q_lora=256", "--partial", "proj", "--json"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  const json plan = json::parse(ran.out);
  EXPECT_EQ(plan["partial"], "proj");
  EXPECT_EQ(plan["stages"].size(), 8u);
  for (const json& stage : plan["stages"]) {
    EXPECT_FALSE(stage["kernel"].get<std::string>().empty());
    for (const json& other : stage["others"])
      EXPECT_FALSE(other["why_not"].get<std::string>().empty()) << stage["stage"];
  }
  EXPECT_GT(plan["reserved_bytes"].get<int64_t>(), 0);
  const Ran text = run_program({"inspect", "--plan", "kv=fp8,B=4,H=4,len=900,q_lora=256"});
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_NE(text.out.find("sparse_core"), std::string::npos);
  EXPECT_NE(text.out.find("plan for 4 rows"), std::string::npos);
  const Ran shared =
      run_program({"inspect", "--plan", "kv=fp8,B=4,H=4,len=900,q_lora=256", "--plan-rows", "64,12", "--json"});
  EXPECT_EQ(json::parse(shared.out)["plan_rows"], 12);
}

TEST_F(Chain, WritesTheSameOutputUnderACapacity) {
  generate();
  ASSERT_EQ(run("own.safetensors", {"--dump", "all"}).status, 0);
  ASSERT_EQ(run("shared.safetensors", {"--dump", "all", "--plan-rows", "16"}).status, 0);
  EXPECT_EQ(read_text(path("own.safetensors")), read_text(path("shared.safetensors")));
}

}  // namespace
}  // namespace dsacore::test
