// prepare and prepare_cache: checks, choices, packing, reservations, binding. Nothing is computed here.
#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include "format/layouts.h"
#include "layer/dcp.h"
#include "layer/layer_impl.h"

namespace dsacore {
namespace {

[[noreturn]] void refuse(std::string argument, std::string value, std::string allowed) {
  throw Exception({ErrorCode::kRefused, std::move(argument), std::move(value), std::move(allowed)});
}

void require_range(const std::string& argument, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    refuse(argument, std::to_string(value), "allowed " + std::to_string(low) + ".." + std::to_string(high));
  }
}

void check_options(const LayerModel& model, const PrepareOptions& options) {
  if (options.batches.empty()) refuse("batches", "none", "at least one");
  if (options.queries.empty()) refuse("queries", "none", "at least one");
  require_range("max_context", options.max_context, 1, kMaxContext);
  require_range("cache_pages", options.cache_pages, 0, std::numeric_limits<int32_t>::max());
  for (int q : options.queries) require_range("q", q, 1, kMaxQ);
  for (int rows : options.plan_rows) require_range("plan_rows", rows, 1, kMaxRows);
  for (const PreparedBatch& batch : options.batches) {
    require_range("batch", batch.rows, 1, kMaxRows);
    require_range("pitch of batch " + std::to_string(batch.rows), batch.pitch_elems, model.sizes.width(), kMaxPitch);
    const auto same = [&](const PreparedBatch& other) { return other.rows == batch.rows; };
    if (std::count_if(options.batches.begin(), options.batches.end(), same) > 1) {
      refuse("batch", std::to_string(batch.rows), "given twice");
    }
  }
}

void check_box(const LayerModel& model, const PrepareOptions& options) {
  if (options.box == nullptr) return;
  const BoxOptions& box = options.box->options();
  if (box.heads != model.sizes.heads) {
    refuse("box heads", std::to_string(box.heads), "must be the layer's " + std::to_string(model.sizes.heads));
  }
  if (box.topk != model.config.topk) {
    refuse("box topk", std::to_string(box.topk), "must be the layer's " + std::to_string(model.config.topk));
  }
  if (box.kv_format != model.config.kv_format) {
    refuse("box kv_format", std::string(name_of(box.kv_format)),
           "must be the layer's " + std::string(name_of(model.config.kv_format)));
  }
  for (const PreparedBatch& batch : options.batches) {
    if (batch.rows > box.cap) {
      refuse("batch", std::to_string(batch.rows), "must be at most the mailboxes' cap " + std::to_string(box.cap));
    }
  }
}

RankShard shard_of(const Box* box) {
  return box == nullptr ? RankShard{} : RankShard{box->size(), box->rank(), box->options().interleave};
}

/// Longest n that a row may see on this rank.
int64_t local_context(const RankShard& shard, int64_t max_context, int64_t cache_pages) {
  const int64_t most = (max_context + shard.ranks - 1) / shard.ranks + shard.interleave;
  const int64_t local = shard.ranks == 1 ? max_context : std::min(max_context, most);
  return cache_pages == 0 ? local : std::min(local, cache_pages * kIndexPage);
}

/// The smallest capacity that holds a batch of requests of q rows, in whole requests; the batch itself where there is
/// none.
int capacity_of(const std::vector<int>& capacities, int rows, int q) {
  int best = kMaxRows + 1;
  for (int capacity : capacities) {
    if (capacity >= rows) best = std::min(best, capacity / q * q);
  }
  return best <= kMaxRows ? best : rows;
}

/// What a prepare reserves in the context's arena, named, before any of it is: so that too much is refused whole.
class Bookings {
 public:
  void add(const MemoryBlock*& to, std::string name, int64_t bytes) {
    int64_t& most = bytes_[name];
    most = std::max(most, bytes);
    wanted_.push_back({std::move(name), &to});
  }
  void book(ScratchArena& arena, Memory& memory, int64_t more) const {
    int64_t missing = more;
    for (const auto& [name, bytes] : bytes_) missing += arena.missing(name, bytes);
    memory.require_free(missing, "scratch and packed weights");
    for (const Wanted& wanted : wanted_) *wanted.to = arena.book(wanted.name, bytes_.at(wanted.name));
  }

