// dsacore: the command line. Parses, runs the chosen subcommand, turns errors into messages on standard error and exit
// statuses: 0 done, 1 a failed run or backends that disagree, 2 bad input.
#include <fmt/format.h>

#include <cstdlib>
#include <new>

#include "cli/commands.h"
#include "cli/help.h"
#include "cli/suggest.h"
#include "dsacore/status.h"
#include "dsacore/version.h"

namespace dsacore::cli {
namespace {

constexpr int kFailed = 1;
constexpr int kBadInput = 2;

std::string version_text() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return fmt::format("{:<20} {}\n", name, value != nullptr ? fmt::format("= {}", value) : "not set");
  };
  return fmt::format("dsacore {}\ncommit      {}\nbackends    {}\nCPU targets {} (compiled: {})\nCUDA        {}\n",
                     version(), commit(), backends(), runnable_cpu_targets(), compiled_cpu_target_names(),
                     cuda_version()) +
         variable("DSACORE_THREADS") + variable("DSACORE_CPU_TARGET") + variable("DSACORE_TABLES");
}

int status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kRefused:
    case ErrorCode::kUnsupported:
    case ErrorCode::kMalformedFile:
    case ErrorCode::kIo: return kBadInput;
    case ErrorCode::kNoMemory:
    case ErrorCode::kDevice:
    case ErrorCode::kPeerLost:
    case ErrorCode::kInternal: break;
  }
  return kFailed;
}

int fail(int status, std::string_view message) {
  fmt::print(stderr, "dsacore: {}\n", message);
  return status;
}

/// The one subcommand that was given, or the program itself.
const CLI::App& given_app(const CLI::App& program) {
  const auto subcommands = program.get_subcommands();
  return subcommands.empty() ? program : *subcommands.front();
}

int parse_failure(const CLI::App& program, const CLI::ParseError& error) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return program.exit(error);  // help, version
  const CLI::App& app = given_app(program);
  std::string message = error.what();
  // A word that nobody knows says more than the option that is missing for it.
  if (const std::vector<std::string> unknown = app.remaining(); !unknown.empty()) {
    message = fmt::format("{}: unknown{}", unknown.front(), suggestion(app, unknown));
  }
  const std::string name = &app == &program ? "dsacore" : "dsacore " + app.get_name();
  return fail(kBadInput, fmt::format("{}\n{} --help shows the options", message, name));
}

int run_program(int argc, char** argv) {
  CLI::App program(
      "One decode step of one DeepSeek Sparse Attention layer over a packed MLA cache and an indexer cache.",
      "dsacore");
  program.set_version_flag("--version", version_text);
  program.require_subcommand(1);
  program.fallthrough(false);
  program.formatter(help_formatter());
  program.footer("Exit status: 0 done, 1 a failed run or backends that disagree, 2 bad input.");
  Chosen chosen;
  add_run(program, chosen);
  add_generate(program, chosen);
  add_inspect(program, chosen);
  add_check(program, chosen);
  add_bench(program, chosen);
  add_trace(program, chosen);
  add_tune(program, chosen);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return parse_failure(program, error);
  }
  return chosen.act();
}

}  // namespace
}  // namespace dsacore::cli

int main(int argc, char** argv) {
  using namespace dsacore;
  try {
    return cli::run_program(argc, argv);
  } catch (const Exception& error) {
    return cli::fail(cli::status_of(error.error().code), error.what());
  } catch (const std::bad_alloc&) {
    return cli::fail(cli::kFailed, "out of memory");
  } catch (const std::exception& error) {
    return cli::fail(cli::kFailed, error.what());
  }
}
