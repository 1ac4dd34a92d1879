// tune: a file that --tables takes, and what it refuses.
#include "cli/program.h"

namespace dsacore::test {
namespace {

class Tune : public ProgramTest {
 protected:
  static Ran tune(const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"tune", "--context", "80", "--q-lora", "128", "--index-heads", "8", "--topk",
                                          "16",   "--repeat",  "2",  "--heads",  "2,4"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  }
};

TEST_F(Tune, WritesTablesThatLoad) {
  const Ran ran = tune({"--batches", "1,20", "--out", path("tables.json")});
  ASSERT_EQ(ran.status, 0) << ran.err;
  for (const char* word : {"heads", "before", "after", "wrote"})
    EXPECT_NE(ran.out.find(word), std::string::npos) << word;
  generate();
  EXPECT_EQ(run("out.safetensors", {"--tables", path("tables.json")}).status, 0);
  const Ran plan = run_program({"inspect", "--plan", "B=20", "--tables", path("tables.json")});
  EXPECT_NE(plan.out.find(path("tables.json")), std::string::npos) << plan.out << plan.err;
}

TEST_F(Tune, PrintsTheTablesWithoutAFile) {
  const Ran ran = tune({"--batches", "2"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  write_text(path("tables.json"), ran.out);
  EXPECT_EQ(run_program({"inspect", "--plan", "B=2", "--tables", path("tables.json")}).status, 0) << ran.out;
}

TEST_F(Tune, RefusesBeforeItMeasures) {
  for (const std::vector<std::string>& more : {std::vector<std::string>{"--batches", "3", "--q", "2"},
                                               {"--batches", "0"},
                                               {"--gain", "2"},
                                               {"--batches", "1", "--tables", path("missing.json")}}) {
    const Ran ran = tune(more);
    EXPECT_EQ(ran.status, 2) << more[0];
    const std::string& option = more.back() == path("missing.json") ? "missing.json" : more[0];
    EXPECT_NE(ran.err.find(option), std::string::npos) << ran.err;
  }
  EXPECT_EQ(tune({"--batches", "1", "--out", path("no/such/folder.json")}).status, 2);
}

}  // namespace
}  // namespace dsacore::test
