#include "driver/bench_case.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <initializer_list>

#include "driver/placed_inputs.h"
#include "driver/verify_layer.h"
#include "dsacore/status.h"
#include "layer/context.h"

namespace dsacore {
namespace {

constexpr int kWarmReplays = 20;
/// What one round over the layers of a device should read: six times the L2 of an H200.
constexpr int64_t kRotationBytes = 6 * (int64_t(60) << 20);

/// Runs before the first timed one: each layer at least twice.
int warmup_runs(int layers) { return 2 * layers + 1; }

/// A layer's inputs, where the context's layers take them from.
struct LayerInputs {
  std::unique_ptr<Case> made;            ///< on the host
  std::unique_ptr<PlacedInputs> placed;  ///< on a device
  std::vector<BFloat16> out;             ///< on the host
  Inputs inputs;                         ///< with `step.out`
};

LayerInputs host_inputs(CaseOptions shape, int number) {
  shape.seed += uint64_t(number);
  LayerInputs layer;
  layer.made = std::make_unique<Case>(make_case(shape));
  layer.inputs = inputs_of(*layer.made);
  Step& step = layer.inputs.step;
  const int64_t width = int64_t(layer.inputs.sizes.heads) * kValue;
  layer.out.resize(size_t(step.batch * width));
  step.out = View<BFloat16, 2>(layer.out.data(), step.batch, width);
  return layer;
}

/// Bytes of weights and caches that a step of the inputs reads.
int64_t bytes_read(const Inputs& in) {
  const auto bytes = [](const TensorRef& weight) { return weight.shape[0] * weight.shape[1] * 2; };
  const int64_t keys = int64_t(in.step.seq_lens.extent(0)) * longest_context(in.step);
  const int64_t attended = in.step.batch * std::min<int64_t>(in.config.topk, longest_context(in.step));
  return bytes(in.weights.q_b_proj) + bytes(in.weights.kv_b_proj) + bytes(in.weights.wq_b) + keys * in.index.row_bytes +
         attended * in.kv.row_bytes;
}

int layers_on_device(int wanted, const Inputs& inputs) {
  if (wanted > 0) return wanted;
  return int(std::clamp<int64_t>((kRotationBytes + bytes_read(inputs) - 1) / bytes_read(inputs), 4, 8));
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
  for (BenchStage& chain : point.chains) {
    std::sort(chain.seconds.begin(), chain.seconds.end());
    for (const BenchStage& stage : point.stages) {
      if (chain.name.find(stage.name) == std::string::npos) continue;
      chain.work.bytes += stage.work.bytes;
      chain.work.flops += stage.work.flops;
    }
  }
  std::sort(point.layer.seconds.begin(), point.layer.seconds.end());
}

AgreementLine same_bits(const std::vector<BFloat16>& got, const std::vector<BFloat16>& expected) {
  int64_t differ = 0;
  for (size_t i = 0; i < got.size(); ++i) differ += got[i].bits != expected[i].bits;
  return {"out after the replays", std::to_string(differ) + " values changed", "none", differ == 0};
}

}  // namespace

class BenchCase::Impl {
 public:
  Impl(const BenchOptions& options, CachePool& pool)
      : options_(options), context_(context_options_of(options.run)), device_(context_.impl().device.get()) {
    if (options.verify && device_ == nullptr) {
      throw Exception({ErrorCode::kRefused, "--verify", std::string(name_of(options.run.backend)),
                       "runs on the host; `dsacore check` compares backends there"});
    }
    device_ != nullptr ? make_on_device(pool) : make_on_host();
  }

  BenchPoint time(const BenchPlan& plan, const Peaks& peaks) {
    std::vector<PreparedLayer> layers = prepare(plan, int(inputs_.size()));
    BenchPoint point = describe(layers);
    device_ != nullptr ? time_on_device(layers, point) : time_on_host(layers, point);
    finish(point, judged_inputs(), peaks);
    return point;
  }

