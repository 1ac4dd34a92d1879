// Runs the built program and catches what it prints; makes small cases for it in a folder of its own.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

namespace dsacore::test {

/// What a run of the program left behind.
struct Ran {
  int status = -1;  ///< exit status; 128 + signal where it was killed
  std::string out, err;
};

/// Runs the program without a shell. `environment`: "NAME=value" beside the inherited ones.
Ran run_program(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {});

std::string read_text(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, const std::string& text);

/// A folder for one test, removed at its end.
class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string layer() const { return path("case/layer.safetensors"); }
  std::string step() const { return path("case/step.safetensors"); }

  /// Generates a small case: 4 heads, 8 index heads, q_lora 128, topk 16, 4 rows, contexts 5,90,40,17 and what is
  /// given.
  void generate(const std::vector<std::string>& more = {});
  /// Runs it: `run --layer --step --out NAME` and what is given.
  Ran run(const std::string& out, const std::vector<std::string>& more = {});

 private:
  std::filesystem::path folder_;
};

}  // namespace dsacore::test
