#include "driver/trace_case.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "driver/placed_inputs.h"
#include "layer/context.h"
#include "plan/stage_id.h"

namespace dsacore {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmRuns = 3;
constexpr int64_t kNsOfSecond = 1'000'000'000;

/// A layer over a copy of the inputs, ready to run.
struct TracedLayer {
  std::unique_ptr<PlacedInputs> placed;
  std::unique_ptr<PreparedLayer> layer;

  const Step& step() const { return placed->inputs().step; }
};

std::vector<TracedLayer> prepare_layers(Context& context, const Inputs& host, const TraceOptions& options) {
  std::vector<TracedLayer> layers;
  for (int i = 0; i < options.layers; ++i) {
    TracedLayer& one = layers.emplace_back();
    one.placed = std::make_unique<PlacedInputs>(host, context.impl().memory());
    const Inputs& inputs = one.placed->inputs();
    one.layer =
        std::make_unique<PreparedLayer>(context, inputs.config, inputs.weights, prepare_options_of(host, options.run));
    one.layer->prepare_cache(inputs.kv, inputs.index);
  }
  return layers;
}

/// Makes the outputs what no run leaves behind.
void poison_outputs(const std::vector<TracedLayer>& layers, Memory& memory) {
  for (const TracedLayer& one : layers) {
    const View<BFloat16, 2> out = one.step().out;
    memory.fill(reinterpret_cast<std::byte*>(out.data()), std::byte(0xFF), out.size() * int64_t(sizeof(BFloat16)));
  }
}

using OutputsOfLayers = std::vector<std::vector<BFloat16>>;

OutputsOfLayers fetch_outputs(const std::vector<TracedLayer>& layers) {
  OutputsOfLayers outputs;
  for (const TracedLayer& one : layers) outputs.push_back(one.placed->fetch_out());
  return outputs;
}

std::vector<int> layers_that_differ(const OutputsOfLayers& a, const OutputsOfLayers& b) {
  std::vector<int> differ;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(BFloat16)) != 0) differ.push_back(int(i));
  }
  return differ;
}

double seconds_of(int64_t ns) { return double(ns) / double(kNsOfSecond); }

