#include "driver/plan_report.h"

#include <exception>
#include <thread>

#include "layer/context.h"
#include "memory/memory.h"
#include "plan/plan.h"

namespace dsacore {
namespace {

/// A layer of zeros: what prepare needs to choose, pack and reserve.
struct ZeroLayer {
  MemoryBlock zeros;
  LayerConfig config;
  LayerSizes sizes;
  LayerWeights weights;
};

ZeroLayer zero_layer(const ProblemShape& shape, Memory& memory) {
  const int64_t q_lora = shape.q_lora, heads = shape.heads, index_rows = int64_t(shape.index_heads) * kIndexDim;
  const int64_t largest = std::max({heads * kHeadQuery * q_lora, heads * kKvB * kLatent, index_rows * q_lora});
  ZeroLayer layer{MemoryBlock(memory, largest * int64_t(sizeof(BFloat16)), "weights of zeros"), {}, {}, {}};
  const auto tensor = [&](int rank, int64_t rows, int64_t columns) {
    return TensorRef{layer.zeros.data(), ElementType::kBf16, rank, {rows, columns}};
  };
  layer.sizes = {shape.q_lora, shape.heads, shape.index_heads};
  layer.config.kv_format = shape.kv_format;
  layer.config.index_format = shape.index_format;
  layer.config.topk = shape.topk;
  layer.config.softmax_scale = layer.config.index_softmax_scale = layer.config.index_head_scale = 1;
  layer.weights = {tensor(1, q_lora, 0),
                   tensor(1, kLatent, 0),
                   tensor(2, heads * kHeadQuery, q_lora),
                   tensor(2, heads * kKvB, kLatent),
                   tensor(2, index_rows, q_lora),
                   tensor(1, kIndexDim, 0),
                   {}};
  return layer;
}

/// What a prepare of one rank leaves.
struct Prepared {
  std::vector<ReservedItem> reserved;
  Plan plan;
};

Prepared prepare(Context& context, const ZeroLayer& layer, const ProblemShape& shape, const RunOptions& options,
                 Box* box) {
  PrepareOptions prepare;
  prepare.batches = {{shape.rows, layer.sizes.width()}};
  prepare.queries = {shape.q};
  prepare.max_context = shape.length;
  prepare.overlap = options.overlap;
  prepare.kernels = options.kernels;
  prepare.plan_rows = options.plan_rows;
  prepare.box = box;
  const PreparedLayer prepared(context, layer.config, layer.weights, prepare);
  return {prepared.reserved_bytes(), context.impl().plans.last()};
}

/// Of one rank of several; prepare is collective.
Prepared prepare_ranks(const ContextOptions& context_options, const ZeroLayer& layer, const ProblemShape& shape,
                       const RunOptions& options) {
  const std::vector<std::shared_ptr<Transport>> transports = make_thread_transports(shape.ranks);
  Prepared first;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(shape.ranks));
  std::vector<std::thread> ranks;
  ranks.reserve(size_t(shape.ranks));
  for (int d = 0; d < shape.ranks; ++d) {
    ranks.emplace_back([&, d] {
      try {
        Context context(context_options);
        BoxOptions box_options;
        box_options.cap = shape.rows;
        box_options.heads = shape.heads;
        box_options.topk = shape.topk;
        box_options.kv_format = shape.kv_format;
        box_options.partial = options.partial;
        box_options.interleave = shape.interleave;
        box_options.deadline = options.deadline;
        Box box(transports[size_t(d)], box_options);
        Prepared mine = prepare(context, layer, shape, options, &box);
        if (d == 0) first = std::move(mine);
      } catch (...) {
        errors[size_t(d)] = std::current_exception();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return first;
}

}  // namespace

PlanReport plan_report(const ProblemShape& shape, const RunOptions& options) {
  ContextOptions context_options = context_options_of(options);
  if (shape.ranks > 1) context_options.threads = std::max(1, Context(context_options).threads() / shape.ranks);
  Context context(context_options);
  const Context::Impl& impl = context.impl();

  PlanReport report;
  report.target = context.cpu_target();
  report.threads = context.threads();
  report.tables = impl.tables_source;
  const ZeroLayer layer = zero_layer(shape, context.impl().memory());
  Prepared prepared = shape.ranks == 1 ? prepare(context, layer, shape, options, nullptr)
                                       : prepare_ranks(context_options, layer, shape, options);
  const Plan& plan = prepared.plan;
  plan.for_each_kernel([&](StageId id, const auto& kernel) {
    PlanReport::Stage stage{std::string(name_of(id)), std::string(kernel.name), {}};
    for (const PassedOver& other : plan.others[static_cast<size_t>(id)]) {
      stage.others.push_back({std::string(other.kernel), other.reason});
    }
    report.stages.push_back(std::move(stage));
  });
  report.rows = plan.key.shape.rows;
  report.overlap = name_of(plan.overlap);
  if (shape.ranks > 1) report.partial = name_of(plan.partial());
  report.reserved = std::move(prepared.reserved);
  for (const ReservedItem& item : report.reserved) report.reserved_bytes += item.bytes;
  return report;
}

}  // namespace dsacore