 private:
  struct Wanted {
    std::string name;
    const MemoryBlock** to;
  };
  std::map<std::string, int64_t> bytes_;
  std::vector<Wanted> wanted_;
};

/// On the host one kernel's scratch is used at a time. Kernels on a device may overlap, and find in their scratch what
/// they left there: each has its own.
std::string scratch_name(bool on_device, StageId stage, std::string_view kernel) {
  return on_device ? std::string(name_of(stage)) + " scratch (" + std::string(kernel) + ")" : "kernel scratch";
}

}  // namespace

PreparedLayer::Impl::Impl(Context& ctx, const LayerConfig& config, const LayerWeights& weights,
                          const PrepareOptions& options)
    : context(ctx.impl()),
      owned(make_model(config, weights, context.memory(), context.backend->alignment)),
      box(options.box),
      shard(shard_of(options.box)),
      max_context(options.max_context),
      cache_pages(options.cache_pages),
      checks_inputs(options.check_inputs && context.backend->check_inputs != nullptr) {
  const DeviceScope scope(context.device.get());
  check_options(model(), options);
  check_box(model(), options);
  if (box != nullptr && context.device != nullptr) {
    throw Exception({ErrorCode::kUnsupported, "box", "given", "the cuda backend runs one rank"});
  }
  choose_plans(options);
  reserve();
}

void PreparedLayer::Impl::choose_plans(const PrepareOptions& options) {
  const LayerConfig& config = model().config;
  const LayerSizes& sizes = model().sizes;
  Tables tables = read_tables(context.tables_text, context.tables_source, context.backend->name,
                              context.backend->target, sizes.heads * shard.ranks);
  override_tables(tables, options.kernels, options.overlap);
  const int64_t longest = local_context(shard, max_context, cache_pages);

  std::vector<Plan> plans;
  for (const PreparedBatch& batch : options.batches) {
    for (int q : options.queries) {
      if (batch.rows % q != 0) continue;
      PreparedShape s;
      s.key = {sizes, config.kv_format, config.index_format, config.topk, batch.rows, q, shard.ranks, longest};
      s.pitch_elems = batch.pitch_elems;
      plans.push_back(choose_plan(options, tables, s.key));
      shapes.push_back(s);
    }
  }
  if (shapes.empty()) refuse("batches, queries", "no batch is a multiple of a q", "B % q == 0 for at least one pair");
  for (size_t i = 0; i < shapes.size(); ++i) shapes[i].plan = &context.plans.keep(plans[i]);
}

/// The plan of the capacity that holds the shape, where there is one that runs as the shape's own would.
Plan PreparedLayer::Impl::choose_plan(const PrepareOptions& options, const Tables& tables,
                                      const ShapeKey& shape) const {
  const auto plan_of_rows = [&](int rows) {
    ShapeKey key = shape;
    key.rows = rows;
    const auto partial = box != nullptr ? std::optional(box->options().partial) : std::nullopt;
    return make_plan(*context.backend, context.device != nullptr, plan_key(key, tables, partial));
  };
  Plan own = plan_of_rows(shape.rows);
  const int capacity = capacity_of(options.plan_rows, shape.rows, shape.q);
  if (capacity == shape.rows) return own;
  try {
    Plan shared = plan_of_rows(capacity);
    return run_alike(own, shared) ? shared : own;
  } catch (const Exception&) {  // the kernels that it may choose from do not take so many rows
    return own;
  }
}

