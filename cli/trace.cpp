// dsacore trace: a timeline of a few layers as Chrome trace JSON: stages and workers on the host, kernels and streams
// on a device.
#include <fmt/format.h>

#include <memory>

#include "cli/commands.h"
#include "cli/files.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "driver/case_files.h"
#include "driver/trace_case.h"
#include "dsacore/status.h"

namespace dsacore::cli {
namespace {

constexpr int kChanged = 1;

struct TraceCommand {
  TraceOptions options;
  CaseOptions shape;
  std::string layer, step;  // files instead of the shape
  std::string out;
};

TraceResult trace_inputs(const TraceCommand& c) {
  const Progress progress("tracing", 0);
  if (!c.layer.empty()) {
    CaseFiles files = open_case(c.layer, c.step);
    return trace_case(inputs_of(files), c.options);
  }
  const Case made = make_case(c.shape);
  return trace_case(inputs_of(made), c.options);
}

void print_parts(const TraceResult& result, int runs) {
  Table table(
      {{"row", false}, {"stage", false}, {"what", false}, {"in a run", true}, {"median", true}, {"early", true}});
  for (const TracedPart& part : result.parts) {
    const double early = median(part.early_seconds);
    table.add({part.row, part.stage, part.name, fmt::format("{:g}", double(part.seconds.size()) / runs),
               seconds_text(median(part.seconds)), early > 0 ? seconds_text(early) : ""});
  }
  fmt::print("{}", table.text());
}

int trace(const TraceCommand& c) {
  require_built(c.options.run.backend);
  const TraceResult result = trace_inputs(c);
  write_file("out", c.out, chrome_trace_text(result.trace) + "\n");
  fmt::print("{}, {} thread{}, {} layer{} in turn, {} runs\n", result.trace.title, result.threads,
             result.threads == 1 ? "" : "s", c.options.layers, c.options.layers == 1 ? "" : "s", c.options.repeat);
  for (const std::string& choice : result.choices) fmt::print("{}\n", choice);
  print_parts(result, c.options.repeat);
  fmt::print("all layers once: {} without tracing, {} under it\nwrote {}: open it in ui.perfetto.dev\n",
             seconds_text(result.plain_seconds), seconds_text(result.traced_seconds), c.out);
  for (int layer : result.changed_layers) fmt::print("layer {} gave OTHER BITS under tracing\n", layer);
  if (!result.changed_layers.empty()) return kChanged;
  fmt::print("the traced runs gave the same bits as runs without tracing\n");
  return 0;
}

}  // namespace

void add_trace(CLI::App& program, Chosen& chosen) {
  const auto c = std::make_shared<TraceCommand>();
  CLI::App& app = *program.add_subcommand("trace", "Write a timeline of a few layers for Perfetto");
  app.footer(
      "On the CPU backends the rows are layers, stages and workers. On cuda they are the kernels of the main and the\n"
      "side stream in replays of one graph, as CUPTI saw them; kernels of a stream that overlap (programmatic "
      "dependent\n"
      "launch) lie in two rows. CUPTI is loaded from --cupti, else as the dynamic linker finds libcupti.so.13, else "
      "from\n"
      "the folders of $CUDA_HOME and /usr/local/cuda.\n"
      "'early': by how much a kernel began before the one ahead of it in its stream had ended (medians).\n"
      "Exit status 1 where tracing changed a bit of an output, or CUPTI is not there.");
  c->shape.batch = 1;
  c->shape.context = "8192";
  add_shape(app, c->shape);
  add_sizes(app, c->shape);
  add_text(app, "--context", c->shape.context, "LENGTHS", "Lengths of the contexts, as `generate` takes them")
      ->capture_default_str();
  CLI::Option* layer =
      add_text(app, "--layer", c->layer, "FILE", "Layer file instead of the sizes above (safetensors)");
  CLI::Option* step = add_text(app, "--step", c->step, "FILE", "Step file that belongs to it; it is not changed");
  layer->needs(step);
  step->needs(layer);
  add_text(app, "--out", c->out, "FILE", "Chrome trace (JSON) to write")->required();
  add_backend(app, c->options.run.backend);
  add_machine(app, c->options.run);
  add_plan(app, c->options.run);
  add_number(app, "--layers", c->options.layers, 1, 256,
             "Layers that take turns, each with its own copy of the inputs");
  add_number(app, "--repeat", c->options.repeat, 1, 1000, "Traced runs of every layer");
  add_device(app, c->options.run);
  add_text(app, "--cupti", c->options.cupti, "FILE", "libcupti.so.13 of the CUDA toolkit (default: searched for)");
  app.callback([c, &chosen] { chosen.act = [c] { return trace(*c); }; });
}

}  // namespace dsacore::cli