  double layer_seconds(const BenchPlan& plan) {
    std::vector<PreparedLayer> layers = prepare(plan, int(inputs_.size()));
    BenchPoint point;
    if (device_ != nullptr) {
      point.layer.seconds = time_layers(layers);
    } else {
      time_on_host(layers, point);
    }
    std::sort(point.layer.seconds.begin(), point.layer.seconds.end());
    return point.layer.median();
  }

  std::string choices(const BenchPlan& plan) { return prepare(plan, 1)[0].choices()[0]; }

 private:
  void make_on_host() {
    const int layers = std::max(1, options_.layers);
    for (int i = 0; i < layers; ++i) inputs_.push_back(host_inputs(options_.shape, i));
  }

  void make_on_device(CachePool& pool) {
    described_ = make_case_without_caches(options_.shape);
    const Inputs host = inputs_of(described_);
    const int layers = layers_on_device(options_.layers, host);
    device_->memory().require_free(layers * placed_bytes(host), std::to_string(layers) + " layers");
    for (int i = 0; i < layers; ++i) {
      LayerInputs layer;
      layer.placed = std::make_unique<PlacedInputs>(host, device_->memory());
      layer.inputs = layer.placed->inputs();
      pool.fill(options_.shape, layer.inputs, device_->memory(), uint64_t(i));
      inputs_.push_back(std::move(layer));
    }
  }

  std::vector<PreparedLayer> prepare(const BenchPlan& plan, int count) {
    RunOptions run = options_.run;
    run.overlap = plan.overlap;
    run.kernels = plan.kernels;
    // Layers differ in what they hold, not in sizes and lengths.
    const Inputs host = device_ != nullptr ? inputs_of(described_) : inputs_[0].inputs;
    const PrepareOptions options = prepare_options_of(host, run);
    std::vector<PreparedLayer> layers;
    layers.reserve(size_t(count));
    for (int i = 0; i < count; ++i) {
      const Inputs& in = inputs_[size_t(i)].inputs;
      layers.emplace_back(context_, in.config, in.weights, options);
      layers.back().prepare_cache(in.kv, in.index);
    }
    return layers;
  }

  /// On the host, what the stages' work is counted from.
  std::vector<Inputs> judged_inputs() const {
    if (device_ != nullptr) return {inputs_of(described_)};
    std::vector<Inputs> all;
    all.reserve(inputs_.size());
    for (const LayerInputs& layer : inputs_) all.push_back(layer.inputs);
    return all;
  }

  BenchPoint describe(const std::vector<PreparedLayer>& layers) const {
    BenchPoint point;
    point.shape = options_.shape;
    point.layer.name = "layer";
    point.choices = layers[0].choices()[0];
    point.overlap = layers[0].overlap(options_.shape.batch, options_.shape.q);
    point.target = context_.cpu_target();
    if (device_ != nullptr) point.device = device_->description();
    point.threads = context_.threads();
    point.layers = int(layers.size());
    for (const PreparedLayer& layer : layers) {
      for (const ReservedItem& item : layer.reserved_bytes()) {
        const bool own = item.name == "packed weights" || &layer == &layers[0];  // scratch is shared by all layers
        if (own) point.reserved_bytes += item.bytes;
      }
    }
    return point;
  }

  void time_on_host(std::vector<PreparedLayer>& layers, BenchPoint& point) {
    std::vector<StageTime> times;
    times.reserve(64);
    const int count = int(layers.size()), warmup = warmup_runs(count);
    for (int run = 0; run < warmup + options_.repeat; ++run) {
      PreparedLayer& layer = layers[size_t(run % count)];
      times.clear();
      layer.record_times(&times);
      const auto start = std::chrono::steady_clock::now();
      const Status status = layer.run(inputs_[size_t(run % count)].inputs.step);
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      status.or_throw();
      if (run >= warmup) {
        for (const StageTime& time : times) add_time(point.stages, time);
        point.layer.seconds.push_back(seconds);
      }
      if (options_.on_run) options_.on_run();
    }
  }

