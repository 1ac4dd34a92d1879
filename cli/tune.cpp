// dsacore tune: measures kernels and overlap modes and writes the tables that serve the machine in hand best.
#include "driver/tune.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>
#include <memory>

#include "cli/commands.h"
#include "cli/files.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "dsacore/status.h"
#include "dsacore/version.h"

namespace dsacore::cli {
namespace {

struct TuneCommand {
  TuneOptions options;
  int64_t context = 8192;
  std::string out;
};

void print_findings(const TuneResult& result) {
  Table table({{"heads", true}, {"rows", true}, {"before", true}, {"after", true}, {"chosen", false}});
  for (const TuneFinding& f : result.findings) {
    table.add({std::to_string(f.heads), std::to_string(f.rows), seconds_text(f.times.before),
               seconds_text(f.times.after), f.after == f.before ? "as before" : styled(Style::kBold, f.after)});
  }
  fmt::print("{}", table.text());
}

int tune_command(TuneCommand& c) {
  require_built(c.options.run.backend);
  c.options.shape.context = std::to_string(c.context);
  Progress progress("looking at the machine", int64_t(c.options.heads.size() * c.options.batches.size()));
  bool started = false;
  c.options.on_shape = [&](const std::string& shape) {
    progress.set_what(shape);
    if (std::exchange(started, true)) progress.advance();
  };
  const TuneResult result = tune(c.options, fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr))),
                                 fmt::format("dsacore {} ({})", version(), commit()));
  if (c.out.empty()) {
    fmt::print("{}", result.text);
    return 0;
  }
  write_file("out", c.out, result.text);
  print_findings(result);
  fmt::print("wrote {}\n", c.out);
  return 0;
}

}  // namespace

void add_tune(CLI::App& program, Chosen& chosen) {
  const auto c = std::make_shared<TuneCommand>();
  TuneOptions& o = c->options;
  o.heads = {12, 24, 48, 96};
  o.batches = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  CLI::App& app =
      *program.add_subcommand("tune", "Measure kernels and overlap modes and write the tables that fit best");
  app.footer(
      "Starts from the tables in force and changes what gains: the overlap mode and the kernel of each stage, for "
      "each\n"
      "number of heads and rows. Rows between two of the list take what was chosen for the larger. The file is one "
      "for\n"
      "--tables, with the other backends' entries as they were.\n"
      "Exit status: 0 done, 1 a failed run, 2 bad input.");
  add_text(app, "--out", c->out, "FILE", "Tables file to write (default: standard output)");
  add_list(app, "--heads", o.heads, 1, kMaxHeads, "Attention heads");
  add_list(app, "--batches", o.batches, 1, kMaxRows, "Numbers of rows");
  add_number<int64_t>(app, "--context", c->context, 1, kMaxContext, "Length of all requests");
  add_number(app, "--q", o.shape.q, 1, kMaxQ, "Rows per request; must divide the rows");
  add_kv_format(app, o.shape.kv_format);
  add_index_format(app, o.shape.index_format);
  add_sizes(app, o.shape);
  add_backend(app, o.run.backend);
  add_machine(app, o.run);
  add_device(app, o.run);
  add_number(app, "--repeat", o.repeat, 1, 100000, "Timed runs of each candidate");
  add_number(app, "--gain", o.gain, 0.0, 0.5, "Share of the time that a change must gain to be taken");
  app.callback([c, &chosen] { chosen.act = [c] { return tune_command(*c); }; });
}

}  // namespace dsacore::cli
