// Options that several subcommands share, with their ranges and defaults in one place.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "driver/run_case.h"

namespace dsacore::cli {

/// An option whose values have names, e.g. "--kv-format". `of` turns a name into a value; the option's help lists them.
template <class T>
CLI::Option* add_named(CLI::App& app, const std::string& flags, T& value, std::optional<T> (*of)(std::string_view),
                       std::vector<std::string> names, const std::string& help) {
  CLI::Option* option = app.add_option_function<std::string>(
      flags, [&value, of](const std::string& name) { value = *of(name); }, help);
  option->check(CLI::IsMember(std::move(names)));
  for (const auto& name : {std::string(name_of(value))}) option->default_str(name);
  return option;
}

CLI::Option* add_kv_format(CLI::App& app, KvFormat& format);
CLI::Option* add_index_format(CLI::App& app, IndexFormat& format);
CLI::Option* add_backend(CLI::App& app, BackendKind& backend);

/// --cpu-target, --threads, --tables, --overlap.
void add_machine(CLI::App& app, RunOptions& options);

/// --dcp, --interleave, --partial, --deadline.
void add_ranks(CLI::App& app, RunOptions& options, double& deadline_seconds);

/// --layer and --step, both required.
void add_case(CLI::App& app, std::string& layer, std::string& step);

/// Throws `kUnsupported` where a backend is not in this build.
void require_built(BackendKind backend);

/// The milliseconds of --deadline.
std::chrono::milliseconds deadline_of(double seconds);

}  // namespace dsacore::cli
