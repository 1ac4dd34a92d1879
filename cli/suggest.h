// What a mistyped option may have meant.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace dsacore::cli {

/// " (did you mean --backend?)" for the first of the arguments that is close to an option of `app` or to a subcommand's
/// name; empty where none is.
std::string suggestion(const CLI::App& app, const std::vector<std::string>& arguments);

}  // namespace dsacore::cli