void PreparedLayer::Impl::reserve() {
  const LayerSizes& sizes = model().sizes;
  const int64_t topk = model().config.topk;
  const int64_t query_row = int64_t(kQueryRow) * (has_fp8_query(model().config.kv_format) ? 1 : 2);
  const int64_t all_heads = int64_t(sizes.heads) * shard.ranks;
  int64_t rows = 0;
  bool proj = false;
  Bookings bookings;
  for (PreparedShape& s : shapes) {
    const ShapeKey& capacity = s.plan->key.shape;
    rows = std::max<int64_t>(rows, capacity.rows);
    proj = proj || s.plan->partial() == PartialFormat::kProj;
    s.plan->for_each_kernel([&](StageId stage, const auto& kernel) {
      KernelScratch& scratch = s.scratch[static_cast<size_t>(stage)];
      const int threads = context.threads.count();
      scratch.bytes = kernel.scratch_bytes(s.key, threads);  // what the batch's own plan would give it: the same bits
      bookings.add(scratch.block, scratch_name(context.device != nullptr, stage, kernel.name),
                   std::max(scratch.bytes, kernel.scratch_bytes(capacity, threads)));
    });
  }
  StageBuffers& b = buffers;
  bookings.add(b.q_c, "q_c", rows * sizes.q_lora * 2);
  bookings.add(b.query, "query", rows * sizes.heads * query_row);
  bookings.add(b.index_query, "index_query", rows * sizes.index_heads * kIndexDim);
  bookings.add(b.head_weights, "head_weights", rows * sizes.index_heads * 4);
  bookings.add(b.topk_tokens, "topk_tokens", rows * topk * 4);
  bookings.add(b.topk_rows, "topk_rows", rows * topk * 4);
  bookings.add(b.valid, "valid", rows * 4);
  bookings.add(b.latent, "latent", rows * sizes.heads * kLatent * 2);
  bookings.add(b.lse, "lse", rows * sizes.heads * 4);
  if (checks_inputs) {
    bookings.add(b.checked_slots, "checked slots", rows * 8);
    bookings.add(b.checked_index_slots, "checked index slots", rows * 8);
    bookings.add(b.checked_lengths, "checked lengths", rows * 4);
    input_record = MemoryBlock(context.memory(), int64_t(sizeof(InputRecord)), "input record");
  }
  if (box != nullptr) {
    bookings.add(b.all_query, "gathered query", rows * all_heads * query_row);
    bookings.add(b.candidates, "candidates", rows * topk * int64_t(sizeof(Candidate)));
    bookings.add(b.all_candidates, "gathered candidates", shard.ranks * rows * topk * int64_t(sizeof(Candidate)));
    bookings.add(b.local_valid, "local valid", rows * 4);
    bookings.add(b.partial_latent, "partial latent", rows * all_heads * kLatent * 2);
    bookings.add(b.partial_v, "partial v", proj ? rows * all_heads * kValue * 2 : 0);
    bookings.add(b.partial_lse, "partial lse", rows * all_heads * 4);
    bookings.add(b.sent, "received partials", rows * all_heads * kLatent * 2);
    bookings.add(b.sent_lse, "received lse", rows * all_heads * 4);
    bookings.add(b.merged_v, "merged v", proj ? rows * sizes.heads * kValue * 2 : 0);
  }
  const Backend& backend = *context.backend;
  const int64_t packed_bytes = backend.packed_bytes(sizes);
  bookings.book(context.arena, context.memory(), packed_bytes);
  std::optional<WorkHeartbeat> working;  // peers may already wait for this rank's W_UV
  if (proj) working.emplace(box->impl(), context.threads);
  packed = MemoryBlock(context.memory(), packed_bytes, "packed weights");
  if (packed.size() > 0) {
    backend.pack(model(), packed.data(), context.threads);
    owned.model.packed = packed.data();
  }
  if (proj) {
    gathered_uv = MemoryBlock(context.memory(), all_heads * kValue * kLatent * 2, "gathered W_UV");
    gather_value_weights(box->impl(), context.threads, model(), gathered_uv.data()).or_throw();
  }
}

