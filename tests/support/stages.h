// Runs the stages of one backend over a Case, one by one, with every tensor in hand: stage tests put the reference's
// tensors in and compare what comes out. Outputs and scratch are poisoned with 0xFF before each stage.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "dsacore/status.h"
#include "format/layouts.h"
#include "io/generate.h"
#include "layer/model.h"
#include "plan/registry.h"

namespace dsacore::test {

inline constexpr int kPoison = 0xFF;

/// Owned, poisoned storage of a dense tensor.
template <class T>
class Buffer {
 public:
  void poison(int64_t count) {
    bytes_.assign(size_t(count) * sizeof(T) + 64, std::byte(kPoison));
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    offset_ = size_t((64 - address % 64) % 64);
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data() + offset_); }

 private:
  std::vector<std::byte> bytes_;
  size_t offset_ = 0;
};

/// All tensors of one step of a case under one backend. Caches are private copies, updated by the query stages.
class StageRunner {
 public:
  StageRunner(const Case& source, const Backend& backend, int threads = 2, int64_t live_rows = -1, RankShard shard = {})
      : source_(source),
        backend_(backend),
        threads_(threads),
        owned_(make_model(source.config, source.weights)),
        shard_(shard) {
    rows = live_rows < 0 ? source.step.projected.extent(0) : live_rows;
    const int64_t kv_rows = (source.kv.pages - 1) * source.kv.stride_rows + source.kv.page;
    kv_bytes.assign(source.kv.data, source.kv.data + kv_rows * source.kv.row_bytes);
    index_bytes.assign(source.index.data, source.index.data + source.index.pages * kIndexPage * source.index.row_bytes);
    kv = source.kv;
    kv.data = kv_bytes.data();
    index = source.index;
    index.data = index_bytes.data();
    packed_.poison(backend.packed_bytes(model().sizes));
    if (backend.packed_bytes(model().sizes) > 0) {
      backend.pack(model(), packed_.data(), threads_);
      owned_.model.packed = packed_.data();
    }
    const LayerSizes& z = model().sizes;
    const int64_t topk = model().config.topk;
    q_c = make(q_c_, rows, z.q_lora);
    query_.poison(rows * z.heads * kQueryRow * element());
    query = {query_.data(), z.heads, element()};
    index_query = make(index_query_, rows, z.index_heads, kIndexDim);
    head_weights = make(head_weights_, rows, z.index_heads);
    topk_tokens = make(topk_tokens_, rows, topk);
    topk_rows = make(topk_rows_, rows, topk);
    valid = make(valid_, rows);
    candidates = make(candidates_, rows, topk);
    latent = make(latent_, rows, z.heads, kLatent);
    lse = make(lse_, rows, z.heads);
    out = make(out_, rows, int64_t(z.heads) * kValue);
  }

  const LayerModel& model() const { return owned_.model; }
  int element() const { return has_fp8_query(model().config.kv_format) ? 1 : 2; }
  const Step& step() const { return source_.step; }
  Threads& threads() { return threads_; }

  ShapeKey key() const {
    int64_t longest = 1;
    for (int64_t r = 0; r < step().seq_lens.extent(0); ++r) longest = std::max<int64_t>(longest, step().seq_lens(r));
    return {model().sizes,
            model().config.kv_format,
            model().config.index_format,
            model().config.topk,
            step().batch,
            step().q,
            shard_.ranks,
            longest};
  }

  /// Runs one stage with the kernel of that name, or the first that accepts.
  template <class Args>
  void run(std::span<const Kernel<Args>> kernels, const Args& args, std::string_view name = {}) {
    const ShapeKey shape = key();
    for (const Kernel<Args>& kernel : kernels) {
      if (!name.empty() ? kernel.name != name : !kernel.accepts(shape).ok) continue;
      const int64_t bytes = kernel.scratch_bytes(shape, threads_.count());
      scratch_.poison(bytes);
      kernel.run(args, {{scratch_.data(), size_t(bytes)}, &threads_, backend_.target_data});
      return;
    }
    throw Exception({ErrorCode::kInternal, "kernel", std::string(name), "none accepts"});
  }

  QueryArgs query_args() { return {&model(), projected(), step().slots.first(rows), kv, q_c, query}; }
  IndexProjectionArgs index_projection_args() {
    return {&model(), projected(), q_c, step().index_slots.first(rows), index, index_query, head_weights};
  }
  IndexerArgs indexer_args() {
    return {
        &model(),
        step().q,
        shard_,
        seq_lens(),
        step().block_table.first(rows / step().q),
        step().index_block_table.empty() ? step().index_block_table : step().index_block_table.first(rows / step().q),
        kv.page,
        kv.stride_rows,
        index,
        index_query,
        head_weights,
        topk_tokens,
        topk_rows,
        valid,
        candidates};
  }
  SparseCoreArgs sparse_core_args() { return {&model(), query, topk_rows, valid, kv, latent, lse}; }
  ValueArgs value_args() { return {&model(), latent, model().w_uv(), gate(), out}; }

  View<const BFloat16, 2> projected() const { return step().projected.first(rows); }
  View<const int32_t, 1> seq_lens() const { return step().seq_lens.first(rows / step().q); }
  View<const BFloat16, 2> gate() const {
    const LayerSizes& z = model().sizes;
    return View<const BFloat16, 2>(step().projected.data() + z.gate_at(), rows, int64_t(z.heads) * kValue)
        .with_pitch(step().projected.stride(0));
  }

  /// The whole layer, stage by stage (one rank).
  void run_all() {
    run(backend_.query, query_args());
    run(backend_.index_projection, index_projection_args());
    run(backend_.indexer, indexer_args());
    run(backend_.sparse_core, sparse_core_args());
    run(backend_.value, value_args());
  }
  const Backend& backend() const { return backend_; }

  int64_t rows;
  KvCache kv;
  IndexCache index;
  std::vector<std::byte> kv_bytes;
  std::vector<std::byte> index_bytes;
  View<BFloat16, 2> q_c;
  QueryRows query;
  View<uint8_t, 3> index_query;
  View<float, 2> head_weights;
  View<int32_t, 2> topk_tokens;
  View<int32_t, 2> topk_rows;
  View<int32_t, 1> valid;
  View<Candidate, 2> candidates;
  View<BFloat16, 3> latent;
  View<float, 2> lse;
  View<BFloat16, 2> out;

 private:
  template <class T, class... Extents>
  static View<T, sizeof...(Extents)> make(Buffer<T>& buffer, Extents... extents) {
    buffer.poison((int64_t(extents) * ...));
    return View<T, sizeof...(Extents)>(buffer.data(), extents...);
  }

  const Case& source_;
  const Backend& backend_;
  Threads threads_;
  OwnedModel owned_;
  RankShard shard_;
  Buffer<std::byte> packed_, scratch_, query_;
  Buffer<BFloat16> q_c_, latent_, out_;
  Buffer<uint8_t> index_query_;
  Buffer<float> head_weights_, lse_;
  Buffer<int32_t> topk_tokens_, topk_rows_, valid_;
  Buffer<Candidate> candidates_;
};

/// Copies a tensor from one runner to another of the same shape, e.g. `copy(reference.q_c, cpu.q_c)`.
template <class T, int Rank>
void copy(const View<T, Rank>& from, const View<T, Rank>& to) {
  std::memcpy(to.data(), from.data(), size_t(from.size()) * sizeof(T));
}
inline void copy_query(const StageRunner& from, const StageRunner& to) {
  std::memcpy(to.query.data, from.query.data, size_t(from.rows * from.query.heads * kQueryRow * from.query.element));
}

}  // namespace dsacore::test
