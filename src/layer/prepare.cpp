// prepare and prepare_cache: checks, choices, packing, reservations, binding. Nothing is computed here.
#include <algorithm>
#include <limits>
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
  for (const PreparedBatch& batch : options.batches) {
    require_range("batch", batch.rows, 1, kMaxRows);
    if (batch.pitch_elems < model.sizes.width()) {
      refuse("pitch of batch " + std::to_string(batch.rows), std::to_string(batch.pitch_elems),
             "must be at least the row's " + std::to_string(model.sizes.width()));
    }
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

template <class Args>
int64_t scratch_of(const Kernel<Args>* kernel, const ShapeKey& key, int threads) {
  return kernel == nullptr ? 0 : kernel->scratch_bytes(key, threads);
}

}  // namespace

PreparedLayer::Impl::Impl(Context& ctx, const LayerConfig& config, const LayerWeights& weights,
                          const PrepareOptions& options)
    : context(ctx.impl()),
      owned(make_model(config, weights)),
      box(options.box),
      shard(shard_of(options.box)),
      max_context(options.max_context),
      cache_pages(options.cache_pages) {
  check_options(model(), options);
  check_box(model(), options);
  choose_kernels(options);
  reserve();
}

void PreparedLayer::Impl::choose_kernels(const PrepareOptions& options) {
  const Backend& backend = *context.backend;
  const LayerSizes& sizes = model().sizes;
  Tables tables =
      read_tables(context.tables_text, context.tables_source, backend.name, backend.target, sizes.heads * shard.ranks);
  override_tables(tables, options.kernels, options.overlap);
  const auto table = [&](StageId stage) -> const RowTable& { return tables.kernels[static_cast<size_t>(stage)]; };
  const int64_t longest = local_context(shard, max_context, cache_pages);

  for (const PreparedBatch& batch : options.batches) {
    for (int q : options.queries) {
      if (batch.rows % q != 0) continue;
      PreparedShape s;
      s.key = {sizes,
               model().config.kv_format,
               model().config.index_format,
               model().config.topk,
               batch.rows,
               q,
               shard.ranks,
               longest};
      s.pitch_elems = batch.pitch_elems;
      s.overlap = overlap_mode_of(tables.overlap.find(batch.rows).value_or("serial")).value_or(OverlapMode::kSerial);
      s.query = choose(StageId::kQuery, backend.query, s.key, table(StageId::kQuery)).kernel;
      s.index_projection =
          choose(StageId::kIndexProjection, backend.index_projection, s.key, table(StageId::kIndexProjection)).kernel;
      s.indexer = choose(StageId::kIndexer, backend.indexer, s.key, table(StageId::kIndexer)).kernel;
      s.sparse_core = choose(StageId::kSparseCore, backend.sparse_core, s.key, table(StageId::kSparseCore)).kernel;
      s.value = choose(StageId::kValueProjection, backend.value, s.key, table(StageId::kValueProjection)).kernel;
      if (box != nullptr) {
        s.partial = box->options().partial;
        if (s.partial == PartialFormat::kAuto) {
          s.partial =
              partial_format_of(tables.partial.find(batch.rows).value_or("bf16")).value_or(PartialFormat::kBf16);
        }
        s.candidate_merge =
            choose(StageId::kCandidateMerge, backend.candidate_merge, s.key, table(StageId::kCandidateMerge)).kernel;
        s.partial_merge =
            choose(StageId::kPartialMerge, backend.partial_merge, s.key, table(StageId::kPartialMerge)).kernel;
        s.gate = choose(StageId::kGate, backend.gate, s.key, table(StageId::kGate)).kernel;
      }
      shapes.push_back(s);
    }
  }
  if (shapes.empty()) refuse("batches, queries", "no batch is a multiple of a q", "B % q == 0 for at least one pair");
}