  void time_on_device(std::vector<PreparedLayer>& layers, BenchPoint& point) {
    std::vector<BFloat16> verified_out;
    if (options_.verify) {
      point.verified = verify_layer(context_, layers[0], *inputs_[0].placed, inputs_of(described_));
      verified_out = inputs_[0].placed->fetch_out();
    }
    point.layer.seconds = time_layers(layers);
    if (options_.verify) point.verified.push_back(same_bits(inputs_[0].placed->fetch_out(), verified_out));
    const auto alone = [&](std::initializer_list<std::string_view> stages) {
      return replay(layers.size(), [&](size_t i, Queue queue) {
        Status status;
        for (std::string_view stage : stages) {
          if (status.ok()) status = layers[i].run_stage(inputs_[i].inputs.step, stage, queue);
        }
        return status;
      });
    };
    const Step& step = inputs_[0].inputs.step;
    for (std::string_view stage : layers[0].stage_names(step.batch, step.q)) {
      point.stages.push_back({std::string(stage), alone({stage}), {}});
    }
    // Where the sparse core leaves its merge to the value stage, only both together do what attention does.
    point.chains.push_back(
        {"sparse_core+value", alone({name_of(StageId::kSparseCore), name_of(StageId::kValueProjection)}), {}});
    for (int run = 0; run < bench_runs(options_) && options_.on_run; ++run) options_.on_run();
  }

  std::vector<double> time_layers(std::vector<PreparedLayer>& layers) {
    // Whole runs first: they load the kernels, and leave what the stages alone read.
    for (size_t i = 0; i < layers.size(); ++i) layers[i].run(inputs_[i].inputs.step, device_->own_queue()).or_throw();
    device_->wait(device_->own_queue());
    return replay(layers.size(), [&](size_t i, Queue queue) { return layers[i].run(inputs_[i].inputs.step, queue); });
  }

  /// Seconds a layer of each replay of what `enqueue` records for all layers.
  std::vector<double> replay(size_t layers, FunctionRef<Status(size_t layer, Queue)> enqueue) {
    const std::unique_ptr<Recording> recording = device_->record([&](Queue queue) {
      for (size_t i = 0; i < layers; ++i) enqueue(i, queue).or_throw();
    });
    recording->time(kWarmReplays);
    std::vector<double> seconds = recording->time(options_.repeat);
    for (double& s : seconds) s /= double(layers);
    return seconds;
  }

  BenchOptions options_;
  Context context_;
  Device* device_;
  Case described_;  ///< device: the host's side of the inputs
  std::vector<LayerInputs> inputs_;
};

double BenchStage::percentile(double share) const {
  if (seconds.empty()) return 0;
  const double at = share * double(seconds.size() - 1);
  const size_t low = size_t(at), high = std::min(low + 1, seconds.size() - 1);
  return seconds[low] + (at - double(low)) * (seconds[high] - seconds[low]);
}

bool BenchPoint::agrees() const {
  return std::all_of(verified.begin(), verified.end(), [](const AgreementLine& line) { return line.ok; });
}

BenchCase::BenchCase(const BenchOptions& options, CachePool& pool) : impl_(std::make_unique<Impl>(options, pool)) {}
BenchCase::~BenchCase() = default;
BenchPoint BenchCase::time(const BenchPlan& plan, const Peaks& peaks) { return impl_->time(plan, peaks); }
double BenchCase::layer_seconds(const BenchPlan& plan) { return impl_->layer_seconds(plan); }
std::string BenchCase::choices(const BenchPlan& plan) { return impl_->choices(plan); }

int bench_runs(const BenchOptions& options) { return warmup_runs(std::max(1, options.layers)) + options.repeat; }

}  // namespace dsacore
