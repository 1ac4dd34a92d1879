// Step 10 of spec.md over score keys: exact selection that sorts nothing. Included once per Highway target.
//
// maxima -> floor (kth_largest) -> collect: the keys that can be selected -> kth_largest -> keep, in place and
// ascending by token
//
// The floor is the topk-th largest of the maxima of kKeyGroup tokens. At least topk keys reach it, and fewer than topk
// groups have a larger maximum: so at most (topk - 1) * kKeyGroup keys lie above it, whatever the keys are, and of
// those equal to it only the first topk can be selected. That bounds the work after the maxima by topk and not by the
// context.

// Per-target include guard
#if defined(DSACORE_CPU_SELECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_CPU_SELECT_INL_H_
#undef DSACORE_CPU_SELECT_INL_H_
#else
#define DSACORE_CPU_SELECT_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstdint>

#include "backends/cpu/indexer_layout.h"
#include "format/score_key.h"
#include "hwy/highway.h"
#include "threads/threads.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using SelectD = hn::ScalableTag<uint32_t>;
using SelectV = hn::Vec<SelectD>;
constexpr int kSelectLanes = int(hn::MaxLanes(SelectD()));
static_assert(kWordGroups == 64 && kSelectLanes <= kSelectSlack && kKeyGroup % kSelectLanes == 0);

// ---- the k-th largest ----

/// The k-th largest key of a list and how many are larger.
struct Threshold {
  uint32_t key;
  int64_t greater;
};

struct KeyRange {
  uint32_t least, largest;
};

HWY_INLINE KeyRange range_of(SelectV least, SelectV largest) {
  const SelectD d;
  return {hn::GetLane(hn::MinOfLanes(d, least)), hn::GetLane(hn::MaxOfLanes(d, largest))};
}

inline KeyRange range_of(const uint32_t* keys, int64_t count) {
  const SelectD d;
  auto least = hn::Set(d, keys[0]), largest = least;
  int64_t i = 0;
  for (; i + kSelectLanes <= count; i += kSelectLanes) {
    const auto v = hn::LoadU(d, keys + i);
    least = hn::Min(least, v);
    largest = hn::Max(largest, v);
  }
  for (; i < count; ++i) {
    const auto v = hn::Set(d, keys[i]);
    least = hn::Min(least, v);
    largest = hn::Max(largest, v);
  }
  return range_of(least, largest);
}

/// Counts `(key - least) >> shift`, every other key in a table of its own: equal keys in a row would wait for each
/// other. The second table follows the first.
inline void count_bins(const uint32_t* keys, int64_t count, uint32_t least, int shift, int bits, uint32_t* histogram) {
  const size_t bins = size_t(1) << bits;
  std::fill_n(histogram, 2 * bins, 0u);
  uint32_t* second = histogram + bins;
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    ++histogram[(keys[i] - least) >> shift];
    ++second[(keys[i + 1] - least) >> shift];
  }
  if (i < count) ++histogram[(keys[i] - least) >> shift];
}

/// Copies the keys of `least ... least + span` to `out`, which may be `keys` itself, and narrows `range` to what they
/// span. Returns how many they are.
inline int64_t copy_range(const uint32_t* keys, int64_t count, uint32_t least, uint32_t span, uint32_t* out,
                          KeyRange* range) {
  const SelectD d;
  const auto low = hn::Set(d, least), high = hn::Set(d, least + span);
  auto smallest = high, largest = low;
  int64_t copied = 0, i = 0;
  for (; i + kSelectLanes <= count; i += kSelectLanes) {
    const auto v = hn::LoadU(d, keys + i);
    const auto inside = hn::Eq(hn::Min(hn::Max(v, low), high), v);
    smallest = hn::Min(smallest, hn::IfThenElse(inside, v, high));
    largest = hn::Max(largest, hn::IfThenElse(inside, v, low));
    hn::StoreU(hn::Compress(v, inside), d, out + copied);
    copied += int64_t(hn::CountTrue(d, inside));
  }
  *range = range_of(smallest, largest);
  for (; i < count; ++i) {
    if (keys[i] - least > span) continue;
    range->least = std::min(range->least, keys[i]);
    range->largest = std::max(range->largest, keys[i]);
    out[copied++] = keys[i];
  }
  return copied;
}

/// By insertion, for short lists. `sorted` may be `keys` itself.
inline Threshold kth_largest_of_few(const uint32_t* keys, int64_t count, int64_t k, uint32_t* sorted) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t key = keys[i];
    int64_t at = i;
    for (; at > 0 && sorted[at - 1] < key; --at) sorted[at] = sorted[at - 1];
    sorted[at] = key;
  }
  int64_t greater = k - 1;
  while (greater > 0 && sorted[greater - 1] == sorted[k - 1]) --greater;
  return {sorted[k - 1], greater};
}

