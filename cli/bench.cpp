// dsacore bench: times of each stage and of the whole layer over synthetic inputs, against the floors of bytes and
// FLOPs.
#include <fmt/format.h>

#include <charconv>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench_plot.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "driver/peaks.h"
#include "dsacore/status.h"
#include "dsacore/version.h"

namespace dsacore::cli {
namespace {

struct BenchCommand {
  BenchOptions options;
  std::string context = "4096,16384,65536";
  double bandwidth = 0;  // GB/s; 0: measured
  std::string plot;
  bool json = false;
};

struct BenchResult {
  Peaks peaks;
  bool measured_bandwidth = false;
  bool measured_flops = false;
  std::vector<BenchPoint> points;
};

/// The lengths of a list, as they are written in it.
std::vector<std::string> lengths_of(const std::string& list) {
  std::vector<std::string> lengths = CLI::detail::split(list, ',');
  for (const std::string& text : lengths) {
    int64_t length = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
    if (error != std::errc() || end != text.data() + text.size() || length < 1 || length > kMaxContext) {
      throw Exception({ErrorCode::kRefused, "--context", list,
                       fmt::format("allowed: lengths of 1..{} with commas between", kMaxContext)});
    }
  }
  return lengths;
}

/// What floors are counted with.
void find_peaks(const BenchCommand& c, BenchResult& result) {
  if (c.options.run.backend == BackendKind::kCuda) {
    result.peaks = kH200Peaks;
    if (c.bandwidth > 0) result.peaks.bytes_per_second = c.bandwidth * 1e9;
    return;
  }
  ContextOptions machine;
  machine.backend = c.options.run.backend;
  machine.threads = c.options.run.threads;
  machine.cpu_target = c.options.run.cpu_target;
  const Context context(machine);  // resolves threads and target as the runs will
  Threads threads(context.threads());
  const bool reference = c.options.run.backend == BackendKind::kReference;
  const Backend& backend = reference ? reference_backend() : *cpu_backend(context.cpu_target());
  result.measured_bandwidth = c.bandwidth == 0;
  result.measured_flops = true;
  result.peaks = {c.bandwidth > 0 ? c.bandwidth * 1e9 : measure_read_bandwidth(threads),
                  measure_bf16_rate(backend, threads)};
}

BenchResult measure(BenchCommand& c) {
  const std::vector<std::string> contexts = lengths_of(c.context);
  Progress progress("measuring the machine", int64_t(contexts.size()) * bench_runs(c.options));
  BenchResult result;
  find_peaks(c, result);
  c.options.on_run = [&] { progress.advance(); };
  for (const std::string& context : contexts) {
    progress.set_what("context " + context);
    c.options.shape.context = context;
    result.points.push_back(bench_case(c.options, result.peaks));
  }
  return result;
}

std::string peaks_text(const BenchResult& result) {
  std::string text = fmt::format("{:.1f} GB/s read{}", result.peaks.bytes_per_second / 1e9,
                                 result.measured_bandwidth ? " (measured)" : " (given)");
  if (result.peaks.flops_per_second > 0)
    text += fmt::format(", {:.0f} GFLOP/s BF16{}", result.peaks.flops_per_second / 1e9,
                        result.measured_flops ? " (measured)" : " (given)");
  return text;
}

std::string shape_text(const BenchCommand& c) {
  const CaseOptions& o = c.options.shape;
  return fmt::format("kv={},index={},B={},q={},H={},topk={},index_heads={},q_lora={}", name_of(o.kv_format),
                     name_of(o.index_format), o.batch, o.q, o.heads, o.topk, o.index_heads, o.q_lora);
}

std::string machine_text(const BenchCommand& c, const BenchResult& result) {
  const BenchPoint& point = result.points[0];
  return fmt::format("{} on {}, {} thread{}, {} layer{} in turn, {} runs", name_of(c.options.run.backend), point.target,
                     point.threads, point.threads == 1 ? "" : "s", point.layers, point.layers == 1 ? "" : "s",
                     c.options.repeat);
}

void print_point(const BenchPoint& point, const Peaks& peaks) {
  fmt::print("\n{}\n", styled(Style::kBold, "context " + point.context));
  Table table({{"stage", false},
               {"median", true},
               {"best", true},
               {"p90", true},
               {"p99", true},
               {"bytes", true},
               {"MFLOP", true},
               {"floor", true},
               {"of the time", true}});
  const auto add = [&](const BenchStage& stage, double floor) {
    table.add({stage.name, seconds_text(stage.median()), seconds_text(stage.percentile(0)),
               seconds_text(stage.percentile(.9)), seconds_text(stage.percentile(.99)), bytes_text(stage.work.bytes),
               fmt::format("{:.1f}", stage.work.flops / 1e6), seconds_text(floor),
               fmt::format("{:.0f} %", 100 * floor / stage.median())});
  };
  for (const BenchStage& stage : point.stages) add(stage, floor_seconds(stage.work, peaks));
  add(point.layer, point.floor);
  fmt::print("{}", table.text());
}

nlohmann::ordered_json stage_json(const BenchStage& stage, double floor) {
  return {{"name", stage.name},
          {"seconds",
           {{"min", stage.percentile(0)},
            {"p10", stage.percentile(.1)},
            {"median", stage.median()},
            {"p90", stage.percentile(.9)},
            {"p99", stage.percentile(.99)},
            {"max", stage.percentile(1)}}},
          {"bytes", stage.work.bytes},
          {"flops", stage.work.flops},
          {"floor_seconds", floor},
          {"floor_share", stage.median() > 0 ? floor / stage.median() : 0}};
}

nlohmann::ordered_json result_json(const BenchCommand& c, const BenchResult& result) {
  nlohmann::ordered_json points = nlohmann::ordered_json::array();
  for (const BenchPoint& point : result.points) {
    nlohmann::ordered_json stages = nlohmann::ordered_json::array();
    for (const BenchStage& stage : point.stages)
      stages.push_back(stage_json(stage, floor_seconds(stage.work, result.peaks)));
    points.push_back({{"context", point.context},
                      {"choices", point.choices},
                      {"reserved_bytes", point.reserved_bytes},
                      {"stages", stages},
                      {"layer", stage_json(point.layer, point.floor)}});
  }
  const BenchPoint& first = result.points[0];
  return {{"version", version()},
          {"commit", commit()},
          {"shape", shape_text(c)},
          {"backend", name_of(c.options.run.backend)},
          {"target", first.target},
          {"threads", first.threads},
          {"layers", first.layers},
          {"repeat", c.options.repeat},
          {"bytes_per_second", result.peaks.bytes_per_second},
          {"bytes_per_second_measured", result.measured_bandwidth},
          {"flops_per_second", result.peaks.flops_per_second},
          {"points", points}};
}

void write_plot(const BenchCommand& c, const BenchResult& result) {
  std::ofstream out(c.plot, std::ios::binary);
  out << bench_svg(
      {shape_text(c), machine_text(c, result) + "; floors: " + peaks_text(result), result.points, result.peaks});
  out.close();
  if (!out) throw Exception({ErrorCode::kIo, "plot", c.plot, "cannot be written"});
}

int bench(BenchCommand& c) {
  require_built(c.options.run.backend);
  const BenchResult result = measure(c);
  if (!c.plot.empty()) write_plot(c, result);
  if (c.json) {
    fmt::print("{}\n", result_json(c, result).dump(2));
    return 0;
  }
  fmt::print("{}\n{}\nfloors: {}\n", shape_text(c), machine_text(c, result), peaks_text(result));
  for (const BenchPoint& point : result.points) print_point(point, result.peaks);
  if (result.points[0].layers == 1)
    fmt::print(
        "\nOne layer: what fits the caches is read from them and may beat its floor; --layers rotates over several.\n");
  if (!c.plot.empty()) fmt::print("wrote {}\n", c.plot);
  return 0;
}

}  // namespace

void add_bench(CLI::App& program, Chosen& chosen) {
  const auto c = std::make_shared<BenchCommand>();
  CLI::App& app = *program.add_subcommand("bench", "Time each stage and the whole layer over synthetic inputs");
  CaseOptions& o = c->options.shape;
  add_sizes(app, o);
  add_text(app, "--context", c->context, "LIST",
           "Lengths of the contexts, A,B,C of 1..1048576; all requests of a run have the same")
      ->capture_default_str();
  add_backend(app, c->options.run.backend);
  add_machine(app, c->options.run);
  add_number(app, "--repeat", c->options.repeat, 1, 100000, "Timed runs for each context");
  app.add_option(
         "--layers", c->options.layers,
         "Layers that take turns, each with its own weights and caches (1..256; default: 1; cuda: 8, or 6 or 4 where "
         "memory is short)")
      ->check(CLI::Range(1, 256).description(""))
      ->type_name("N");
  add_device(app, c->options.run);
  app.add_option("--bandwidth", c->bandwidth, "GB/s that floors are counted with (default: measured by a sweep)")
      ->check(CLI::Range(0.001, 1e6).description(""))
      ->type_name("X");
  add_text(app, "--plot", c->plot, "FILE", "SVG to write");
  app.add_flag("--json", c->json, "Print the measurements in JSON");
  app.callback([c, &chosen] { chosen.act = [c] { return bench(*c); }; });
}

}  // namespace dsacore::cli