void PreparedLayer::Impl::bind(const KvCache& kv_cache, const IndexCache& index_cache) {
  const LayerConfig& config = model().config;
  if (kv_cache.format != config.kv_format) {
    refuse("kv_cache format", std::string(name_of(kv_cache.format)),
           "must be the layer's " + std::string(name_of(config.kv_format)));
  }
  if (index_cache.format != config.index_format) {
    refuse("index_cache format", std::string(name_of(index_cache.format)),
           "must be the layer's " + std::string(name_of(config.index_format)));
  }
  if (kv_cache.row_bytes != row_bytes(config.kv_format)) {
    refuse("kv_cache row", std::to_string(kv_cache.row_bytes) + " bytes",
           std::string(name_of(config.kv_format)) + " has rows of " + std::to_string(row_bytes(config.kv_format)));
  }
  if (index_cache.row_bytes != row_bytes(config.index_format)) {
    refuse(
        "index_cache row", std::to_string(index_cache.row_bytes) + " bytes",
        std::string(name_of(config.index_format)) + " has rows of " + std::to_string(row_bytes(config.index_format)));
  }
  if (kv_cache.data == nullptr) refuse("kv_cache", "null", "must point to the cache");
  if (index_cache.data == nullptr) refuse("index_cache", "null", "must point to the cache");
  const auto alignment = size_t(context.backend->alignment);
  check_address("kv_cache", kv_cache.data, alignment).or_throw();
  check_address("index_cache", index_cache.data, alignment).or_throw();
  context.memory().require_own(kv_cache.data, "kv_cache");
  context.memory().require_own(index_cache.data, "index_cache");
  if (kv_cache.page < kIndexPage || kv_cache.page % kIndexPage != 0) {
    refuse("page", std::to_string(kv_cache.page), "allowed: 64 and its multiples");
  }
  if (kv_cache.stride_rows < kv_cache.page) {
    refuse("stride_rows", std::to_string(kv_cache.stride_rows),
           "must be at least the page of " + std::to_string(kv_cache.page));
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  require_range("kv_cache pages", kv_cache.pages, 1, kMost);
  require_range("index_cache pages", index_cache.pages, 1, kMost);
  if (kv_cache.pages - 1 > (kMost - (kv_cache.page - 1)) / kv_cache.stride_rows) {
    refuse("kv_cache",
           std::to_string(kv_cache.pages) + " pages with stride_rows " + std::to_string(kv_cache.stride_rows),
           "physical rows must stay below 2^31");
  }
  if (cache_pages != 0 && index_cache.pages > cache_pages) {
    refuse("index_cache pages", std::to_string(index_cache.pages),
           "prepared for cache_pages " + std::to_string(cache_pages));
  }
  if (bound) {
    const bool same = kv_cache.data == kv.data && kv_cache.pages == kv.pages && kv_cache.page == kv.page &&
                      kv_cache.stride_rows == kv.stride_rows && index_cache.data == index.data &&
                      index_cache.pages == index.pages;
    if (!same) refuse("kv_cache, index_cache", "another cache", "a layer keeps the caches that it was bound to");
  }
  kv = kv_cache;
  index = index_cache;
  bound = true;
}

PreparedLayer::PreparedLayer(Context& context, const LayerConfig& config, const LayerWeights& weights,
                             const PrepareOptions& options)
    : impl_(std::make_unique<Impl>(context, config, weights, options)) {
  if (context.impl().on_choice) {
    for (const std::string& line : choices()) context.impl().on_choice(line);
  }
}
PreparedLayer::~PreparedLayer() = default;
PreparedLayer::PreparedLayer(PreparedLayer&&) noexcept = default;

void PreparedLayer::prepare_cache(const KvCache& kv, const IndexCache& index) { impl_->bind(kv, index); }
const LayerSizes& PreparedLayer::sizes() const { return impl_->model().sizes; }
void PreparedLayer::record_times(std::vector<StageTime>* times) { impl_->times = times; }

std::vector<ReservedItem> PreparedLayer::reserved_bytes() const {
  std::vector<ReservedItem> items = {{"packed weights", impl_->packed.size()}};
  if (impl_->gathered_uv.size() > 0) items.push_back({"gathered W_UV", impl_->gathered_uv.size()});
  if (impl_->box != nullptr) items.push_back({"mailboxes", impl_->box->bytes()});
  for (ReservedItem& item : impl_->context.arena.items()) items.push_back(std::move(item));
  return items;
}

std::vector<std::string> PreparedLayer::choices() const {
  std::vector<std::string> lines;
  for (const PreparedShape& s : impl_->shapes) {
    const Plan& plan = *s.plan;
    std::string line = "B=" + std::to_string(s.key.rows) + " q=" + std::to_string(s.key.q);
    plan.for_each_kernel([&](StageId stage, const auto& kernel) {
      line += " " + std::string(name_of(stage)) + "=" + std::string(kernel.name);
    });
    if (plan.key.partial) line += " partial=" + std::string(name_of(plan.partial()));
    line += " overlap=" + std::string(name_of(plan.overlap));
    if (plan.key.shape.rows != s.key.rows) line += " plan_rows=" + std::to_string(plan.key.shape.rows);
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace dsacore
