// Bad input: exit status 2, a message that names the argument, its value and what is allowed, and no output file.
#include <filesystem>

#include "cli/program.h"
#include "dsacore/version.h"
#include "io/layer_file.h"
#include "io/step_file.h"

namespace dsacore::test {
namespace {

class Refusals : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    generate();
  }

  /// The run is refused with all of `parts` in its message, and writes nothing.
  void expect_refused(const Ran& ran, const std::vector<std::string>& parts) {
    EXPECT_EQ(ran.status, 2) << ran.out << ran.err;
    EXPECT_TRUE(ran.err.starts_with("dsacore: ")) << ran.err;
    for (const std::string& part : parts)
      EXPECT_NE(ran.err.find(part), std::string::npos) << part << " is not in: " << ran.err;
    EXPECT_TRUE(ran.out.empty()) << ran.out;
    EXPECT_FALSE(std::filesystem::exists(path("out.safetensors")));
  }

  Ran run_files(const std::string& layer_file, const std::string& step_file,
                const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {
        "run", "--layer", layer_file, "--step", step_file, "--out", path("out.safetensors")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  }

  /// Changes the step and writes it again.
  template <class Change>
  void change_step(Change change) {
    StepFile file = read_step_file(step());
    change(file);
    write_step_file(path("changed.safetensors"), file.step, file.kv, file.index);
  }
};

TEST_F(Refusals, MissingFile) {
  expect_refused(run_files(path("none.safetensors"), step()), {"none.safetensors", "No such file"});
  expect_refused(run_files(layer(), path("none.safetensors")), {"none.safetensors", "No such file"});
}

TEST_F(Refusals, TruncatedFile) {
  const std::string whole = read_text(step());
  for (size_t size : {size_t(0), size_t(5), size_t(200), whole.size() / 2, whole.size() - 1}) {
    write_text(path("cut.safetensors"), whole.substr(0, size));
    expect_refused(run_files(layer(), path("cut.safetensors")), {"cut.safetensors"});
  }
}

TEST_F(Refusals, FilesSwapped) {
  expect_refused(run_files(step(), layer()), {"format = dsacore.step", "dsacore.layer"});
}

TEST_F(Refusals, OutputThatCannotBeWritten) {
  const Ran ran = run_program({"run", "--layer", layer(), "--step", step(), "--out", path("none/out.safetensors")});
  expect_refused(ran, {"none/out.safetensors"});
}

TEST_F(Refusals, UnknownOptionsAndValues) {
  expect_refused(run("out.safetensors", {"--backend", "gpu"}), {"--backend", "gpu", "reference", "cpu", "cuda"});
  expect_refused(run("out.safetensors", {"--bakend", "cpu"}), {"--bakend", "did you mean --backend?"});
  expect_refused(run("out.safetensors", {"--threads", "0"}), {"--threads", "0", "1", "1024"});
  expect_refused(run("out.safetensors", {"--threads", "two"}), {"--threads", "two"});
  expect_refused(run("out.safetensors", {"--dcp", "9"}), {"--dcp", "9", "8"});
  expect_refused(run("out.safetensors", {"--dump", "some"}), {"--dump", "some", "all"});
  expect_refused(run("out.safetensors", {"--cpu-target", "mmx"}), {"cpu_target = mmx", "this machine runs"});
  expect_refused(run("out.safetensors", {"--overlap", "sideways"}), {"sideways"});
  expect_refused(run("out.safetensors", {"--plan-rows", "16,257"}), {"plan_rows = 257", "1..256"});
  expect_refused(run_program({"rnu"}), {"rnu", "did you mean run?"});
  expect_refused(run_program({}), {"subcommand"});
  expect_refused(run_program({"run", "--layer", layer(), "--step", step()}), {"--out"});
}

TEST_F(Refusals, WhatIsNotBuiltIn) {
  if (backends() == "reference cpu") {
    expect_refused(run("out.safetensors", {"--backend", "cuda"}), {"backend = cuda", "not built in", "reference cpu"});
  }
  for (const char* transport : {"shm", "mpi", "cuda", "nccl"}) {
    expect_refused(run("out.safetensors", {"--dcp", "2", "--transport", transport}),
                   {transport, "not built in", "threads"});
  }
  expect_refused(run("out.safetensors", {"--rank", "1"}), {"rank = 1"});
  expect_refused(run("out.safetensors", {"--rendezvous", "x"}), {"rendezvous = x"});
}

TEST_F(Refusals, ABackendWithoutItsDevice) {
  if (backends() != "reference cpu cuda") GTEST_SKIP() << "built without the cuda backend";
  const Ran ran = run("out.safetensors", {"--backend", "cuda"});
  if (ran.status == 0) GTEST_SKIP() << "there is a device";
  expect_refused(ran, {"CUDA d", "the cuda backend needs"});
  expect_refused(run("out.safetensors", {"--backend", "cuda", "--dcp", "2"}), {"dcp = 2", "one rank"});
}

TEST_F(Refusals, RanksThatDoNotDivideTheHeads) {
  expect_refused(run("out.safetensors", {"--dcp", "3"}), {"dcp = 3", "4 heads"});
}

TEST_F(Refusals, TablesFile) {
  expect_refused(run("out.safetensors", {"--tables", path("none.json")}), {"none.json"});
  write_text(path("bad.json"), "{");
  expect_refused(run("out.safetensors", {"--tables", path("bad.json")}), {"bad.json"});
}

TEST_F(Refusals, StepsThatPointOutsideTheCaches) {
  std::vector<int64_t> slots = {1 << 20, -1, -1, -1};
  for (const char* ranks : {"1", "2"}) {
    change_step([&](StepFile& file) { file.step.slots = View<const int64_t, 1>(slots.data(), 4); });
    expect_refused(run_files(layer(), path("changed.safetensors"), {"--dcp", ranks}), {"slots[0] = 1048576"});

    const std::vector<int64_t> twice = {3, 3, -1, -1};
    change_step([&](StepFile& file) { file.step.slots = View<const int64_t, 1>(twice.data(), 4); });
    expect_refused(run_files(layer(), path("changed.safetensors"), {"--dcp", ranks}), {"slots[1] = 3", "once"});

    const std::vector<int32_t> long_contexts = {5, 90, 40, 100000};
    change_step([&](StepFile& file) { file.step.seq_lens = View<const int32_t, 1>(long_contexts.data(), 4); });
    expect_refused(run_files(layer(), path("changed.safetensors"), {"--dcp", ranks}), {"100000"});

    change_step([&](StepFile& file) { const_cast<int32_t*>(file.step.block_table.row(1))[0] = -7; });
    expect_refused(run_files(layer(), path("changed.safetensors"), {"--dcp", ranks}), {"block_table", "-7"});
  }
}

TEST_F(Refusals, StepsOfAnotherLayer) {
  ASSERT_EQ(run_program({"generate", "--out", path("other"), "--heads", "8", "--batch", "4", "--context", "9",
                         "--q-lora", "128", "--topk", "16", "--index-heads", "8"})
                .status,
            0);
  expect_refused(run_files(path("other/layer.safetensors"), step()), {"projected"});
}

TEST_F(Refusals, BatchThatCannotBePrepared) {
  ASSERT_EQ(run_program({"generate", "--out", path("wide"), "--heads", "1", "--batch", "256", "--context", "1",
                         "--q-lora", "128", "--topk", "1", "--index-heads", "8"})
                .status,
            0);
  StepFile file = read_step_file(path("wide/step.safetensors"));
  std::vector<BFloat16> projected(size_t(257 * file.step.projected.extent(1)));
  std::vector<int64_t> slots(257, -1);
  std::vector<int32_t> table(257, 0), lengths(257, 1);
  file.step.projected = View<const BFloat16, 2>(projected.data(), 257, file.step.projected.extent(1));
  file.step.slots = file.step.index_slots = View<const int64_t, 1>(slots.data(), 257);
  file.step.block_table = View<const int32_t, 2>(table.data(), 257, 1);
  file.step.seq_lens = View<const int32_t, 1>(lengths.data(), 257);
  file.step.batch = 257;
  write_step_file(path("changed.safetensors"), file.step, file.kv, file.index);
  expect_refused(run_files(path("wide/layer.safetensors"), path("changed.safetensors")), {"B = 257", "1..256"});
}

TEST_F(Refusals, GenerateNamesTheOption) {
  const auto generated = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"generate", "--out", path("refused")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Ran ran = run_program(arguments);
    EXPECT_FALSE(std::filesystem::exists(path("refused"))) << "nothing is written";
    return ran;
  };
  expect_refused(generated({"--batch", "5", "--q", "2"}), {"--batch"});
  expect_refused(generated({"--context", "9-3"}), {"--context", "9-3"});
  expect_refused(generated({"--page", "96"}), {"--page", "96"});
  expect_refused(generated({"--q-lora", "200"}), {"--q-lora", "200"});
  expect_refused(generated({"--adversarial", "odd"}), {"--adversarial", "odd"});
  expect_refused(generated({"--topk", "2049"}), {"--topk", "2049", "2048"});
}