int64_t ns_of(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

/// Adds a row's slices, sorted by beginning, to what is told of them.
void add_parts(const TraceRow& row, std::vector<TracedPart>& parts) {
  const TraceSlice* before = nullptr;
  for (const TraceSlice& slice : row.slices) {
    auto part = std::find_if(parts.begin(), parts.end(), [&](const TracedPart& p) {
      return p.row == row.name && p.stage == slice.stage && p.name == slice.name;
    });
    if (part == parts.end()) part = parts.insert(parts.end(), {row.name, slice.stage, slice.name, {}, {}});
    part->seconds.push_back(seconds_of(slice.end_ns - slice.begin_ns));
    if (before != nullptr) part->early_seconds.push_back(seconds_of(before->end_ns - slice.begin_ns));
    before = &slice;
  }
}

/// The timeline of runs on the host.
class HostTrace {
 public:
  HostTrace(Threads& threads, int runs) : threads_(threads), busy_(size_t(threads.count())) {
    stages_.reserve(size_t(runs) * kStages);
    threads_.log_busy(&busy_);
  }
  ~HostTrace() { threads_.log_busy(nullptr); }
  HostTrace(const HostTrace&) = delete;
  HostTrace& operator=(const HostTrace&) = delete;

  void run(TracedLayer& one, int layer, int run) {
    const size_t first = stages_.size();
    one.layer->record_times(&stages_);
    const Clock::time_point begin = Clock::now();
    const Status status = one.layer->run(one.step());
    runs_.slices.push_back({"layer " + std::to_string(layer), "layer", layer, run, ns_of(begin), ns_of(Clock::now())});
    one.layer->record_times(nullptr);
    status.or_throw();
    for (size_t i = first; i < stages_.size(); ++i) {
      const StageTime& stage = stages_[i];
      const int64_t at = ns_of(stage.begin);
      rows_of_stages_.slices.push_back(
          {stage.stage, stage.stage, layer, run, at, at + int64_t(stage.seconds * double(kNsOfSecond))});
    }
  }

  /// Layers, stages, and when each worker was busy with a task of them.
  std::vector<TraceRow> rows() const {
    std::vector<TraceRow> rows = {runs_, rows_of_stages_};
    for (size_t worker = 0; worker < busy_.size(); ++worker) {
      TraceRow& row = rows.emplace_back(TraceRow{"worker " + std::to_string(worker), {}});
      auto span = busy_[worker].begin();
      for (TraceSlice slice : rows_of_stages_.slices) {
        const int64_t stage_begin = slice.begin_ns, stage_end = slice.end_ns;
        for (; span != busy_[worker].end() && ns_of(span->begin) < stage_end; ++span) {
          slice.begin_ns = std::max(stage_begin, ns_of(span->begin));
          slice.end_ns = std::min(stage_end, ns_of(span->end));
          if (slice.begin_ns < slice.end_ns) row.slices.push_back(slice);
          if (ns_of(span->end) > stage_end) break;  // the next stage has its share of it
        }
      }
    }
    return rows;
  }

 private:
  Threads& threads_;
  std::vector<std::vector<BusySpan>> busy_;
  std::vector<StageTime> stages_;
  TraceRow runs_{"layers", {}}, rows_of_stages_{"stages", {}};
};

/// Every layer once; returns the seconds of all.
template <class Run>
double run_round(std::vector<TracedLayer>& layers, Run run) {
  const Clock::time_point begin = Clock::now();
  for (size_t i = 0; i < layers.size(); ++i) run(layers[i], int(i));
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void trace_on_host(Context& context, std::vector<TracedLayer>& layers, const TraceOptions& options,
                   TraceResult& result) {
  std::vector<double> plain, traced;
  for (int i = 0; i < kWarmRuns + options.repeat; ++i) {
    const double seconds = run_round(layers, [](TracedLayer& one, int) { one.layer->run(one.step()).or_throw(); });
    if (i >= kWarmRuns) plain.push_back(seconds);
  }
  const OutputsOfLayers expected = fetch_outputs(layers);
  poison_outputs(layers, context.impl().memory());
  HostTrace trace(context.impl().threads, options.repeat * int(layers.size()));
  for (int run = 0; run < options.repeat; ++run) {
    traced.push_back(run_round(layers, [&](TracedLayer& one, int layer) { trace.run(one, layer, run); }));
  }
  result.changed_layers = layers_that_differ(expected, fetch_outputs(layers));
  result.plain_seconds = median(plain);
  result.traced_seconds = median(traced);
  result.trace.rows = trace.rows();
  add_parts(result.trace.rows[1], result.parts);
}

/// The timeline of replays on a device.
std::vector<TraceRow> rows_of(const std::vector<DeviceWork>& works) {
  std::vector<TraceRow> rows = {{"main stream", {}}, {"side stream", {}}};
  for (const DeviceWork& work : works) {
    rows[work.side ? 1 : 0].slices.push_back(
        {work.name, std::string(work.stage), work.layer, work.replay, work.begin_ns, work.end_ns});
  }
  if (rows[1].slices.empty()) rows.pop_back();
  return rows;
}

/// From the first beginning to the last end of each replay.
std::vector<double> seconds_of_replays(const std::vector<DeviceWork>& works) {
  struct Span {
    int64_t begin_ns, end_ns;
  };
  std::vector<Span> spans;
  for (const DeviceWork& work : works) {  // by beginning, so that a replay's first comes first
    if (work.replay >= int(spans.size())) spans.push_back({work.begin_ns, work.end_ns});
    Span& span = spans[size_t(work.replay)];
    span.end_ns = std::max(span.end_ns, work.end_ns);
  }
  std::vector<double> seconds;
  seconds.reserve(spans.size());
  for (const Span& span : spans) seconds.push_back(seconds_of(span.end_ns - span.begin_ns));
  return seconds;
}

void trace_on_device(Device& device, Tracer& tracer, std::vector<TracedLayer>& layers, const TraceOptions& options,
                     TraceResult& result) {
  const Queue queue = device.own_queue();
  const auto record = [&] {
    return device.record([&](Queue recorded) {
      for (size_t i = 0; i < layers.size(); ++i) {
        tracer.set_layer(int(i));
        layers[i].layer->run(layers[i].step(), recorded).or_throw();
      }
    });
  };
  for (TracedLayer& one : layers) one.layer->run(one.step(), queue).or_throw();  // loads the kernels
  device.wait(queue);
  OutputsOfLayers expected;
  {
    const std::unique_ptr<Recording> plain = record();
    plain->time(kWarmRuns);
    poison_outputs(layers, device.memory());
    result.plain_seconds = median(plain->time(options.repeat));
    expected = fetch_outputs(layers);
  }
  tracer.start();
  const std::unique_ptr<Recording> traced = record();
  traced->time(kWarmRuns);
  poison_outputs(layers, device.memory());
  tracer.clear();
  for (int i = 0; i < options.repeat; ++i) traced->replay();
  device.wait(queue);
  const std::vector<DeviceWork> works = tracer.take();
  result.changed_layers = layers_that_differ(expected, fetch_outputs(layers));
  result.traced_seconds = median(seconds_of_replays(works));
  result.trace.rows = rows_of(works);
  for (const TraceRow& row : result.trace.rows) add_parts(row, result.parts);
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + std::ptrdiff_t(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

TraceResult trace_case(const Inputs& inputs, const TraceOptions& options) {
  Context context(context_options_of(options.run));
  Device* device = context.impl().device.get();
  // Asked for first: a trace without its library fails before anything is copied.
  const std::unique_ptr<Tracer> tracer = device != nullptr ? device->make_tracer(options.cupti) : nullptr;
  check_inputs(inputs);
  std::vector<TracedLayer> layers = prepare_layers(context, inputs, options);
  TraceResult result;
  result.threads = context.threads();
  result.choices = layers[0].layer->choices();
  result.trace.title =
      "dsacore " + std::string(name_of(options.run.backend)) + " on " + std::string(context.cpu_target());
  if (device != nullptr) {
    trace_on_device(*device, *tracer, layers, options, result);
  } else {
    trace_on_host(context, layers, options, result);
  }
  return result;
}

}  // namespace dsacore
