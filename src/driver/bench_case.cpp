#include "driver/bench_case.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

namespace dsacore {
namespace {

/// A layer with inputs of its own, ready to run.
struct PreparedCase {
  Case made;
  Step step;
  std::vector<BFloat16> out;
  std::unique_ptr<PreparedLayer> layer;
};

PreparedCase prepare(Context& context, CaseOptions shape, int number, const RunOptions& run) {
  shape.seed += uint64_t(number);
  PreparedCase c{make_case(shape), {}, {}, nullptr};
  PrepareOptions options;
  options.batches = {{c.made.step.batch, c.made.step.projected.stride(0)}};
  options.queries = {c.made.step.q};
  options.max_context = std::max<int64_t>(1, longest_context(c.made.step));
  options.cache_pages = c.made.index.pages;
  options.overlap = run.overlap;
  c.layer = std::make_unique<PreparedLayer>(context, c.made.config, c.made.weights, options);
  c.layer->prepare_cache(c.made.kv, c.made.index);
  const int64_t width = int64_t(c.made.sizes.heads) * kValue;
  c.out.resize(size_t(c.made.step.batch * width));
  c.step = c.made.step;
  c.step.out = View<BFloat16, 2>(c.out.data(), c.step.batch, width);
  return c;
}

void add_time(std::vector<BenchStage>& stages, const StageTime& time) {
  const auto found =
      std::find_if(stages.begin(), stages.end(), [&](const BenchStage& s) { return s.name == time.stage; });
  BenchStage& stage = found != stages.end() ? *found : stages.emplace_back(BenchStage{time.stage, {}, {}});
  stage.seconds.push_back(time.seconds);
}

/// The mean over the layers of what the stage must do.
Work mean_work(StageId stage, const std::vector<PreparedCase>& cases) {
  Work mean;
  for (const PreparedCase& c : cases) {
    const Work work = stage_work(stage, inputs_of(c.made));
    mean.bytes += work.bytes / double(cases.size());
    mean.flops += work.flops / double(cases.size());
  }
  return mean;
}

void finish(BenchPoint& point, const std::vector<PreparedCase>& cases, const Peaks& peaks) {
  for (BenchStage& stage : point.stages) {
    std::sort(stage.seconds.begin(), stage.seconds.end());
    for (int id = 0; id < kStages; ++id) {
      if (name_of(StageId(id)) == stage.name) stage.work = mean_work(StageId(id), cases);
    }
    point.layer.work.bytes += stage.work.bytes;
    point.layer.work.flops += stage.work.flops;
    point.floor += floor_seconds(stage.work, peaks);
  }
  std::sort(point.layer.seconds.begin(), point.layer.seconds.end());
}

}  // namespace

double BenchStage::percentile(double share) const {
  if (seconds.empty()) return 0;
  const double at = share * double(seconds.size() - 1);
  const size_t low = size_t(at), high = std::min(low + 1, seconds.size() - 1);
  return seconds[low] + (at - double(low)) * (seconds[high] - seconds[low]);
}

BenchPoint bench_case(const BenchOptions& options, const Peaks& peaks) {
  ContextOptions context_options;
  context_options.backend = options.run.backend;
  context_options.threads = options.run.threads;
  context_options.cpu_target = options.run.cpu_target;
  context_options.tables_file = options.run.tables_file;
  Context context(context_options);
  std::vector<PreparedCase> cases;
  cases.reserve(size_t(options.layers));
  for (int i = 0; i < options.layers; ++i) cases.push_back(prepare(context, options.shape, i, options.run));

  BenchPoint point;
  point.context = options.shape.context;
  point.layer.name = "layer";
  point.choices = cases[0].layer->choices();
  point.target = context.cpu_target();
  point.threads = context.threads();
  for (const PreparedCase& c : cases) {
    for (const ReservedItem& item : c.layer->reserved_bytes()) {
      const bool own = item.name == "packed weights" || &c == &cases[0];  // scratch is shared by all layers
      if (own) point.reserved_bytes += item.bytes;
    }
  }
  std::vector<StageTime> times;
  times.reserve(64);
  const int warmup = bench_warmup_runs(options.layers);
  for (int run = 0; run < warmup + options.repeat; ++run) {
    PreparedCase& c = cases[size_t(run % options.layers)];
    times.clear();
    c.layer->record_times(&times);
    const auto start = std::chrono::steady_clock::now();
    const Status status = c.layer->run(c.step);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    status.or_throw();
    if (run >= warmup) {
      for (const StageTime& time : times) add_time(point.stages, time);
      point.layer.seconds.push_back(seconds);
    }
    if (options.on_run) options.on_run();
  }
  finish(point, cases, peaks);
  return point;
}

}  // namespace dsacore
