// run: the stages of one step in the order of spec 4, 5 and 7, the same for backends that compute on the host and for
// those that enqueue on a device. Orchestration only.
#include <algorithm>
#include <chrono>
#include <limits>

#include "layer/dcp.h"
#include "layer/layer_impl.h"

namespace dsacore {
namespace {

template <class T, class... Extents>
View<T, sizeof...(Extents)> view_of(const MemoryBlock* buffer, Extents... extents) {
  return View<T, sizeof...(Extents)>(reinterpret_cast<T*>(buffer->data()), extents...);
}

/// Columns `at .. at + width` of the projected rows; nothing where there are none.
View<const BFloat16, 2> part_of(View<const BFloat16, 2> projected, int64_t at, int64_t width) {
  if (projected.empty()) return {};
  return View<const BFloat16, 2>(projected.data() + at, projected.extent(0), width).with_pitch(projected.stride(0));
}

template <class T>
void fill(View<T, 2> view, int64_t from_row, T value) {
  for (int64_t b = from_row; b < view.extent(0); ++b) {
    for (int64_t i = 0; i < view.extent(1); ++i) view(b, i) = value;
  }
}

/// A failure that was thrown, as a status.
template <class Body>
Status status_of(Body body) noexcept {
  try {
    return body();
  } catch (const Exception& e) {
    return Status(e.error());
  } catch (const std::exception& e) {
    return Status({ErrorCode::kInternal, "run", "exception", e.what()});
  }
}

}  // namespace

/// Views of one run: `rows` live ones.
struct PreparedLayer::Impl::RunState {
  const Step& step;
  const PreparedShape& shape;
  int64_t rows;
  Workspace workspace;
  View<BFloat16, 2> q_c;
  QueryRows query;
  View<uint8_t, 3> index_query;
  View<float, 2> head_weights;
  View<int32_t, 2> topk_tokens;
  View<int32_t, 2> topk_rows;
  View<int32_t, 1> valid;
  View<BFloat16, 3> latent;
  View<float, 2> lse;
  View<const BFloat16, 2> gate;
  std::vector<StageTime>* times;
  Device* device;

