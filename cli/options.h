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

/// Numbers with commas between, each in a range, which the help names.
template <class T>
CLI::Option* add_list(CLI::App& app, const std::string& flags, std::vector<T>& values, T low, T high,
                      const std::string& help) {
  CLI::Option* option = app.add_option(flags, values, fmt::format("{} ({}..{})", help, low, high));
  option->delimiter(',')->allow_extra_args(false)->check(CLI::Range(low, high).description(""));
  return option->type_name("LIST")->default_str(fmt::format("{}", fmt::join(values, ",")));
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

/// Values that have names, with commas between.
template <class T>
CLI::Option* add_named_list(CLI::App& app, const std::string& flags, std::vector<T>& values,
                            std::optional<T> (*of)(std::string_view), const std::vector<std::string>& names,
                            const std::string& help) {
  CLI::Option* option = app.add_option_function<std::vector<std::string>>(
      flags,
      [&values, of](const std::vector<std::string>& given) {
        values.clear();
        for (const std::string& name : given) values.push_back(*of(name));
      },
      help + ": a list of " + fmt::format("{}", fmt::join(names, ", ")));
  option->delimiter(',')->allow_extra_args(false)->check(CLI::IsMember(names).description(""));
  return option->type_name("LIST")->default_str(std::string(name_of(values[0])));
}

CLI::Option* add_kv_format(CLI::App& app, KvFormat& format);
CLI::Option* add_index_format(CLI::App& app, IndexFormat& format);
CLI::Option* add_backend(CLI::App& app, BackendKind& backend);

/// --cpu-target, --threads, --tables.
void add_machine(CLI::App& app, RunOptions& options);

/// --overlap, --kernels, --plan-rows.
void add_plan(CLI::App& app, RunOptions& options);
void add_kernels(CLI::App& app, std::string& kernels);
inline constexpr const char* kOverlapHelp =
    "Overlap mode, or modes by rows such as 1-4:front,5-64:fork (default: the tables'); modes: serial wait fork front "
    "late late_front. The CPU backends run all of them as serial and give the same bits";

/// --device.
void add_device(CLI::App& app, RunOptions& options);

/// --dcp, --interleave, --partial, --deadline.
void add_ranks(CLI::App& app, RunOptions& options, double& deadline_seconds);

/// --layer and --step, both required.
void add_case(CLI::App& app, std::string& layer, std::string& step);

/// --heads, --batch, --q and the formats of a synthetic case.
void add_shape(CLI::App& app, CaseOptions& options);
/// --seed, --topk, --index-heads, --q-lora, --page of a synthetic case.
void add_sizes(CLI::App& app, CaseOptions& options);

/// Throws `kUnsupported` where a backend is not in this build.
void require_built(BackendKind backend);

/// The milliseconds of --deadline.
std::chrono::milliseconds deadline_of(double seconds);

}  // namespace dsacore::cli
