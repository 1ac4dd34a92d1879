// The three things that `dsacore inspect` looks at.
#pragma once

#include <string>

#include "driver/run_case.h"

namespace dsacore::cli {

/// What is in a layer, step or output file.
int inspect_file(const std::string& path, bool json);

/// What would be chosen for a shape (shape_text.h), and why not the others.
int inspect_plan(const std::string& shape, const RunOptions& options, bool json);

struct TextOptions {
  std::string out;     ///< an output file with a dump
  std::string tokens;  ///< tokens.json
  std::string html;    ///< page to write, or empty
  int top = 4;         ///< passages printed of each row
  bool json = false;
};
/// What each row selected of a text.
int inspect_text(const TextOptions& options);

}  // namespace dsacore::cli
