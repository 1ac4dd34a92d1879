// dsacore bench: times of each stage and of the whole layer over synthetic inputs, against the floors of bytes and
// FLOPs.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench_plot.h"
#include "cli/commands.h"
#include "cli/files.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "driver/peaks.h"
#include "dsacore/status.h"
#include "dsacore/version.h"
#include "io/case_options.h"

namespace dsacore::cli {
namespace {

constexpr int kDisagree = 1;

struct BenchCommand {
  BenchOptions options;
  // Every combination is measured.
  std::vector<KvFormat> kv_formats = {KvFormat::kFp8DsMla};
  std::vector<IndexFormat> index_formats = {IndexFormat::kFp8};
  std::vector<int> heads = {12}, queries = {1}, batches = {8};
  std::vector<int64_t> contexts = {4096, 16384, 65536};
  std::vector<std::string> overlaps = {""};  // "": the tables'
  double bandwidth = 0;                      // GB/s; 0: measured
  std::string plot;
  bool json = false;

  std::vector<CaseOptions> shapes() const;
};

struct BenchResult {
  Peaks peaks;
  bool measured_bandwidth = false;
  bool measured_flops = false;
  std::vector<BenchPoint> points;

  bool agrees() const {
    return std::all_of(points.begin(), points.end(), [](const BenchPoint& point) { return point.agrees(); });
  }
};

/// Throws `kRefused` where one cannot be made. Formats outermost: shapes in a row share what caches are
/// filled from.
std::vector<CaseOptions> BenchCommand::shapes() const {
  std::vector<CaseOptions> shapes;
  CaseOptions o = options.shape;
  for (KvFormat kv : kv_formats) {
    for (IndexFormat index : index_formats) {
      for (int h : heads) {
        for (int q : queries) {
          for (int batch : batches) {
            for (int64_t context : contexts) {
              o.kv_format = kv, o.index_format = index, o.heads = h, o.q = q, o.batch = batch;
              o.context = std::to_string(context);
              check_case_options(o);
              shapes.push_back(o);
            }
          }
        }
      }
    }
  }
  return shapes;
}

/// All of a shape but its context.
std::string shape_text(const CaseOptions& o) {
  return fmt::format("kv={},index={},B={},q={},H={},topk={},index_heads={},q_lora={}", name_of(o.kv_format),
                     name_of(o.index_format), o.batch, o.q, o.heads, o.topk, o.index_heads, o.q_lora);
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
  const std::vector<CaseOptions> shapes = c.shapes();
  Progress progress("measuring the machine", int64_t(shapes.size() * c.overlaps.size()) * bench_runs(c.options));
  BenchResult result;
  find_peaks(c, result);
  c.options.on_run = [&] { progress.advance(); };
  CachePool pool;
  for (const CaseOptions& shape : shapes) {
    progress.set_what(shape_text(shape) + ",len=" + shape.context);
    c.options.shape = shape;
    BenchCase measured(c.options, pool);
    for (const std::string& overlap : c.overlaps) {
      result.points.push_back(measured.time({overlap, c.options.run.kernels}, result.peaks));
    }
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

std::string machine_text(const BenchCommand& c, const BenchResult& result) {
  const BenchPoint& point = result.points[0];
  return fmt::format("{} on {}, {} thread{}, {} layer{} in turn, {} runs", name_of(c.options.run.backend), point.target,
                     point.threads, point.threads == 1 ? "" : "s", point.layers, point.layers == 1 ? "" : "s",
                     c.options.repeat);
}

void print_point(const BenchPoint& point, const Peaks& peaks) {
  fmt::print("\n{}\n{}\n", styled(Style::kBold, shape_text(point.shape) + ",len=" + point.shape.context),
             point.choices);
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
  for (const AgreementLine& line : point.verified) {
    if (!line.ok)
      fmt::print("{}: {}, allowed {}\n", styled(Style::kRed, "DIFFERS " + line.tensor), line.figure, line.bound);
  }
  if (!point.verified.empty() && point.agrees()) fmt::print("agrees with the cpu backend\n");
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

nlohmann::ordered_json point_json(const BenchPoint& point, const Peaks& peaks) {
  nlohmann::ordered_json stages = nlohmann::ordered_json::array();
  nlohmann::ordered_json chains = nlohmann::ordered_json::array();
  for (const BenchStage& stage : point.stages) stages.push_back(stage_json(stage, floor_seconds(stage.work, peaks)));
  for (const BenchStage& chain : point.chains) chains.push_back(stage_json(chain, floor_seconds(chain.work, peaks)));
  const CaseOptions& o = point.shape;
  nlohmann::ordered_json out = {{"heads", o.heads},
                                {"batch", o.batch},
                                {"q", o.q},
                                {"context", std::stoll(o.context)},
                                {"kv_format", name_of(o.kv_format)},
                                {"index_format", name_of(o.index_format)},
                                {"overlap", name_of(point.overlap)},
                                {"layers", point.layers},
                                {"choices", point.choices},
                                {"reserved_bytes", point.reserved_bytes},
                                {"stages", stages},
                                {"chains", chains},
                                {"layer", stage_json(point.layer, point.floor)}};
  if (!point.verified.empty()) out["agrees"] = point.agrees();
  return out;
}

nlohmann::ordered_json result_json(const BenchCommand& c, const BenchResult& result) {
  nlohmann::ordered_json points = nlohmann::ordered_json::array();
  for (const BenchPoint& point : result.points) points.push_back(point_json(point, result.peaks));
  const BenchPoint& first = result.points[0];
  return {{"version", version()},
          {"commit", commit()},
          {"backend", name_of(c.options.run.backend)},
          {"target", first.target},
          {"device", first.device},
          {"threads", first.threads},
          {"topk", first.shape.topk},
          {"index_heads", first.shape.index_heads},
          {"q_lora", first.shape.q_lora},
          {"repeat", c.options.repeat},
          {"bytes_per_second", result.peaks.bytes_per_second},
          {"bytes_per_second_measured", result.measured_bandwidth},
          {"flops_per_second", result.peaks.flops_per_second},
          {"points", points}};
}

std::string plot_of(const BenchCommand& c, const BenchResult& result) {
  return bench_svg({shape_text(result.points[0].shape), machine_text(c, result) + "; floors: " + peaks_text(result),
                    result.points, result.peaks});
}

/// The picture's axis is the context.
void require_one_shape(const BenchCommand& c) {
  if (c.plot.empty() || c.shapes().size() * c.overlaps.size() == c.contexts.size()) return;
  throw Exception(
      {ErrorCode::kRefused, "--plot", c.plot, "shows several contexts of one shape; a list is given elsewhere"});
}

int bench(BenchCommand& c) {
  require_built(c.options.run.backend);
  require_one_shape(c);
  const BenchResult result = measure(c);
  if (!c.plot.empty()) write_file("plot", c.plot, plot_of(c, result));
  if (c.json) {
    fmt::print("{}\n", result_json(c, result).dump(2));
    return result.agrees() ? 0 : kDisagree;
  }
  fmt::print("{}\nfloors: {}\n", machine_text(c, result), peaks_text(result));
  for (const BenchPoint& point : result.points) print_point(point, result.peaks);
  if (result.points[0].layers == 1)
    fmt::print(
        "\nOne layer: what fits the caches is read from them and may beat its floor; --layers rotates over several.\n");
  if (!c.plot.empty()) fmt::print("wrote {}\n", c.plot);
  return result.agrees() ? 0 : kDisagree;
}

}  // namespace

void add_bench(CLI::App& program, Chosen& chosen) {
  const auto c = std::make_shared<BenchCommand>();
  CLI::App& app = *program.add_subcommand("bench", "Time each stage and the whole layer over synthetic inputs");
  app.footer(
      "Of options that take lists every combination is measured.\n"
      "Exit status: 0 done, 1 a failed run or, with --verify, backends that disagree, 2 bad input.");
  add_list(app, "--heads", c->heads, 1, kMaxHeads, "Attention heads H");
  add_list(app, "--batch", c->batches, 1, kMaxRows, "Rows B");
  add_list(app, "--q", c->queries, 1, kMaxQ, "Rows per request; must divide the rows");
  add_list<int64_t>(app, "--context", c->contexts, 1, kMaxContext, "Lengths of the contexts, of all requests of a run");
  add_named_list<KvFormat>(app, "--kv-format", c->kv_formats, kv_format_of, {"fp8_ds_mla", "fp8", "nvfp4_ds_mla"},
                           "Formats of the MLA cache");
  add_named_list<IndexFormat>(app, "--index-format", c->index_formats, index_format_of, {"fp8", "mxfp4"},
                              "Formats of the index cache");
  add_sizes(app, c->options.shape);
  add_backend(app, c->options.run.backend);
  add_machine(app, c->options.run);
  app.add_option("--overlap", c->overlaps, std::string(kOverlapHelp) + "; may be given several times")
      ->allow_extra_args(false)
      ->type_name("TABLE");
  add_kernels(app, c->options.run.kernels);
  add_number(app, "--repeat", c->options.repeat, 1, 100000, "Timed runs for each context");
  app.add_option(
         "--layers", c->options.layers,
         "Layers that take turns, each with its own weights and caches (1..256; default: 1; cuda: 4 to 8, as many as "
         "it takes to read six times the L2)")
      ->check(CLI::Range(1, 256).description(""))
      ->type_name("N");
  add_device(app, c->options.run);
  app.add_option("--bandwidth", c->bandwidth, "GB/s that floors are counted with (default: measured by a sweep)")
      ->check(CLI::Range(0.001, 1e6).description(""))
      ->type_name("X");
  add_text(app, "--plot", c->plot, "FILE", "SVG to write");
  app.add_flag("--verify", c->options.verify,
               "cuda: judge the first layer's step by the cpu backend before it is timed");
  app.add_flag("--json", c->json, "Print the measurements in JSON");
  app.callback([c, &chosen] { chosen.act = [c] { return bench(*c); }; });
}

}  // namespace dsacore::cli