/// The k-th largest of `count >= k >= 1` keys. Each round divides the range that the remaining keys span, not a fixed
/// digit, so keys close together take one round as keys far apart do. `rest` has room for the keys and kSelectSlack.
inline Threshold kth_largest(const uint32_t* keys, int64_t count, int64_t k, uint32_t* rest, uint32_t* histogram) {
  constexpr int64_t kFew = 24;
  KeyRange range = range_of(keys, count);
  int64_t greater = 0;
  while (range.least != range.largest) {
    if (count <= kFew) {
      const Threshold found = kth_largest_of_few(keys, count, k, rest);
      return {found.key, greater + found.greater};
    }
    const int width = std::bit_width(range.largest - range.least);
    const int bits = std::min({width, kHistogramBits, std::max(5, int(std::bit_width(uint64_t(count))))});
    const int shift = width - bits;
    count_bins(keys, count, range.least, shift, bits, histogram);
    const int64_t bins = int64_t(1) << bits;
    int64_t bin = bins - 1, above = 0;
    for (;; --bin) {
      const int64_t inside = int64_t(histogram[bin]) + histogram[bins + bin];
      if (above + inside >= k) break;
      above += inside;
    }
    greater += above;
    k -= above;
    const uint32_t least = range.least + (uint32_t(bin) << shift);
    if (shift == 0) return {least, greater};
    const uint32_t span = std::min((1u << shift) - 1, range.largest - least);  // the last bin may reach beyond 32 bits
    count = copy_range(keys, count, least, span, rest, &range);
    keys = rest;
  }
  return {range.least, greater};
}

// ---- candidates ----

/// Keys with their tokens, ascending by token.
struct TokenList {
  uint32_t* keys;
  int32_t* tokens;
  int64_t count;
};

/// Appends a group's keys from `bound` on and returns the new count.
HWY_INLINE int64_t append_group(const uint32_t* keys, int64_t group, uint32_t bound, uint32_t* to_keys,
                                int32_t* to_tokens, int64_t count) {
  const SelectD d;
  const hn::RebindToSigned<SelectD> di;
  const int64_t first = group * kKeyGroup;
  for (int64_t t = first; t < first + kKeyGroup; t += kSelectLanes) {
    const auto v = hn::LoadU(d, keys + t);
    const auto take = hn::Not(hn::Lt(v, hn::Set(d, bound)));
    hn::StoreU(hn::Compress(v, take), d, to_keys + count);
    hn::StoreU(hn::Compress(hn::Iota(di, int32_t(t)), hn::RebindMask(di, take)), di, to_tokens + count);
    count += int64_t(hn::CountTrue(d, take));
  }
  return count;
}

/// A bit for each of up to kWordGroups maxima from `bound` on.
inline uint64_t groups_from(const uint32_t* maxima, int64_t count, uint32_t bound) {
  const SelectD d;
  uint64_t bits = 0;
  int64_t i = 0;
  for (; i + kSelectLanes <= count; i += kSelectLanes) {
    uint8_t bytes[8] = {};  // StoreMaskBits writes (lanes + 7) / 8 bytes
    hn::StoreMaskBits(d, hn::Not(hn::Lt(hn::LoadU(d, maxima + i), hn::Set(d, bound))), bytes);
    bits |= (uint64_t(bytes[0]) | uint64_t(bytes[1]) << 8) << i;
  }
  for (; i < count; ++i) bits |= uint64_t(maxima[i] >= bound) << i;
  return bits;
}

inline int64_t count_equal(const uint32_t* keys, int64_t count, uint32_t key) {
  const SelectD d;
  int64_t equal = 0, i = 0;
  for (; i + kSelectLanes <= count; i += kSelectLanes) {
    equal += int64_t(hn::CountTrue(d, hn::Eq(hn::LoadU(d, keys + i), hn::Set(d, key))));
  }
  for (; i < count; ++i) equal += keys[i] == key;
  return equal;
}

/// All keys above `floor` in groups begin..end-1, and of those equal to it the first `ties` at least, with their
/// tokens. `keys` and `maxima` as in RequestKeys. Only groups whose maximum reaches the floor are looked at; once there
/// are ties enough, only those whose maximum exceeds it.
inline TokenList collect(const uint32_t* keys, const uint32_t* maxima, int64_t begin, int64_t end, uint32_t floor,
                         int64_t ties, uint32_t* to_keys, int32_t* to_tokens) {
  int64_t count = 0;
  for (int64_t first = begin; first < end; first += kWordGroups) {
    const uint32_t bound = ties > 0 ? floor : floor + 1;
    const int64_t before = count;
    uint64_t bits = groups_from(maxima + first, std::min<int64_t>(end - first, kWordGroups), bound);
    for (; bits != 0; bits &= bits - 1) {
      count = append_group(keys, first + std::countr_zero(bits), bound, to_keys, to_tokens, count);
    }
    if (ties > 0) ties -= count_equal(to_keys + before, count - before, floor);
  }
  return {to_keys, to_tokens, count};
}

