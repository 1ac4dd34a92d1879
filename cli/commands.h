// The subcommands: each adds its options to the program and, where it is the one on the command line, sets what to do.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace dsacore::cli {

/// What the chosen subcommand does; its result is the exit status (0, or 1 where it found what it looked for to be
/// wrong). Bad input leaves it as an Exception.
struct Chosen {
  std::function<int()> act;
};

void add_run(CLI::App& program, Chosen& chosen);
void add_generate(CLI::App& program, Chosen& chosen);
void add_inspect(CLI::App& program, Chosen& chosen);
void add_check(CLI::App& program, Chosen& chosen);
void add_bench(CLI::App& program, Chosen& chosen);
void add_trace(CLI::App& program, Chosen& chosen);
void add_tune(CLI::App& program, Chosen& chosen);

}  // namespace dsacore::cli
