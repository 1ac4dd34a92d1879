// Paging and ownership (spec 1, 6, 7): token id -> local index -> page -> physical row, and slots. The only file that
// turns one kind of id into another.
#pragma once

#include <cstdint>

#include "dsacore/host_device.h"
#include "dsacore/ids.h"
#include "dsacore/problem.h"

namespace dsacore {

/// Which tokens of a context a rank holds: those with `(t / interleave) % ranks == rank` (spec 7).
struct RankShard {
  int ranks = 1;       ///< D
  int rank = 0;        ///< d
  int interleave = 1;  ///< I
};

DSACORE_HD constexpr bool owns(const RankShard& shard, TokenId token) {
  return token.value() / shard.interleave % shard.ranks == shard.rank;
}

/// Of an owned token.
DSACORE_HD constexpr LocalId local_of(const RankShard& shard, TokenId token) {
  const int32_t t = token.value();
  return LocalId(int32_t(t / (int64_t(shard.ranks) * shard.interleave) * shard.interleave + t % shard.interleave));
}

DSACORE_HD constexpr TokenId global_of(const RankShard& shard, LocalId local) {
  const int64_t t = local.value();
  return TokenId(int32_t((t / shard.interleave * shard.ranks + shard.rank) * shard.interleave + t % shard.interleave));
}

/// How many of the tokens 0..n-1 the rank owns.
DSACORE_HD constexpr int64_t local_count(const RankShard& shard, int64_t n) {
  const int64_t period = int64_t(shard.ranks) * shard.interleave;
  const int64_t rest = n % period - int64_t(shard.rank) * shard.interleave;
  const int64_t part = rest < 0 ? 0 : rest < shard.interleave ? rest : shard.interleave;
  return n / period * shard.interleave + part;
}

/// Keys that row `position` of a request sees: `n` of spec 5.
DSACORE_HD constexpr int64_t keys_seen(int64_t seq_len, int q, int position) {
  const int64_t n = seq_len - (q - 1 - position);
  return n > 0 ? n : 0;
}

/// Pages of `page` tokens that hold `n` tokens.
DSACORE_HD constexpr int64_t pages_of(int64_t n, int page) { return (n + page - 1) / page; }

/// A token's place in a paged cache.
struct Place {
  PageId page;
  int offset;
};

/// Place of a slot in a cache of pages of `page` rows.
DSACORE_HD constexpr Place place_of(Slot slot, int page) {
  return {PageId(int32_t(slot.value() / page)), int(slot.value() % page)};
}

/// Place of a token in the MLA cache; `table` is the request's row of the block table.
DSACORE_HD constexpr Place kv_place(const int32_t* table, int page, LocalId token) {
  return {PageId(table[token.value() / page]), token.value() % page};
}

/// Of the `pages_each` index pages that lie in a page of the MLA cache, the one after `within` others (end of spec 6).
DSACORE_HD constexpr PageId index_page(PageId page, int pages_each, int within) {
  return PageId(page.value() * pages_each + within);
}

/// Place of a token in the index cache: by `index_table` where there is one (else null), else by the MLA cache's table
/// (end of spec 6).
DSACORE_HD constexpr Place index_place(const int32_t* table, const int32_t* index_table, int page, LocalId token) {
  const int32_t t = token.value();
  if (index_table != nullptr) return {PageId(index_table[t / kIndexPage]), t % kIndexPage};
  return {index_page(PageId(table[t / page]), page / kIndexPage, t % page / kIndexPage), t % kIndexPage};
}

DSACORE_HD constexpr PhysicalRow physical_row(Place place, int64_t stride_rows) {
  return PhysicalRow(int32_t(place.page.value() * stride_rows + place.offset));
}

/// Address of a physical row of the MLA cache.
DSACORE_HD inline std::byte* row_at(const KvCache& kv, PhysicalRow row) {
  return kv.data + int64_t(row.value()) * kv.row_bytes;
}

}  // namespace dsacore