  /// Runs a kernel and notes its time; on a device, enqueues it.
  template <class Args>
  void run(StageId stage, const Kernel<Args>* kernel, const Args& args) {
    const KernelScratch& scratch = shape.scratch[static_cast<size_t>(stage)];
    workspace.scratch = {scratch.block->data(), size_t(scratch.bytes)};
    if (device != nullptr) device->announce(workspace.queue, name_of(stage));
    const auto start = std::chrono::steady_clock::now();
    kernel->run(args, workspace);
    if (times != nullptr && times->size() < times->capacity()) {
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
      times->push_back({name_of(stage).data(), spent.count(), start});
    }
  }
};

Status PreparedLayer::Impl::run(const Step& step, Queue queue) noexcept {
  const auto checked_run = [&] {
    const PreparedShape* shape = nullptr;
    if (Status s = check(step, &shape); !s.ok()) return s;
    return run_stages(step, *shape, queue);
  };
  if (context.device != nullptr) {
    return status_of([&] {
      const DeviceScope scope(context.device.get());
      return checked_run();
    });
  }
  Status status;
  context.threads.together([&] { status = status_of(checked_run); });  // the threads stand by from stage to stage
  return status;
}

Status PreparedLayer::Impl::run_stage(const Step& step, StageId stage, Queue queue) noexcept {
  return status_of([&] {
    const DeviceScope scope(context.device.get());
    const PreparedShape* shape = nullptr;
    if (Status s = check(step, &shape); !s.ok()) return s;
    const bool there = std::any_of(shape->plan->launches.begin(), shape->plan->launches.end(),
                                   [&](const Launch& launch) { return launch.stage == stage; });
    if (box != nullptr || !there) {
      return Status({ErrorCode::kRefused, "stage", std::string(name_of(stage)), "a stage of a step of one rank"});
    }
    RunState state = begin(step, *shape, queue);
    if (state.rows > 0) run_one(state, stage);
    return Status();
  });
}

std::vector<std::string_view> PreparedLayer::Impl::stage_names(int rows, int q) const {
  std::vector<std::string_view> names;
  const PreparedShape* shape = find_shape(rows, q);
  if (shape == nullptr) return names;
  for (const Launch& launch : shape->plan->launches) names.push_back(name_of(launch.stage));
  return names;
}

PreparedLayer::Impl::RunState PreparedLayer::Impl::begin(const Step& step, const PreparedShape& shape, Queue queue) {
  const LayerModel& m = model();
  const LayerSizes& sizes = m.sizes;
  const int64_t topk = m.config.topk;
  const int64_t all = step.batch;
  const int64_t rows = step.seq_lens.extent(0) * step.q;
  last_rows = step.batch;
  last_partial = shape.plan->partial();
  return {.step = step,
          .shape = shape,
          .rows = rows,
          .workspace = {{}, &context.threads, context.backend->target_data, queue},
          .q_c = view_of<BFloat16>(buffers.q_c, all, sizes.q_lora).first(rows),
          .query = {buffers.query->data(), sizes.heads, has_fp8_query(m.config.kv_format) ? 1 : 2},
          .index_query = view_of<uint8_t>(buffers.index_query, all, sizes.index_heads, kIndexDim).first(rows),
          .head_weights = view_of<float>(buffers.head_weights, all, sizes.index_heads).first(rows),
          .topk_tokens = view_of<int32_t>(buffers.topk_tokens, all, topk).first(rows),
          .topk_rows = view_of<int32_t>(buffers.topk_rows, all, topk).first(rows),
          .valid = view_of<int32_t>(buffers.valid, all).first(rows),
          .latent = view_of<BFloat16>(buffers.latent, all, sizes.heads, kLatent).first(rows),
          .lse = view_of<float>(buffers.lse, all, sizes.heads).first(rows),
          .gate = part_of(step.projected, sizes.gate_at(), int64_t(sizes.heads) * kValue),
          .times = context.device == nullptr ? times : nullptr,
          .device = context.device.get()};
}

InputCheckArgs PreparedLayer::Impl::input_check(const Step& step, const PreparedShape* shape) const {
  InputCheckArgs args{};
  args.slots = step.slots;
  args.index_slots = step.index_slots;
  args.seq_lens = step.seq_lens;
  args.block_table = step.block_table;
  args.index_block_table = step.index_block_table;
  args.shard = shard;
  args.kv = kv;
  args.index = index;
  args.max_context = max_context;
  args.local_context = shape != nullptr ? shape->key.max_context : 0;
  args.record = reinterpret_cast<InputRecord*>(input_record.data());
  return args;
}

/// Enqueues the check of a step and returns the step that it lets through: the same, or one of empty requests.
Step PreparedLayer::Impl::checked(const Step& step, const PreparedShape& shape, Queue queue) {
  if (!checks_inputs || step.seq_lens.extent(0) == 0) return step;
  InputCheckArgs args = input_check(step, &shape);
  args.checked = {view_of<int64_t>(buffers.checked_slots, step.slots.extent(0)),
                  view_of<int64_t>(buffers.checked_index_slots, step.slots.extent(0)),
                  view_of<int32_t>(buffers.checked_lengths, step.seq_lens.extent(0))};
  context.device->announce(queue, "check_inputs");
  context.backend->check_inputs(args, {{}, &context.threads, context.backend->target_data, queue});
  Step passed = step;
  passed.slots = args.checked.slots;
  passed.index_slots = args.checked.index_slots;
  passed.seq_lens = args.checked.seq_lens;
  return passed;
}

Status PreparedLayer::Impl::inputs_status() {
  if (!checks_inputs) return {};
  return status_of([&] {
    InputRecord record{};
    context.memory().copy_out(&record, input_record.data(), int64_t(sizeof(record)));
    const std::optional<Error> offence = context.backend->offence_of(record, input_check({}, nullptr));
    if (!offence) return Status();
    context.memory().fill(input_record.data(), std::byte(0), int64_t(sizeof(record)));
    return Status(*offence);
  });
}

Status PreparedLayer::Impl::run_stages(const Step& given, const PreparedShape& shape, Queue queue) {
  const Step step = checked(given, shape, queue);
  RunState s = begin(step, shape, queue);
  if (box != nullptr) {
    if (Status status = run_ranks(s); !status.ok()) {
      fill(step.out, 0, BFloat16{0x7FC0});
      return status;
    }
  } else if (s.rows > 0) {
    run_launches(s);
  }
  finish_empty_rows(s);
  return {};
}

/// One rank: the launches of the shape's overlap mode, each on its lane.
void PreparedLayer::Impl::run_launches(RunState& s) {
  const LaunchList& launches = s.shape.plan->launches;
  const Queue main = s.workspace.queue;
  if (launches.uses_side()) context.device->order(main, context.device->side());
  for (const Launch& launch : launches) {
    if (launch.joins) context.device->order(context.device->side(), main);
    s.workspace.queue = launch.lane == Lane::kSide ? context.device->side() : main;
    s.workspace.early_start = launch.starts_early;
    s.workspace.beside = launch.beside;
    run_one(s, launch.stage);
  }
  s.workspace.queue = main;
  s.workspace.early_start = true;
  s.workspace.beside = false;
}

IndexerArgs PreparedLayer::Impl::indexer_args(const RunState& s) const {
  return {&model(),    s.step.q,       shard, s.step.seq_lens, s.step.block_table, s.step.index_block_table,
          kv.page,     kv.stride_rows, index, s.index_query,   s.head_weights,     s.topk_tokens,
          s.topk_rows, s.valid,        {}};
}

SparseCoreArgs PreparedLayer::Impl::sparse_core_args(const RunState& s) const {
  return {&model(), s.query, s.topk_rows, s.valid, kv, s.latent, s.lse, s.shape.plan->value->parts};
}

/// One stage of one rank, with its inputs and outputs.
void PreparedLayer::Impl::run_one(RunState& s, StageId stage) {
  const LayerModel& m = model();
  const Plan& plan = *s.shape.plan;
  switch (stage) {
    case StageId::kNorm: s.run(stage, plan.norm, NormArgs{&m, s.step.projected, s.q_c}); break;
    case StageId::kQuery:
      s.run(stage, plan.query,
            QueryArgs{&m, s.step.projected, s.step.slots, kv, s.q_c, s.query, plan.query_finds_q_c()});
      break;
    case StageId::kIndexProjection:
      s.run(stage, plan.index_projection,
            IndexProjectionArgs{&m, s.step.projected, s.q_c, s.step.index_slots, index, s.index_query, s.head_weights,
                                plan.front_leaves_q_c() ? s.q_c : View<BFloat16, 2>()});
      break;
    case StageId::kIndexer: s.run(stage, plan.indexer, indexer_args(s)); break;
    case StageId::kSparseCore: s.run(stage, plan.sparse_core, sparse_core_args(s)); break;
    case StageId::kValueProjection: {
      const SparseCoreArgs core = sparse_core_args(s);
      s.run(stage, plan.value,
            ValueArgs{&m, s.latent, m.w_uv(), s.gate, s.step.out.first(s.rows), s.step.seq_lens, s.step.q, &core,
                      s.shape.scratch[static_cast<size_t>(StageId::kSparseCore)].block->data()});
      break;
    }
    case StageId::kCandidateMerge:
    case StageId::kPartialMerge:
    case StageId::kGate: break;  // of several ranks: run_ranks
  }
}

/// Spec 7, steps 1 to 4. The query rows travel while this rank finds its candidates.
Status PreparedLayer::Impl::run_ranks(RunState& s) {
  const LayerModel& m = model();
  const Plan& plan = *s.shape.plan;
  const int64_t heads = m.sizes.heads;
  const int64_t all_heads = heads * shard.ranks;
  const int64_t topk = m.config.topk;
  const bool proj = plan.partial() == PartialFormat::kProj;
  BoxRun ranks(box->impl(), context.threads, {s.rows, s.step.q, proj ? kValue : kLatent, s.step.seq_lens});

  if (s.rows > 0) run_one(s, StageId::kQuery);  // 1
  if (Status e = ranks.publish_query(s.query); !e.ok()) return e;

  const auto candidates = view_of<Candidate>(buffers.candidates, s.rows, topk);
  const auto all_candidates = view_of<Candidate>(buffers.all_candidates, int64_t(shard.ranks), s.rows, topk);
  const View<int32_t, 1> local_valid = view_of<int32_t>(buffers.local_valid, s.rows);
  if (s.rows > 0) {  // 2
    run_one(s, StageId::kIndexProjection);
    IndexerArgs args = indexer_args(s);
    args.topk_tokens = args.topk_rows = {};
    args.valid = {};
    args.candidates = candidates;
    s.run(StageId::kIndexer, plan.indexer, args);
  }
  if (Status e = ranks.publish_candidates(candidates); !e.ok()) return e;
  const QueryRows all_query{buffers.all_query->data(), int(all_heads), s.query.element};
  if (Status e = ranks.collect_query(all_query); !e.ok()) return e;
  if (Status e = ranks.collect_candidates(all_candidates); !e.ok()) return e;
  if (s.rows > 0) {
    s.run(StageId::kCandidateMerge, plan.candidate_merge,
          CandidateMergeArgs{&m, s.step.q, shard, s.step.seq_lens, s.step.block_table, kv.page, kv.stride_rows,
                             all_candidates, s.topk_tokens, s.valid, s.topk_rows, local_valid});
  }

  const auto partial_latent = view_of<BFloat16>(buffers.partial_latent, s.rows, all_heads, int64_t(kLatent));
  const auto partial_lse = view_of<float>(buffers.partial_lse, s.rows, all_heads);
  if (s.rows > 0) {  // 3
    s.run(StageId::kSparseCore, plan.sparse_core,
          SparseCoreArgs{&m, all_query, s.topk_rows, local_valid, kv, partial_latent, partial_lse});
  }
  View<const BFloat16, 3> partial = partial_latent;
  if (proj) {
    const auto v = view_of<BFloat16>(buffers.partial_v, s.rows, all_heads * kValue);
    if (s.rows > 0) {
      const View<const BFloat16, 3> w_uv(reinterpret_cast<const BFloat16*>(gathered_uv.data()), all_heads, kValue,
                                         kLatent);
      s.run(StageId::kValueProjection, plan.value, ValueArgs{&m, partial_latent, w_uv, {}, v});
    }
    partial = View<const BFloat16, 3>(v.data(), s.rows, all_heads, kValue);
  }
  const auto sent = view_of<BFloat16>(buffers.sent, int64_t(shard.ranks), s.rows, heads, partial.extent(2));
  const auto sent_lse = view_of<float>(buffers.sent_lse, int64_t(shard.ranks), s.rows, heads);
  if (Status e = ranks.publish_partials(partial, partial_lse); !e.ok()) return e;  // 4
  if (Status e = ranks.collect_partials(sent, sent_lse); !e.ok()) return e;
  if (s.rows == 0) return {};
  if (!proj) {
    s.run(StageId::kPartialMerge, plan.partial_merge, PartialMergeArgs{sent, sent_lse, s.latent, s.lse});
    run_one(s, StageId::kValueProjection);
    return {};
  }
  const auto merged = view_of<BFloat16>(buffers.merged_v, s.rows, heads, int64_t(kValue));
  s.run(StageId::kPartialMerge, plan.partial_merge, PartialMergeArgs{sent, sent_lse, merged, s.lse});
  s.run(StageId::kGate, plan.gate,
        GateArgs{View<const BFloat16, 2>(merged.data(), s.rows, heads * kValue), s.gate, s.step.out.first(s.rows)});
  return {};
}

/// Rows of requests with `seq_len == 0` give zeros, and so do the rows past the requests given (spec 4, 5).
void PreparedLayer::Impl::finish_empty_rows(const RunState& s) {
  const LayerSizes& sizes = model().sizes;
  const int64_t all = s.step.batch;
  const int64_t topk = model().config.topk;
  if (context.backend->pad != nullptr) {  // its value kernels write zeros where a length is 0
    if (s.rows == all) return;
    context.device->announce(s.workspace.queue, "pad");
    context.backend->pad(
        {s.rows, view_of<int32_t>(buffers.topk_tokens, all, topk), view_of<int32_t>(buffers.topk_rows, all, topk),
         view_of<int32_t>(buffers.valid, all), view_of<BFloat16>(buffers.latent, all, sizes.heads, kLatent),
         view_of<float>(buffers.lse, all, sizes.heads), s.step.out},
        s.workspace);
    return;
  }
  const auto zero_out = [&](int64_t b) { std::fill_n(s.step.out.row(b), s.step.out.extent(1), BFloat16{}); };
  for (int64_t b = 0; b < s.rows; ++b) {
    if (s.step.seq_lens(b / s.step.q) == 0) zero_out(b);
  }
  for (int64_t b = s.rows; b < all; ++b) zero_out(b);
  fill(view_of<int32_t>(buffers.topk_tokens, all, topk), s.rows, -1);
  fill(view_of<int32_t>(buffers.topk_rows, all, topk), s.rows, -1);
  fill(view_of<int32_t>(buffers.valid, all, 1), s.rows, 0);
  fill(view_of<BFloat16>(buffers.latent, all, sizes.heads * kLatent), s.rows, BFloat16{});
  fill(view_of<float>(buffers.lse, all, sizes.heads), s.rows, -std::numeric_limits<float>::infinity());
}

StageViews PreparedLayer::Impl::stages() const {
  const LayerSizes& sizes = model().sizes;
  const int64_t all = last_rows;
  const int64_t heads = int64_t(sizes.heads) * shard.ranks;
  const int64_t element = has_fp8_query(model().config.kv_format) ? 1 : 2;
  StageViews views;
  views.q_c = view_of<const BFloat16>(buffers.q_c, all, sizes.q_lora);
  views.query =
      view_of<const std::byte>(box != nullptr ? buffers.all_query : buffers.query, all, heads, kQueryRow * element);
  views.index_query = view_of<const uint8_t>(buffers.index_query, all, sizes.index_heads, kIndexDim);
  views.head_weights = view_of<const float>(buffers.head_weights, all, sizes.index_heads);
  views.topk_tokens = view_of<const int32_t>(buffers.topk_tokens, all, model().config.topk);
  views.topk_rows = view_of<const int32_t>(buffers.topk_rows, all, model().config.topk);
  views.valid = view_of<const int32_t>(buffers.valid, all);
  if (box == nullptr || last_partial == PartialFormat::kBf16) {
    views.latent = view_of<const BFloat16>(buffers.latent, all, sizes.heads, kLatent);
  }
  views.lse = view_of<const float>(buffers.lse, all, sizes.heads);
  return views;
}

Status PreparedLayer::run(const Step& step, Queue queue) noexcept { return impl_->run(step, queue); }
Status PreparedLayer::run_stage(const Step& step, std::string_view stage, Queue queue) noexcept {
  for (int id = 0; id < kStages; ++id) {
    if (name_of(StageId(id)) == stage) return impl_->run_stage(step, StageId(id), queue);
  }
  return Status({ErrorCode::kRefused, "stage", std::string(stage), "a stage of a step of one rank"});
}
Status PreparedLayer::inputs_status() { return impl_->inputs_status(); }
std::vector<std::string_view> PreparedLayer::stage_names(int rows, int q) const { return impl_->stage_names(rows, q); }
OverlapMode PreparedLayer::overlap(int rows, int q) const {
  const PreparedShape* shape = impl_->find_shape(rows, q);
  return shape != nullptr ? shape->plan->overlap : OverlapMode::kSerial;
}
StageViews PreparedLayer::stages() const { return impl_->stages(); }
View<const std::byte, 3> PreparedLayer::query() const { return impl_->stages().query; }

}  // namespace dsacore
