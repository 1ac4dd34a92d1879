// The help texts: wrapped to the width of a page.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>

namespace dsacore::cli {

/// A formatter that wraps what options do into its own column.
std::shared_ptr<CLI::Formatter> help_formatter();

}  // namespace dsacore::cli
