#include "driver/shard.h"

#include <algorithm>
#include <cstring>

#include "format/layouts.h"

namespace dsacore {
namespace {

/// `count` uninitialised elements that the shard owns.
template <class T>
T* keep(Shard& shard, int64_t count, const char* what) {
  shard.storage.emplace_back(std::max<int64_t>(count, 1) * int64_t(sizeof(T)), what);
  return reinterpret_cast<T*>(shard.storage.back().data());
}

/// Rows `first .. first + count - 1` of a BF16 matrix.
TensorRef rows_of(TensorRef whole, int64_t first, int64_t count) {
  whole.data = static_cast<const BFloat16*>(whole.data) + first * whole.shape[1];
  whole.shape[0] = count;
  return whole;
}

void shard_heads(const Inputs& whole, const RankShard& rank, Shard& mine) {
  const int heads = whole.sizes.heads / rank.ranks;
  Inputs& in = mine.inputs;
  in.sizes.heads = heads;
  in.weights.q_b_proj =
      rows_of(whole.weights.q_b_proj, int64_t(rank.rank) * heads * kHeadQuery, int64_t(heads) * kHeadQuery);
  in.weights.kv_b_proj = rows_of(whole.weights.kv_b_proj, int64_t(rank.rank) * heads * kKvB, int64_t(heads) * kKvB);

  const View<const BFloat16, 2> from = whole.step.projected;
  const int64_t rows = from.extent(0), width = in.sizes.width(), gate = whole.sizes.gate_at();
  BFloat16* to = keep<BFloat16>(mine, rows * width, "projected rows of a rank");
  for (int64_t b = 0; b < rows; ++b, to += width) {
    const BFloat16* row = from.row(b);
    std::copy_n(row, gate, to);
    std::copy_n(row + gate + int64_t(rank.rank) * heads * kValue, heads * kValue, to + gate);
    std::copy_n(row + whole.sizes.wk_at(), width - in.sizes.wk_at(), to + in.sizes.wk_at());
  }
  in.step.projected = View<const BFloat16, 2>(to - rows * width, rows, width);
}

/// A block table whose requests own consecutive pages in descending order, page 0 left out; returns the pages in all.
int64_t make_table(const Inputs& whole, const RankShard& rank, Shard& mine) {
  const int64_t requests = whole.step.seq_lens.extent(0);
  const int page = whole.kv.page;
  const auto pages_held = [&](int64_t r) { return pages_of(local_count(rank, whole.step.seq_lens(r)), page); };
  int64_t width = 1;
  for (int64_t r = 0; r < requests; ++r) width = std::max(width, pages_held(r));
  int32_t* table = keep<int32_t>(mine, requests * width, "block table of a rank");
  std::fill_n(table, requests * width, 0);
  int64_t next = 1;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t count = pages_held(r);
    for (int64_t i = 0; i < count; ++i) table[r * width + i] = int32_t(next + count - 1 - i);
    next += count;
  }
  mine.inputs.step.block_table = View<const int32_t, 2>(table, requests, width);
  mine.inputs.step.index_block_table = {};
  return next;
}

void make_caches(const Inputs& whole, int64_t pages, Shard& mine) {
  KvCache& kv = mine.inputs.kv;
  kv.pages = pages;
  kv.stride_rows = kv.page;
  kv.data = keep<std::byte>(mine, cache_bytes(kv), "MLA cache of a rank");
  std::memset(kv.data, 0xFF, size_t(cache_bytes(kv)));
  IndexCache& index = mine.inputs.index;
  index.pages = pages * (whole.kv.page / kIndexPage);
  index.data = keep<std::byte>(mine, cache_bytes(index), "index cache of a rank");
  std::memset(index.data, 0xFF, size_t(cache_bytes(index)));
}

/// Moves the keys that the rank owns of one request.
void copy_tokens(const Inputs& whole, const RankShard& rank, int64_t request, Inputs& mine) {
  const int64_t count = local_count(rank, whole.step.seq_lens(request));
  const int32_t* from_table = whole.step.block_table.row(request);
  const int32_t* to_table = mine.step.block_table.row(request);
  for (int32_t local = 0; local < count; ++local) {
    const LocalId from(global_of(rank, LocalId(local)).value()), to(local);
    std::memcpy(row_at(mine.kv, physical_row(kv_place(to_table, mine.kv.page, to), mine.kv.stride_rows)),
                row_at(whole.kv, physical_row(kv_place(from_table, whole.kv.page, from), whole.kv.stride_rows)),
                size_t(whole.kv.row_bytes));
    const Place source = index_place_of(whole, request, from), target = index_place_of(mine, request, to);
    const std::byte* source_page = index_page_at(whole.index, source.page);
    std::byte* target_page = index_page_at(mine.index, target.page);
    with_layout(whole.index.format, [&](auto layout) {
      std::memcpy(target_page + layout.value_at(target.offset), source_page + layout.value_at(source.offset),
                  layout.kValueBytes);
      std::memcpy(target_page + layout.scale_at(target.offset), source_page + layout.scale_at(source.offset),
                  layout.kScaleBytes);
      return 0;
    });
  }
}

/// Slots of the new tokens that the rank owns and the whole step writes; all others -1.
void make_slots(const Inputs& whole, const RankShard& rank, Shard& mine) {
  const Step& step = whole.step;
  const int64_t rows = step.slots.extent(0);
  int64_t* slots = keep<int64_t>(mine, 2 * rows, "slots of a rank");
  int64_t* index_slots = slots + rows;
  std::fill_n(slots, 2 * rows, -1);
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t r = b / step.q, token = step.seq_lens(r) - step.q + b % step.q;
    if (token < 0 || !owns(rank, TokenId(int32_t(token)))) continue;
    const LocalId local = local_of(rank, TokenId(int32_t(token)));
    const Place kv = kv_place(mine.inputs.step.block_table.row(r), mine.inputs.kv.page, local);
    const Place index = index_place_of(mine.inputs, r, local);
    if (step.slots(b) >= 0) slots[b] = int64_t(kv.page.value()) * mine.inputs.kv.page + kv.offset;
    if (step.index_slots(b) >= 0) index_slots[b] = int64_t(index.page.value()) * kIndexPage + index.offset;
  }
  mine.inputs.step.slots = View<const int64_t, 1>(slots, rows);
  mine.inputs.step.index_slots = View<const int64_t, 1>(index_slots, rows);
}

}  // namespace

Shard shard(const Inputs& whole, const RankShard& rank) {
  Shard mine{whole, {}};
  shard_heads(whole, rank, mine);
  make_caches(whole, make_table(whole, rank, mine), mine);
  for (int64_t r = 0; r < whole.step.seq_lens.extent(0); ++r) copy_tokens(whole, rank, r, mine.inputs);
  make_slots(whole, rank, mine);
  return mine;
}

}  // namespace dsacore
