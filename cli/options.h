// Options that several subcommands share, with their ranges and defaults in one place.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "driver/run_case.h"
#include "io/generate.h"

namespace dsacore::cli {

/// An integer or a number with a range, which the help names.
template <class T>
CLI::Option* add_number(CLI::App& app, const std::string& flags, T& value, T low, T high, const std::string& help) {
  CLI::Option* option = app.add_option(flags, value, fmt::format("{} ({}..{})", help, low, high));
  return option->check(CLI::Range(low, high).description(""))->type_name("N")->capture_default_str();
}

/// A path or another text.
CLI::Option* add_text(CLI::App& app, const std::string& flags, std::string& value, const char* type,
                      const std::string& help);

/// One of a few words.
CLI::Option* add_word(CLI::App& app, const std::string& flags, std::string& value,
                      const std::vector<std::string>& words, const std::string& help);

/// An option whose values have names, e.g. "--kv-format". `of` turns a name into a value.
template <class T>
CLI::Option* add_named(CLI::App& app, const std::string& flags, T& value, std::optional<T> (*of)(std::string_view),
                       const std::vector<std::string>& names, const std::string& help) {
  CLI::Option* option = app.add_option_function<std::string>(
      flags, [&value, of](const std::string& name) { value = *of(name); }, help);
  option->check(CLI::IsMember(names).description(""))->type_name(fmt::format("{}", fmt::join(names, "|")));
  return option->default_str(std::string(name_of(value)));
}

CLI::Option* add_kv_format(CLI::App& app, KvFormat& format);
CLI::Option* add_index_format(CLI::App& app, IndexFormat& format);
CLI::Option* add_backend(CLI::App& app, BackendKind& backend);

/// --cpu-target, --threads, --tables, --overlap.
void add_machine(CLI::App& app, RunOptions& options);

/// --device.
void add_device(CLI::App& app, RunOptions& options);

/// --dcp, --interleave, --partial, --deadline.
void add_ranks(CLI::App& app, RunOptions& options, double& deadline_seconds);

/// --layer and --step, both required.
void add_case(CLI::App& app, std::string& layer, std::string& step);

/// --seed, --heads, --batch, --q, the formats, --topk, --index-heads, --q-lora, --page of a synthetic case.
void add_sizes(CLI::App& app, CaseOptions& options);

/// Throws `kUnsupported` where a backend is not in this build.
void require_built(BackendKind backend);

/// The milliseconds of --deadline.
std::chrono::milliseconds deadline_of(double seconds);

}  // namespace dsacore::cli
