#include "driver/bench_case.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "driver/placed_inputs.h"
#include "layer/context.h"

namespace dsacore {
namespace {

constexpr int kWarmReplays = 20;

/// Runs before the first timed one: each layer at least twice.
int warmup_runs(int layers) { return 2 * layers + 1; }

/// A layer over inputs of its own, ready to run.
struct PreparedCase {
  std::unique_ptr<Case> made;            ///< on the host
  std::unique_ptr<PlacedInputs> placed;  ///< on a device
  std::vector<BFloat16> out;
  Step step;
  std::unique_ptr<PreparedLayer> layer;
};

PreparedCase prepare_on_host(Context& context, CaseOptions shape, int number, const RunOptions& run) {
  shape.seed += uint64_t(number);
  PreparedCase c;
  c.made = std::make_unique<Case>(make_case(shape));
  const Inputs inputs = inputs_of(*c.made);
  c.layer = std::make_unique<PreparedLayer>(context, inputs.config, inputs.weights, prepare_options_of(inputs, run));
  c.layer->prepare_cache(inputs.kv, inputs.index);
  const int64_t width = int64_t(inputs.sizes.heads) * kValue;
  c.out.resize(size_t(inputs.step.batch * width));
  c.step = inputs.step;
  c.step.out = View<BFloat16, 2>(c.out.data(), c.step.batch, width);
  return c;
}

PreparedCase prepare_on_device(Context& context, const Inputs& host, const RunOptions& run) {
  PreparedCase c;
  c.placed = std::make_unique<PlacedInputs>(host, context.impl().memory());
  const Inputs& inputs = c.placed->inputs();
  c.layer = std::make_unique<PreparedLayer>(context, inputs.config, inputs.weights, prepare_options_of(host, run));
  c.layer->prepare_cache(inputs.kv, inputs.index);
  c.step = inputs.step;
  return c;
}

void add_time(std::vector<BenchStage>& stages, const StageTime& time) {
  const auto found =
      std::find_if(stages.begin(), stages.end(), [&](const BenchStage& s) { return s.name == time.stage; });
  BenchStage& stage = found != stages.end() ? *found : stages.emplace_back(BenchStage{time.stage, {}, {}});
  stage.seconds.push_back(time.seconds);
}

/// The mean over some inputs of what the stage must do.
Work mean_work(StageId stage, const std::vector<Inputs>& inputs) {
  Work mean;
  for (const Inputs& in : inputs) {
    const Work work = stage_work(stage, in);
    mean.bytes += work.bytes / double(inputs.size());
    mean.flops += work.flops / double(inputs.size());
  }
  return mean;
}

void finish(BenchPoint& point, const std::vector<Inputs>& inputs, const Peaks& peaks) {
  for (BenchStage& stage : point.stages) {
    std::sort(stage.seconds.begin(), stage.seconds.end());
    for (int id = 0; id < kStages; ++id) {
      if (name_of(StageId(id)) == stage.name) stage.work = mean_work(StageId(id), inputs);
    }
    point.layer.work.bytes += stage.work.bytes;
    point.layer.work.flops += stage.work.flops;
    point.floor += floor_seconds(stage.work, peaks);
  }
  std::sort(point.layer.seconds.begin(), point.layer.seconds.end());
}

BenchPoint describe(const BenchOptions& options, const Context& context, const std::vector<PreparedCase>& cases) {
  BenchPoint point;
  point.context = options.shape.context;
  point.layer.name = "layer";
  point.choices = cases[0].layer->choices();
  point.target = context.cpu_target();
  point.threads = context.threads();
  point.layers = int(cases.size());
  for (const PreparedCase& c : cases) {
    for (const ReservedItem& item : c.layer->reserved_bytes()) {
      const bool own = item.name == "packed weights" || &c == &cases[0];  // scratch is shared by all layers
      if (own) point.reserved_bytes += item.bytes;
    }
  }
  return point;
}

BenchPoint bench_on_host(Context& context, const BenchOptions& options, const Peaks& peaks) {
  const int layers = std::max(1, options.layers);
  std::vector<PreparedCase> cases;
  cases.reserve(size_t(layers));
  for (int i = 0; i < layers; ++i) cases.push_back(prepare_on_host(context, options.shape, i, options.run));
  BenchPoint point = describe(options, context, cases);
  std::vector<StageTime> times;
  times.reserve(64);
  const int warmup = warmup_runs(layers);
  for (int run = 0; run < warmup + options.repeat; ++run) {
    PreparedCase& c = cases[size_t(run % layers)];
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
  std::vector<Inputs> inputs;
  inputs.reserve(cases.size());
  for (const PreparedCase& c : cases) inputs.push_back(inputs_of(*c.made));
  finish(point, inputs, peaks);
  return point;
}

/// As many layers as asked for, or as the device's memory holds with room to spare.
int layers_on_device(const BenchOptions& options, const Inputs& inputs, const Memory& memory) {
  if (options.layers > 0) return options.layers;
  for (int layers : {8, 6}) {
    if (layers * placed_bytes(inputs) < memory.free_bytes() / 10 * 8) return layers;
  }
  return 4;
}

/// Seconds a layer of each of `count` replays of what `enqueue` records for all layers.
std::vector<double> time_layers(Device& device, std::vector<PreparedCase>& cases, int count,
                                FunctionRef<Status(PreparedCase&, Queue)> enqueue) {
  const std::unique_ptr<Recording> recording = device.record([&](Queue queue) {
    for (PreparedCase& c : cases) enqueue(c, queue).or_throw();
  });
  recording->time(kWarmReplays);
  std::vector<double> seconds = recording->time(count);
  for (double& s : seconds) s /= double(cases.size());
  return seconds;
}

BenchPoint bench_on_device(Context& context, Device& device, const BenchOptions& options, const Peaks& peaks) {
  const Case made = make_case(options.shape);
  const Inputs host = inputs_of(made);
  std::vector<PreparedCase> cases;
  const int layers = layers_on_device(options, host, device.memory());
  cases.reserve(size_t(layers));
  for (int i = 0; i < layers; ++i) cases.push_back(prepare_on_device(context, host, options.run));
  BenchPoint point = describe(options, context, cases);
  // Whole runs first: they load the kernels, and leave what the stages alone read.
  for (PreparedCase& c : cases) c.layer->run(c.step, device.own_queue()).or_throw();
  device.wait(device.own_queue());
  point.layer.seconds = time_layers(device, cases, options.repeat,
                                    [](PreparedCase& c, Queue queue) { return c.layer->run(c.step, queue); });
  for (std::string_view stage : cases[0].layer->stage_names(host.step.batch, host.step.q)) {
    const auto alone = [&](PreparedCase& c, Queue queue) { return c.layer->run_stage(c.step, stage, queue); };
    point.stages.push_back({std::string(stage), time_layers(device, cases, options.repeat, alone), {}});
  }
  for (int run = 0; run < bench_runs(options) && options.on_run; ++run) options.on_run();
  finish(point, {host}, peaks);
  return point;
}

}  // namespace

double BenchStage::percentile(double share) const {
  if (seconds.empty()) return 0;
  const double at = share * double(seconds.size() - 1);
  const size_t low = size_t(at), high = std::min(low + 1, seconds.size() - 1);
  return seconds[low] + (at - double(low)) * (seconds[high] - seconds[low]);
}

int bench_runs(const BenchOptions& options) { return warmup_runs(std::max(1, options.layers)) + options.repeat; }

BenchPoint bench_case(const BenchOptions& options, const Peaks& peaks) {
  Context context(context_options_of(options.run));
  Device* device = context.impl().device.get();
  return device != nullptr ? bench_on_device(context, *device, options, peaks) : bench_on_host(context, options, peaks);
}

}  // namespace dsacore
