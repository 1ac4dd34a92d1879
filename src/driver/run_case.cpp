#include "driver/run_case.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "driver/placed_inputs.h"
#include "driver/shard.h"
#include "layer/context.h"

namespace dsacore {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

[[noreturn]] void refuse(std::string argument, int64_t value, std::string allowed) {
  throw Exception({ErrorCode::kRefused, std::move(argument), std::to_string(value), std::move(allowed)});
}

/// What must hold before anything is prepared or sharded.
void check_run(const Inputs& inputs, const RunOptions& options) {
  const Step& step = inputs.step;
  if (step.q < 1 || step.q > kMaxQ) refuse("q", step.q, "allowed 1.." + std::to_string(kMaxQ));
  if (step.batch < 1 || step.batch > kMaxRows)
    refuse("B", step.batch, "allowed 1.." + std::to_string(kMaxRows) + " rows");
  if (step.batch % step.q != 0) refuse("B", step.batch, "must be a multiple of q = " + std::to_string(step.q));
  if (options.dcp < 1 || options.dcp > kMaxRanks) refuse("dcp", options.dcp, "allowed 1.." + std::to_string(kMaxRanks));
  if (options.dcp > 1 && options.backend == BackendKind::kCuda) {
    throw Exception({ErrorCode::kUnsupported, "dcp", std::to_string(options.dcp), "the cuda backend runs one rank"});
  }
  if (options.deadline.count() < 1) refuse("deadline", options.deadline.count(), "at least 1 ms");
  if (options.interleave < 1 || options.interleave > kMaxContext) {
    refuse("interleave", options.interleave, "allowed 1.." + std::to_string(kMaxContext));
  }
}

/// Inputs where the context's layers take them from: on the host as they are, on a device a copy.
class RunInputs {
 public:
  RunInputs(const Inputs& host, Context& context) : host_(host) {
    if (context.impl().device != nullptr) {
      check_inputs(host);  // the layer cannot: it does not read what lies on a device
      placed_.emplace(host, context.impl().memory());
      return;
    }
    out_.resize(size_t(host.step.batch) * size_t(host.sizes.heads) * kValue);
  }

  const Inputs& inputs() const { return placed_ ? placed_->inputs() : host_; }
  Step step() {
    if (placed_) return placed_->inputs().step;
    Step step = host_.step;
    step.out = View<BFloat16, 2>(out_.data(), step.batch, int64_t(host_.sizes.heads) * kValue);
    return step;
  }
  /// The output; the caches are brought back to the host's.
  std::vector<BFloat16> finish() {
    if (!placed_) return std::move(out_);
    placed_->fetch_caches(host_);
    return placed_->fetch_out();
  }

