// --version and --help.
#include "cli/program.h"
#include "dsacore/version.h"

namespace dsacore::test {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Version, NamesWhatIsBuiltAndWhatTheEnvironmentSays) {
  const Ran ran = run_program({"--version"}, {"DSACORE_THREADS=3"});
  EXPECT_EQ(ran.status, 0);
  EXPECT_TRUE(ran.err.empty()) << ran.err;
  EXPECT_TRUE(contains(ran.out, std::string("dsacore ") + version())) << ran.out;
  EXPECT_TRUE(contains(ran.out, std::string("commit      ") + commit())) << ran.out;
  EXPECT_TRUE(contains(ran.out, "backends    " + backends())) << ran.out;
  EXPECT_TRUE(
      contains(ran.out, "CPU targets " + runnable_cpu_targets() + " (compiled: " + compiled_cpu_target_names() + ")"))
      << ran.out;
  EXPECT_TRUE(contains(ran.out, std::string("CUDA        ") + cuda_version())) << ran.out;
  EXPECT_TRUE(contains(ran.out, "DSACORE_THREADS      = 3")) << ran.out;
  EXPECT_TRUE(contains(ran.out, "DSACORE_CPU_TARGET   not set")) << ran.out;
  EXPECT_TRUE(contains(ran.out, "DSACORE_TABLES       not set")) << ran.out;
}

class Help : public ::testing::TestWithParam<const char*> {};

TEST_P(Help, EndsWithZeroAndFitsAPage) {
  const std::string name = GetParam();
  const Ran ran =
      run_program(name.empty() ? std::vector<std::string>{"--help"} : std::vector<std::string>{name, "--help"});
  EXPECT_EQ(ran.status, 0);
  EXPECT_TRUE(ran.err.empty()) << ran.err;
  EXPECT_TRUE(contains(ran.out, "Exit status")) << ran.out;
  for (size_t at = 0; at < ran.out.size();) {
    const size_t end = std::min(ran.out.find('\n', at), ran.out.size());
    EXPECT_LE(end - at, 120u) << ran.out.substr(at, end - at);
    at = end + 1;
  }
}

INSTANTIATE_TEST_SUITE_P(Subcommands, Help,
                         ::testing::Values("", "run", "generate", "inspect", "check", "bench", "trace", "tune"));

TEST(Help, SaysRangesAndDefaults) {
  const Ran ran = run_program({"run", "--help"});
  EXPECT_TRUE(contains(ran.out, "(1..8)")) << ran.out;
  EXPECT_TRUE(contains(ran.out, "--dcp N=1")) << ran.out;
  EXPECT_TRUE(contains(ran.out, "--backend reference|cpu|cuda=cpu")) << ran.out;
}

}  // namespace
}  // namespace dsacore::test
