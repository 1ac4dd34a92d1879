#include "driver/tune.h"

#include <fmt/format.h>

#include <algorithm>

#include "dsacore/status.h"
#include "layer/context.h"
#include "plan/choose.h"
#include "plan/registry.h"

namespace dsacore {
namespace {

/// Calls `visit(stage, kernels)` for the list of each stage of a step of one rank.
template <class Visit>
void for_each_list(const Backend& backend, Visit visit) {
  visit(StageId::kQuery, backend.query);
  visit(StageId::kIndexProjection, backend.index_projection);
  visit(StageId::kIndexer, backend.indexer);
  visit(StageId::kSparseCore, backend.sparse_core);
  visit(StageId::kValueProjection, backend.value);
}

ShapeKey key_of(const CaseOptions& o) {
  return {
      {o.q_lora, o.heads, o.index_heads}, o.kv_format, o.index_format, o.topk, o.batch, o.q, 1, std::stoll(o.context)};
}

TuneSpace space_of(const Backend& backend, const ShapeKey& key, bool on_device) {
  TuneSpace space;
  for_each_list(backend, [&](StageId stage, const auto& kernels) {
    for (const auto& kernel : kernels) {
      if (!kernel.accepts(key).ok) continue;
      space.kernels[static_cast<size_t>(stage)].emplace_back(kernel.name);
      if (stage == StageId::kIndexer && !kernel.fused && space.unfused_indexer.empty()) {
        space.unfused_indexer = kernel.name;
      }
    }
  });
  if (on_device) {
    space.overlaps = {"serial", "fork", "front", "late", "late_front"};
  } else {
    space.unfused_indexer.clear();  // every mode runs as serial
  }
  return space;
}

TunedPlan plan_of(const Tables& tables, const ShapeKey& shape) {
  TunedPlan plan;
  for (size_t stage = 0; stage < plan.kernels.size(); ++stage) {
    plan.kernels[stage] = tables.kernel_of(StageId(stage), shape.index_format, shape.q, shape.rows);
  }
  plan.overlap = name_of(tables.overlap_of(shape.rows));
  plan.unfused_overlap = name_of(tables.unfused_overlap_of(shape.rows));
  return plan;
}

/// Whether of the kernels that a table's word lets be taken one accepts the smallest and the largest of all that a
/// shape is made of.
bool always_accepts(const Backend& backend, StageId wanted, std::string_view word, int heads_below, int heads,
                    int rows) {
  bool all = true;
  for_each_list(backend, [&](StageId stage, const auto& kernels) {
    if (stage != wanted) return;
    const auto check = [&](const ShapeKey& key) {
      const auto takes = [&](const auto& kernel) { return allows(word, kernel.name) && kernel.accepts(key).ok; };
      all = all && std::any_of(kernels.begin(), kernels.end(), takes);
    };
    for (int h : {heads_below + 1, heads}) {
      for (int q = 1; q <= kMaxQ; ++q) {
        if (rows % q != 0) continue;
        for (KvFormat kv : {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
          for (IndexFormat index : {IndexFormat::kFp8, IndexFormat::kMxfp4}) {
            check({{kQLoraStep, h, kMinIndexHeads}, kv, index, 1, rows, q, 1, 1});
            check({{kMaxQLora, h, kMaxIndexHeads}, kv, index, kMaxTopk, rows, q, 1, kMaxContext});
          }
        }
      }
    }
  });
  return all;
}

void check_batches(const TuneOptions& options) {
  for (int batch : options.batches) {
    if (batch % options.shape.q == 0) continue;
    throw Exception({ErrorCode::kRefused, "--batches", std::to_string(batch),
                     fmt::format("must be a multiple of --q {}", options.shape.q)});
  }
}

}  // namespace

TuneResult tune(const TuneOptions& options, const std::string& date, const std::string& program) {
  check_batches(options);
  const Context context(context_options_of(options.run));  // for its backend and tables
  const Context::Impl& machine = context.impl();
  const Backend& backend = *machine.backend;
  const bool on_device = machine.device != nullptr;
  const auto tables_of = [&](int heads) {
    return read_tables(machine.tables_text, machine.tables_source, backend.name, backend.target, heads);
  };
  TuneResult result;
  std::vector<TunedShape> shapes;
  CachePool pool;
  BenchOptions bench;
  bench.run = options.run;
  bench.repeat = options.repeat;
  for (int heads : options.heads) {
    for (int rows : options.batches) {
      bench.shape = options.shape;
      bench.shape.heads = heads;
      bench.shape.batch = rows;
      if (options.on_shape) options.on_shape(fmt::format("{} heads, {} rows", heads, rows));
      BenchCase measured(bench, pool);
      const auto choices = [&](const BenchPlan& plan) { return measured.choices(plan); };
      const auto seconds = [&](const BenchPlan& plan) { return measured.layer_seconds(plan); };
      const ShapeKey key = key_of(bench.shape);
      const TunedPlan start = plan_of(tables_of(heads), key);
      TuneFinding finding{heads, rows, {}, measured.choices(start.laid_over()), {}};
      const TunedPlan found =
          search_plan(start, space_of(backend, key, on_device), options.gain, {choices, seconds}, finding.times);
      finding.after = measured.choices(found.laid_over());
      result.findings.push_back(std::move(finding));
      shapes.push_back({heads, rows, found});
    }
  }
  TablesEntry before;
  before.backend = backend.name;
  if (!on_device) before.target = backend.target;
  before.tables = tables_of(options.heads[0]);
  before.tables.indexers.erase({options.shape.index_format, options.shape.q});  // what is found stands for it
  const auto accepts = [&](StageId stage, std::string_view kernel, int heads_below, int heads, int rows) {
    return always_accepts(backend, stage, kernel, heads_below, heads, rows);
  };
  const TablesOrigin origin{
      on_device ? machine.device->description() : fmt::format("host, threads: {}", context.threads()), date, program,
      fmt::format("kv={},index={},q={},len={}", name_of(options.shape.kv_format), name_of(options.shape.index_format),
                  options.shape.q, options.shape.context)};
  result.text = tables_text(tuned_entries(std::move(shapes), before, accepts), origin, machine.tables_text);
  return result;
}

}  // namespace dsacore
