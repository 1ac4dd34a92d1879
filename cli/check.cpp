// dsacore check: runs two backends on the same files and compares them stage by stage (spec 9).
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "driver/case_files.h"
#include "driver/compare.h"

namespace dsacore::cli {
namespace {

constexpr int kDisagree = 1;
constexpr int64_t kParts = 6;  // two runs and what compare reports

struct CheckCommand {
  std::string layer, step;
  BackendKind against = BackendKind::kReference;
  std::string against_target;
  RunOptions run;
  double deadline_seconds = 10;
  bool json = false;
};

struct Checked {
  std::vector<AgreementLine> lines;
  RunReport expected, got;

  bool agree() const {
    return std::all_of(lines.begin(), lines.end(), [](const AgreementLine& line) { return line.ok; });
  }
};

Checked run_both(const CheckCommand& c) {
  // Each run updates caches, so each has a mapping of its own; the third keeps them as they were.
  CaseFiles before = open_case(c.layer, c.step), first = open_case(c.layer, c.step),
            second = open_case(c.layer, c.step);
  RunOptions against;
  against.backend = c.against;
  against.cpu_target = c.against_target;
  against.threads = c.run.threads;
  against.dump = true;

  Progress progress("running " + std::string(name_of(c.against)), kParts);
  const RunResult expected = run_case(inputs_of(first), against);
  progress.advance();
  progress.set_what("running " + std::string(name_of(c.run.backend)));
  const RunResult got = run_case(inputs_of(second), c.run);
  progress.advance();
  CompareOptions options;
  options.threads = expected.report.threads;
  if (c.run.backend == BackendKind::kCuda) options.topk_tolerance = kCudaTopkTolerance;
  bool started = false;
  options.on_part = [&](const char* part) {
    progress.set_what("comparing " + std::string(part));
    if (std::exchange(started, true)) progress.advance();
  };
  const Backend& backend =
      c.against == BackendKind::kReference ? reference_backend() : *cpu_backend(expected.report.target);
  return {compare(inputs_of(before), backend, expected.outputs, got.outputs, options), expected.report, got.report};
}

std::string name_text(BackendKind backend, const RunReport& report) {
  return fmt::format("{} ({})", name_of(backend), report.target);
}

int check(CheckCommand& c) {
  require_built(c.run.backend);
  c.run.deadline = deadline_of(c.deadline_seconds);
  c.run.dump = true;
  const Checked checked = run_both(c);
  const bool agree = checked.agree();
  if (c.json) {
    nlohmann::json lines = nlohmann::json::array();
    for (const AgreementLine& line : checked.lines) {
      lines.push_back({{"tensor", line.tensor}, {"figure", line.figure}, {"bound", line.bound}, {"ok", line.ok}});
    }
    fmt::print("{}\n",
               nlohmann::json{{"agree", agree},
                              {"expected", {{"backend", name_of(c.against)}, {"target", checked.expected.target}}},
                              {"judged",
                               {{"backend", name_of(c.run.backend)},
                                {"target", checked.got.target},
                                {"threads", checked.got.threads},
                                {"dcp", c.run.dcp}}},
                              {"lines", lines}}
                   .dump(2));
    return agree ? 0 : kDisagree;
  }
  fmt::print("{}{} against {}\n", name_text(c.run.backend, checked.got),
             c.run.dcp > 1 ? fmt::format(" in {} ranks", c.run.dcp) : "", name_text(c.against, checked.expected));
  Table table({{"", false}, {"tensor", false}, {"found", false}, {"allowed", false}});
  for (const AgreementLine& line : checked.lines) {
    table.add({line.ok ? styled(Style::kGreen, "agree") : styled(Style::kRed, "DIFFER"), line.tensor, line.figure,
               line.bound});
  }
  fmt::print("{}{}\n", table.text(), agree ? "the backends agree" : "the backends DISAGREE");
  return agree ? 0 : kDisagree;
}

}  // namespace

void add_check(CLI::App& program, Chosen& chosen) {
  const auto c = std::make_shared<CheckCommand>();
  CLI::App& app = *program.add_subcommand("check", "Run two backends on files and compare them stage by stage");
  app.footer(
      "Each stage of the judged backend is compared with the same stage of the other on the inputs that it had.\n"
      "Exit status 1 where a tensor is outside its bound.");
  add_case(app, c->layer, c->step);
  add_backend(app, c->run.backend)->description("The backend that is judged");
  add_named<BackendKind>(app, "--against", c->against, backend_of, {"reference", "cpu"},
                         "The backend that it is judged by");
  add_text(app, "--against-target", c->against_target, "NAME",
           "Instruction set of a cpu backend that is judged by (default: the best)");
  add_machine(app, c->run);
  add_plan(app, c->run);
  add_device(app, c->run);
  add_ranks(app, c->run, c->deadline_seconds);
  app.add_flag("--json", c->json, "Print the comparison in JSON");
  app.callback([c, &chosen] { chosen.act = [c] { return check(*c); }; });
}

}  // namespace dsacore::cli