 private:
  const Inputs& host_;
  std::optional<PlacedInputs> placed_;
  std::vector<BFloat16> out_;
};

/// Prepares and runs one rank (or the only one, `box` null).
RunResult run_rank(const Inputs& host, const RunOptions& options, int threads, Box* box) {
  const Clock::time_point start = Clock::now();
  ContextOptions context_options = context_options_of(options);
  context_options.threads = threads;
  Context context(context_options);
  RunInputs placed(host, context);
  const Inputs& inputs = placed.inputs();
  PrepareOptions prepare = prepare_options_of(host, options);
  prepare.box = box;
  PreparedLayer layer(context, inputs.config, inputs.weights, prepare);
  layer.prepare_cache(inputs.kv, inputs.index);

  RunResult result;
  RunReport& report = result.report;
  report.target = context.cpu_target();
  report.threads = context.threads();
  report.choices = layer.choices();
  report.reserved = layer.reserved_bytes();
  for (const ReservedItem& item : report.reserved) report.reserved_bytes += item.bytes;

  report.stages.reserve(64);
  layer.record_times(&report.stages);
  report.prepare_seconds = seconds_since(start);
  const Clock::time_point begin = Clock::now();
  layer.run(placed.step()).or_throw();
  if (Device* device = context.impl().device.get(); device != nullptr) device->wait({});
  layer.inputs_status().or_throw();
  report.run_seconds = seconds_since(begin);
  if (options.dump) result.outputs.stages = dump_of(layer.stages(), box == nullptr, context.impl().memory());
  result.outputs.out = placed.finish();
  return result;
}

/// Places a rank's heads `[B, H, width]` among all heads `[B, D*H, width]`.
template <class T>
void place_heads(const std::vector<T>& part, int64_t rows, int rank, int ranks, std::vector<T>& whole) {
  if (part.empty()) return;
  const size_t width = part.size() / size_t(rows);
  whole.resize(part.size() * size_t(ranks));
  for (size_t b = 0; b < size_t(rows); ++b) {
    std::copy_n(part.begin() + ptrdiff_t(b * width), width,
                whole.begin() + ptrdiff_t((b * size_t(ranks) + size_t(rank)) * width));
  }
}

/// One output of the ranks' ones; everything that all ranks agree on is rank 0's.
RunResult gather(std::vector<RunResult>& ranks, int64_t rows) {
  RunResult whole;
  const int size = int(ranks.size());
  whole.report = ranks[0].report;
  whole.report.reserved_bytes = 0;
  for (const RunResult& rank : ranks) {
    whole.report.reserved_bytes += rank.report.reserved_bytes;
    whole.report.prepare_seconds = std::max(whole.report.prepare_seconds, rank.report.prepare_seconds);
    whole.report.run_seconds = std::max(whole.report.run_seconds, rank.report.run_seconds);
  }
  if (ranks[0].outputs.stages) {
    whole.outputs.stages = std::move(*ranks[0].outputs.stages);
    StageDump& dump = *whole.outputs.stages;
    std::vector<BFloat16> latent;
    std::vector<float> lse;
    place_heads(dump.latent, rows, 0, size, latent);
    place_heads(dump.lse, rows, 0, size, lse);
    for (int d = 1; d < size; ++d) {
      place_heads(ranks[size_t(d)].outputs.stages->latent, rows, d, size, latent);
      place_heads(ranks[size_t(d)].outputs.stages->lse, rows, d, size, lse);
    }
    dump.latent = std::move(latent);
    dump.lse = std::move(lse);
  }
  for (int d = 0; d < size; ++d) place_heads(ranks[size_t(d)].outputs.out, rows, d, size, whole.outputs.out);
  return whole;
}

/// The error that explains the others: a rank that only lost its peer comes last.
[[noreturn]] void rethrow_cause(const std::vector<std::exception_ptr>& errors) {
  std::exception_ptr chosen;
  bool chosen_is_loss = true;
  for (const std::exception_ptr& error : errors) {
    if (!error || !chosen_is_loss) continue;
    bool loss = false;
    try {
      std::rethrow_exception(error);
    } catch (const Exception& e) {
      loss = e.error().code == ErrorCode::kPeerLost;
    } catch (...) {
    }
    if (!chosen || !loss) chosen = error, chosen_is_loss = loss;
  }
  std::rethrow_exception(chosen);
}

RunResult run_ranks(const Inputs& inputs, const RunOptions& options) {
  const int size = options.dcp;
  const int threads = std::max(1, Context(context_options_of(options)).threads() / size);
  const std::vector<std::shared_ptr<Transport>> transports = make_thread_transports(size);
  std::vector<RunResult> results(static_cast<size_t>(size));
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  const auto run_one = [&](int d) {
    try {
      const Shard mine = shard(inputs, {size, d, options.interleave});
      BoxOptions box_options;
      box_options.cap = inputs.step.batch;
      box_options.heads = mine.inputs.sizes.heads;
      box_options.topk = inputs.config.topk;
      box_options.kv_format = inputs.config.kv_format;
      box_options.partial = options.partial;
      box_options.interleave = options.interleave;
      box_options.deadline = options.deadline;
      Box box(transports[size_t(d)], box_options);
      results[size_t(d)] = run_rank(mine.inputs, options, threads, &box);
    } catch (...) {
      errors[size_t(d)] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (int d = 1; d < size; ++d) others.emplace_back(run_one, d);
  run_one(0);
  for (std::thread& other : others) other.join();
  if (std::any_of(errors.begin(), errors.end(), [](const std::exception_ptr& e) { return e != nullptr; }))
    rethrow_cause(errors);
  return gather(results, inputs.step.batch);
}

}  // namespace

StageDump dump_of(const StageViews& views, bool one_rank, const Memory& memory) {
  StageDump dump;
  dump.q_c = fetched(views.q_c, memory);
  dump.query = fetched(views.query, memory);
  dump.index_query = fetched(views.index_query, memory);
  dump.head_weights = fetched(views.head_weights, memory);
  dump.topk_tokens = fetched(views.topk_tokens, memory);
  if (one_rank) dump.topk_rows = fetched(views.topk_rows, memory);
  dump.valid = fetched(views.valid, memory);
  dump.latent = fetched(views.latent, memory);
  dump.lse = fetched(views.lse, memory);
  return dump;
}

ContextOptions context_options_of(const RunOptions& options) {
  ContextOptions context;
  context.backend = options.backend;
  context.device = options.device;
  context.threads = options.threads;
  context.cpu_target = options.cpu_target;
  context.tables_file = options.tables_file;
  return context;
}

PrepareOptions prepare_options_of(const Inputs& host, const RunOptions& options) {
  PrepareOptions prepare;
  prepare.batches = {{host.step.batch, host.step.projected.stride(0)}};
  prepare.queries = {host.step.q};
  prepare.max_context = std::max<int64_t>(1, longest_context(host.step));
  // A page may belong to several requests, so the pages bound the context of each.
  prepare.cache_pages = host.index.pages;
  prepare.overlap = options.overlap;
  prepare.kernels = options.kernels;
  prepare.plan_rows = options.plan_rows;
  prepare.check_inputs = options.check_inputs;
  return prepare;
}

RunResult run_case(const Inputs& inputs, const RunOptions& options) {
  check_run(inputs, options);
  if (options.dcp > 1) {
    if (inputs.sizes.heads % options.dcp != 0) {
      refuse("dcp", options.dcp, "must divide the layer's " + std::to_string(inputs.sizes.heads) + " heads");
    }
    check_inputs(inputs);
    return run_ranks(inputs, options);
  }
  RunResult result = run_rank(inputs, options, options.threads, nullptr);
  result.outputs.kv = inputs.kv;
  result.outputs.index = inputs.index;
  return result;
}

}  // namespace dsacore