// ---- selection ----

/// Takes the keys above the threshold and the first `ties` of those equal to it from `count` keys, in order, to `list`,
/// which may be where they are. Their tokens are `tokens`, or, where that is null, 0, 1, 2, ...
inline void keep(const uint32_t* keys, const int32_t* tokens, int64_t count, uint32_t threshold, int64_t ties,
                 TokenList* list) {
  const SelectD d;
  const hn::RebindToSigned<SelectD> di;
  const auto bound = hn::Set(d, threshold);
  int64_t kept = 0, i = 0;
  const auto keep_one = [&](int64_t at) {
    const uint32_t key = keys[at];
    if (key < threshold || (key == threshold && ties-- <= 0)) return;
    list->keys[kept] = key;
    list->tokens[kept++] = tokens == nullptr ? int32_t(at) : tokens[at];
  };
  for (; i + kSelectLanes <= count; i += kSelectLanes) {
    const auto v = hn::LoadU(d, keys + i);
    const auto equal = hn::Eq(v, bound);
    auto take = hn::Gt(v, bound);
    if (!hn::AllFalse(d, equal)) {
      const int64_t found = int64_t(hn::CountTrue(d, equal));
      if (ties >= found) {
        take = hn::Or(take, equal);
        ties -= found;
      } else if (ties > 0) {
        for (int64_t j = i; j < i + kSelectLanes; ++j) keep_one(j);
        continue;
      }
    }
    const auto ids = tokens == nullptr ? hn::Iota(di, int32_t(i)) : hn::LoadU(di, tokens + i);
    hn::StoreU(hn::Compress(v, take), d, list->keys + kept);
    hn::StoreU(hn::Compress(ids, hn::RebindMask(di, take)), di, list->tokens + kept);
    kept += int64_t(hn::CountTrue(d, take));
  }
  for (; i < count; ++i) keep_one(i);
  list->count = kept;
}

/// What collect() is to find keys from, for the `k` best of a row with at least `k` groups.
inline uint32_t floor_of(const uint32_t* maxima, int64_t groups, int64_t k, const SelectBuffers& b) {
  return kth_largest(maxima, groups, k, b.rest, b.histogram).key;
}

/// The `k` best of what was collected, in its place.
inline void keep_best(int64_t k, const SelectBuffers& b, TokenList* list) {
  const Threshold threshold = kth_largest(list->keys, list->count, k, b.rest, b.histogram);
  keep(list->keys, list->tokens, list->count, threshold.key, k - threshold.greater, list);
}

/// The `k` best of `n > k` keys by (key descending, token ascending), ascending by token, in the buffers. Keys from `n`
/// to the end of its group are 0.
inline TokenList select_best(const uint32_t* keys, const uint32_t* maxima, int64_t n, int64_t k,
                             const SelectBuffers& b) {
  const int64_t groups = groups_of(n);
  TokenList list = {b.keys, b.tokens, 0};
  if (groups < k) {  // no floor; but so few groups are few keys
    const Threshold threshold = kth_largest(keys, n, k, b.rest, b.histogram);
    keep(keys, nullptr, n, threshold.key, k - threshold.greater, &list);
    return list;
  }
  list = collect(keys, maxima, 0, groups, floor_of(maxima, groups, k, b), k, b.keys, b.tokens);
  keep_best(k, b, &list);
  return list;
}

/// The same by several threads.
inline TokenList select_best_together(const uint32_t* keys, const uint32_t* maxima, int64_t n, int64_t k,
                                      const SelectBuffers& b, Threads& threads) {
  const int64_t groups = groups_of(n);
  if (groups < k) return select_best(keys, maxima, n, k, b);
  const uint32_t floor = floor_of(maxima, groups, k, b);
  const int64_t part = part_groups(n), capacity = part_capacity(int(k), n);
  TokenList lists[kSelectParts];
  threads.for_each(kSelectParts, [&](int64_t i, int) {
    lists[i] = collect(keys, maxima, std::min(i * part, groups), std::min((i + 1) * part, groups), floor, k,
                       b.keys + i * capacity, b.tokens + i * capacity);
  });
  TokenList list = lists[0];
  for (int i = 1; i < kSelectParts; ++i) {
    std::copy_n(lists[i].keys, lists[i].count, list.keys + list.count);
    std::copy_n(lists[i].tokens, lists[i].count, list.tokens + list.count);
    list.count += lists[i].count;
  }
  keep_best(k, b, &list);
  return list;
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