TEST_F(Refusals, InspectSaysWhatItNeeds) {
  expect_refused(run_program({"inspect"}), {"FILE", "--plan"});
  expect_refused(run_program({"inspect", "--plan", "B=3,q=2"}), {"B = 3", "q = 2"});
  expect_refused(run_program({"inspect", "--plan", "heads=3"}), {"heads", "H"});
  expect_refused(run_program({"inspect", "--plan", "kv=fp16"}), {"kv = fp16", "nvfp4_ds_mla"});
  write_text(path("text.txt"), "no safetensors file");
  expect_refused(run_program({"inspect", path("text.txt")}), {"text.txt"});
  ASSERT_EQ(run("plain.safetensors").status, 0);
  write_text(path("tokens.json"), R"({"rows":[],"text":"ab","begin":[0],"end":[1],"sources":["a"]})");
  expect_refused(run_program({"inspect", path("plain.safetensors"), "--tokens", path("tokens.json")}),
                 {"topk_tokens", "--dump all"});
  expect_refused(run_program({"inspect", layer(), "--html", path("x.html")}), {"--tokens"});
}

TEST_F(Refusals, BenchNamesTheContext) {
  expect_refused(run_program({"bench", "--context", "0"}), {"--context", "1048576"});
  expect_refused(run_program({"bench", "--context", "64,x"}), {"--context", "Value x"});
}

}  // namespace
}  // namespace dsacore::test
