#include "cli/program.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

namespace dsacore::test {
namespace {

/// A file descriptor whose contents can be read back.
class Capture {
 public:
  Capture() {
    char name[] = "/tmp/dsacore-cli-XXXXXX";
    fd_ = mkstemp(name);
    unlink(name);
  }
  ~Capture() { close(fd_); }
  int fd() const { return fd_; }
  std::string text() const {
    std::string all;
    char part[4096];
    lseek(fd_, 0, SEEK_SET);
    for (ssize_t n = read(fd_, part, sizeof(part)); n > 0; n = read(fd_, part, sizeof(part)))
      all.append(part, size_t(n));
    return all;
  }

 private:
  int fd_;
};

/// The inherited environment without the program's own variables, and what the test adds.
std::vector<std::string> environment_with(const std::vector<std::string>& more) {
  std::vector<std::string> all = more;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::string_view(*entry).starts_with("DSACORE_")) continue;
    all.emplace_back(*entry);
  }
  return all;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

Ran run_program(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
  std::vector<std::string> words = {DSACORE_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> variables = environment_with(environment);
  const Capture out, err;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.fd(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.fd(), STDERR_FILENO);
  pid_t child = 0;
  const int failed =
      posix_spawn(&child, DSACORE_PROGRAM, &actions, nullptr, pointers_to(words).data(), pointers_to(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) {
    ADD_FAILURE() << "cannot start " << DSACORE_PROGRAM;
    return {};
  }
  int status = 0;
  waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), out.text(), err.text()};
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
}

void ProgramTest::SetUp() {
  std::string name = (std::filesystem::temp_directory_path() / "dsacore-cli-XXXXXX").string();
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  folder_ = name;
}

void ProgramTest::TearDown() { std::filesystem::remove_all(folder_); }

void ProgramTest::generate(const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"generate", "--out",     path("case"), "--heads",       "4", "--batch",
                                        "4",        "--context", "5,90,40,17", "--index-heads", "8", "--q-lora",
                                        "128",      "--topk",    "16",         "--seed",        "3"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Ran ran = run_program(arguments);
  ASSERT_EQ(ran.status, 0) << ran.err;
}

Ran ProgramTest::run(const std::string& out, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"run", "--layer", layer(), "--step", step(), "--out", path(out)};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

}  // namespace dsacore::test
