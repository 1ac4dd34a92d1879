// PageSpread: a cache of many pages out of a pool of few, drawn by a seed: which page of the pool each one copies, and
// which low bits of its values it clears, so that copies of a page differ a little, as keys of a context do. For caches
// too large to be made on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dsacore/host_device.h"
#include "memory/mixed_bits.h"

namespace dsacore {

struct PageSpread {
  std::byte* to;  ///< 8-byte aligned, as is `pool`
  int64_t pages;
  const std::byte* pool;
  int64_t pool_pages;
  int page_bytes;     ///< a multiple of 8
  int value_bytes;    ///< a multiple of 8; only that many bytes of a page differ from the pool's
  uint8_t clearable;  ///< the bits of each of them that may be cleared
  uint64_t seed;
};

/// The page of the pool that page `page` copies.
DSACORE_HD constexpr int64_t pool_page_of(const PageSpread& s, int64_t page) {
  return int64_t(mixed_bits(s.seed + uint64_t(page) * 0x9E3779B97F4A7C15u) % uint64_t(s.pool_pages));
}

/// Word `i` of page `page`, where the pool's page has `word`.
DSACORE_HD constexpr uint64_t spread_word(const PageSpread& s, int64_t page, int i, uint64_t word) {
  if (i * 8 >= s.value_bytes) return word;
  const uint64_t at = uint64_t(page) * uint64_t(s.page_bytes / 8) + uint64_t(i);
  return word & ~(mixed_bits(~s.seed + at * 0x9E3779B97F4A7C15u) & (s.clearable * 0x0101010101010101u));
}

}  // namespace dsacore