void PreparedLayer::Impl::reserve() {
  const LayerSizes& sizes = model().sizes;
  const int64_t topk = model().config.topk;
  const int64_t query_row = int64_t(kQueryRow) * (has_fp8_query(model().config.kv_format) ? 1 : 2);
  const int64_t all_heads = int64_t(sizes.heads) * shard.ranks;
  int64_t rows = 0;
  int64_t kernel = 0;
  bool proj = false;
  for (const PreparedShape& s : shapes) {
    rows = std::max<int64_t>(rows, s.key.rows);
    proj = proj || (box != nullptr && s.partial == PartialFormat::kProj);
    const int threads = context.threads.count();
    kernel = std::max({kernel, scratch_of(s.query, s.key, threads), scratch_of(s.index_projection, s.key, threads),
                       scratch_of(s.indexer, s.key, threads), scratch_of(s.candidate_merge, s.key, threads),
                       scratch_of(s.sparse_core, s.key, threads), scratch_of(s.partial_merge, s.key, threads),
                       scratch_of(s.value, s.key, threads), scratch_of(s.gate, s.key, threads)});
  }
  ScratchArena& arena = context.arena;
  StageBuffers& b = buffers;
  b.q_c = arena.book("q_c", rows * sizes.q_lora * 2);
  b.query = arena.book("query", rows * sizes.heads * query_row);
  b.index_query = arena.book("index_query", rows * sizes.index_heads * kIndexDim);
  b.head_weights = arena.book("head_weights", rows * sizes.index_heads * 4);
  b.topk_tokens = arena.book("topk_tokens", rows * topk * 4);
  b.topk_rows = arena.book("topk_rows", rows * topk * 4);
  b.valid = arena.book("valid", rows * 4);
  b.latent = arena.book("latent", rows * sizes.heads * kLatent * 2);
  b.lse = arena.book("lse", rows * sizes.heads * 4);
  b.kernel = arena.book("kernel scratch", kernel);
  if (box != nullptr) {
    b.all_query = arena.book("gathered query", rows * all_heads * query_row);
    b.candidates = arena.book("candidates", rows * topk * int64_t(sizeof(Candidate)));
    b.all_candidates = arena.book("gathered candidates", shard.ranks * rows * topk * int64_t(sizeof(Candidate)));
    b.local_valid = arena.book("local valid", rows * 4);
    b.partial_latent = arena.book("partial latent", rows * all_heads * kLatent * 2);
    b.partial_v = arena.book("partial v", proj ? rows * all_heads * kValue * 2 : 0);
    b.partial_lse = arena.book("partial lse", rows * all_heads * 4);
    b.sent = arena.book("received partials", rows * all_heads * kLatent * 2);
    b.sent_lse = arena.book("received lse", rows * all_heads * 4);
    b.merged_v = arena.book("merged v", proj ? rows * sizes.heads * kValue * 2 : 0);
  }
  const Backend& backend = *context.backend;
  std::optional<WorkHeartbeat> working;  // peers may already wait for this rank's W_UV
  if (proj) working.emplace(box->impl(), context.threads);
  packed = AlignedBytes(backend.packed_bytes(sizes), "packed weights");
  if (packed.size() > 0) {
    backend.pack(model(), packed.data(), context.threads);
    owned.model.packed = packed.data();
  }
  if (proj) {
    gathered_uv = AlignedBytes(all_heads * kValue * kLatent * 2, "gathered W_UV");
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
    std::string line = "B=" + std::to_string(s.key.rows) + " q=" + std::to_string(s.key.q);
    const auto add = [&](StageId stage, std::string_view kernel) {
      line += " " + std::string(name_of(stage)) + "=" + std::string(kernel);
    };
    add(StageId::kQuery, s.query->name);
    add(StageId::kIndexProjection, s.index_projection->name);
    add(StageId::kIndexer, s.indexer->name);
    add(StageId::kSparseCore, s.sparse_core->name);
    add(StageId::kValueProjection, s.value->name);
    if (impl_->box != nullptr) {
      add(StageId::kCandidateMerge, s.candidate_merge->name);
      add(StageId::kPartialMerge, s.partial_merge->name);
      line += " partial=" + std::string(name_of(s.partial));
    }
    lines.push_back(line + " overlap=" + std::string(name_of(s.overlap)));
  }
  return lines;
}

}  // namespace dsacore
