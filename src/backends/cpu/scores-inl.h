// Step 9 of spec.md for a run of index pages: score keys of all rows of a request. Included once per Highway target.
//
// page -> decode (scores_decode-inl.h) -> block_dot with the packed index queries -> relu, head weights, sum over heads, key scale
// -> keys [q, tokens] -> the largest key of every kKeyGroup tokens
//
// A token's score takes the same operations in the same order wherever the token lies, so equal bytes give equal bits (spec 5).

// Per-target include guard
#if defined(DSACORE_CPU_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_CPU_SCORES_INL_H_
#undef DSACORE_CPU_SCORES_INL_H_
#else
#define DSACORE_CPU_SCORES_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "backends/cpu/bf16_ops.h"
#include "backends/cpu/indexer_layout.h"
#include "backends/cpu/scores_decode-inl.h"
#include "format/layouts.h"
#include "format/paging.h"
#include "format/score_key.h"
#include "hwy/highway.h"
#include "stages/stages.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using ScoreD = hn::ScalableTag<float>;
using ScoreV = hn::Vec<ScoreD>;
using KeyD = hn::RebindToUnsigned<ScoreD>;
using KeyV = hn::Vec<KeyD>;
constexpr int kScoreLanes = int(hn::MaxLanes(ScoreD()));
static_assert(kScoreLanes >= 4 && kScoreLanes <= kKeyGroup && kUnitTokens % kKeyGroup == 0);

// ---- the sum over heads ----

/// relu(NaN) is NaN: x86 returns the second operand where one is NaN, NEON returns NaN.
HWY_INLINE ScoreV relu(ScoreV x) {
  if constexpr (HWY_TARGET == HWY_EMU128) return hn::IfThenElse(hn::Lt(x, hn::Zero(ScoreD())), hn::Zero(ScoreD()), x);
  return hn::Max(hn::Zero(ScoreD()), x);
}

/// Of four vectors, the combination of lanes i, i + 2, then i + 1, i + 3 of every 128-bit block: element t of a block belongs to v[t].
template <class D, class Combine>
HWY_INLINE hn::Vec<D> combine_blocks(D d, const hn::Vec<D> (&v)[4], Combine combine) {
  const hn::Repartition<uint64_t, D> d64;
  const auto ab = combine(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));
  const auto cd = combine(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3]));
  const auto x = hn::BitCast(d64, ab), y = hn::BitCast(d64, cd);
  return combine(hn::BitCast(d, hn::InterleaveLower(d64, x, y)), hn::BitCast(d, hn::InterleaveUpper(d64, x, y)));
}

struct AddVectors {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Add(a, b);
  }
};
struct MaxVectors {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Max(a, b);
  }
};

/// Weighted sums over kVectors vectors of heads, for four tokens; see combine_blocks.
template <int kVectors>
HWY_INLINE ScoreV sum_heads(const float* HWY_RESTRICT dots, int64_t pitch, const float* HWY_RESTRICT weights) {
  const ScoreD d;
  ScoreV sums[4];
  HWY_UNROLL(4)
  for (int t = 0; t < 4; ++t) sums[t] = hn::Mul(hn::Load(d, weights), relu(hn::Load(d, dots + t * pitch)));
  HWY_UNROLL(16)
  for (int i = 1; i < kVectors; ++i) {
    const auto weight = hn::Load(d, weights + i * kScoreLanes);
    HWY_UNROLL(4)
    for (int t = 0; t < 4; ++t) {
      sums[t] = hn::MulAdd(weight, relu(hn::Load(d, dots + t * pitch + i * kScoreLanes)), sums[t]);
    }
  }
  return combine_blocks(d, sums, AddVectors());
}

/// Sums of kScoreLanes tokens, one a lane.
template <int kVectors>
HWY_INLINE ScoreV sum_tokens(const float* HWY_RESTRICT dots, int64_t pitch, const float* HWY_RESTRICT weights) {
  const ScoreD d;
  const ScoreV v0 = sum_heads<kVectors>(dots, pitch, weights);
  if constexpr (kScoreLanes == 4) {
    return v0;
  } else {
    const ScoreV v1 = sum_heads<kVectors>(dots + 4 * pitch, pitch, weights);
    if constexpr (kScoreLanes == 8) {
      return hn::Add(hn::ConcatLowerLower(d, v1, v0), hn::ConcatUpperUpper(d, v1, v0));
    } else {
      const ScoreV v2 = sum_heads<kVectors>(dots + 8 * pitch, pitch, weights);
      const ScoreV v3 = sum_heads<kVectors>(dots + 12 * pitch, pitch, weights);
      // Blocks (v0 v0 v2 v2) and (v1 v1 v3 v3), two to be added each.
      const ScoreV x = hn::Add(hn::ConcatLowerLower(d, v2, v0), hn::ConcatUpperUpper(d, v2, v0));
      const ScoreV y = hn::SwapAdjacentBlocks(hn::Add(hn::ConcatLowerLower(d, v3, v1), hn::ConcatUpperUpper(d, v3, v1)));
      return hn::Add(hn::OddEvenBlocks(y, x), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(x, y)));
    }
  }
}

// ---- keys ----

/// score_key() of format/score_key.h.
HWY_INLINE KeyV keys_of_scores(ScoreV score) {
  const KeyD d;
  const hn::RebindToSigned<ScoreD> di;
  score = hn::Add(score, hn::Zero(ScoreD()));  // -0 becomes +0
  const auto bits = hn::BitCast(di, score);
  const auto flip = hn::BitCast(d, hn::BroadcastSignBit(bits));
  const auto key = hn::Xor(hn::BitCast(d, bits), hn::Or(flip, hn::Set(d, 0x80000000u)));
  return hn::IfThenZeroElse(hn::RebindMask(d, hn::IsNaN(score)), key);
}

/// Keys of a unit for one row. `scales` are the tokens' FP32 scales, at any address, or null.
template <int kVectors>
void unit_keys(const float* HWY_RESTRICT dots, int64_t pitch, const float* HWY_RESTRICT weights, const std::byte* scales,
               uint32_t* HWY_RESTRICT keys) {
  const ScoreD d;
  const hn::Repartition<uint8_t, ScoreD> d8;
  for (int t = 0; t < kUnitTokens; t += kScoreLanes) {
    ScoreV score = sum_tokens<kVectors>(dots + t * pitch, pitch, weights);
    if (scales != nullptr) {
      score = hn::Mul(score, hn::BitCast(d, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(scales) + t * sizeof(float))));
    }
    hn::Store(keys_of_scores(score), KeyD(), keys + t);
  }
}

using UnitKeys = void (*)(const float* dots, int64_t pitch, const float* weights, const std::byte* scales, uint32_t* keys);

inline UnitKeys unit_keys_for(int columns) {
  constexpr int kStep = kColumnStep / kScoreLanes;
  switch (columns / kColumnStep) {
    case 1: return unit_keys<1 * kStep>;
    case 2: return unit_keys<2 * kStep>;
    case 3: return unit_keys<3 * kStep>;
    default: return unit_keys<4 * kStep>;
  }
}

/// The largest of each lane of a vector's 128-bit blocks.
template <class D>
HWY_INLINE auto largest_of_blocks(hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return largest_of_blocks<hn::Half<D>>(hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

/// Maxima of `groups` groups, a multiple of four.
inline void group_maxima(const uint32_t* HWY_RESTRICT keys, int64_t groups, uint32_t* HWY_RESTRICT maxima) {
  const KeyD d;
  for (int64_t g = 0; g < groups; g += 4) {
    KeyV v[4];
    HWY_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      const uint32_t* group = keys + (g + i) * kKeyGroup;
      v[i] = hn::Load(d, group);
      HWY_UNROLL(4)
      for (int t = kScoreLanes; t < kKeyGroup; t += kScoreLanes) v[i] = hn::Max(v[i], hn::Load(d, group + t));
    }
    const auto m = largest_of_blocks<KeyD>(combine_blocks(d, v, MaxVectors()));
    hn::StoreU(m, hn::DFromV<decltype(m)>(), maxima + g);
  }
}

// ---- queries ----

/// Packs the index queries and head weights of a request for block_dot, in the order of k of the decoded keys.
inline void pack_queries(const IndexerArgs& args, const Bf16Ops& ops, const QueryPanels& panels, int64_t request,
                         const ScoreBuffers& b) {
  const auto& order = args.index.format == IndexFormat::kFp8 ? kFp8Order : kMxfp4Order;
  for (int j = 0; j < panels.q; ++j) {
    const int64_t row = request * panels.q + j;
    const int first = j / panels.rows * panels.rows;
    const int width = panels.columns_from(first);
    BFloat16* column = b.queries + panels.panel_at(first) + 2 * (j - first) * panels.columns;
    for (int h = 0; h < panels.columns; ++h, column += 2) {
      BFloat16 query[kIndexDim] = {};
      if (h < panels.heads) ops.decode_e4m3(args.index_query.row(row, h), query, kIndexDim);
      for (int pair = 0; pair < kIndexDim / 2; ++pair) {
        column[int64_t(pair) * 2 * width] = query[order[2 * pair]];
        column[int64_t(pair) * 2 * width + 1] = query[order[2 * pair + 1]];
      }
    }
    float* weights = b.weights + j * panels.columns;
    std::fill(std::copy_n(args.head_weights.row(row), panels.heads, weights), weights + panels.columns, 0.0f);
  }
}

// ---- a run of pages ----

/// Where the units of a request lie.
class UnitPlaces {
 public:
  UnitPlaces(const IndexerArgs& args, int64_t request)
      : cache_(args.index),
        table_(args.block_table.row(request)),
        index_table_(args.index_block_table.empty() ? nullptr : args.index_block_table.row(request)),
        page_(args.page) {}

  UnitBytes at(int64_t unit) const {
    const Place place = index_place(table_, index_table_, page_, LocalId(int32_t(unit * kUnitTokens)));
    const std::byte* page = cache_.data + int64_t(place.page.value()) * kIndexPage * cache_.row_bytes;
    return with_layout(cache_.format, [&](auto layout) {
      return UnitBytes{page + layout.value_at(place.offset), page + layout.scale_at(place.offset)};
    });
  }

 private:
  const IndexCache& cache_;
  const int32_t* table_;
  const int32_t* index_table_;
  int page_;
};

/// Zeroes the keys of a unit from the row's `n`-th token on.
inline void clear_unseen(int64_t first, int64_t n, uint32_t* keys) {
  for (int64_t t = std::max<int64_t>(n - first, 0); t < kUnitTokens; ++t) keys[t] = kNanScoreKey;
}

/// Scores pages first..last-1 of a request for all of its rows. `seen[j]`: local tokens of row j.
inline void score_pages(const IndexerArgs& args, const Bf16Ops& ops, const QueryPanels& panels, const RequestKeys& out,
                        const int64_t* seen, int64_t first, int64_t last, const ScoreBuffers& b) {
  if (*b.request != out.request) {
    pack_queries(args, ops, panels, out.request, b);
    *b.request = out.request;
  }
  const bool fp8 = args.index.format == IndexFormat::kFp8;
  const auto decode = fp8 ? decode_fp8 : decode_mxfp4;
  const UnitKeys to_keys = unit_keys_for(panels.columns);
  const UnitPlaces places(args, out.request);
  const int64_t end = last * kUnitsOfPage;
  UnitBytes here = places.at(first * kUnitsOfPage);
  UnitBytes next = places.at(first * kUnitsOfPage + 1);
  decode(here, next, b.keys[0]);
  for (int64_t unit = first * kUnitsOfPage; unit < end; ++unit) {
    for (int j = 0; j < panels.q; j += panels.rows) {
      const int width = panels.columns_from(j);
      ops.block_dot({.a = b.keys[unit % 2],
                     .a_pitch = kIndexDim,
                     .m = kUnitTokens,
                     .b = b.queries + panels.panel_at(j),
                     .b_pitch = 2 * width,
                     .n = width,
                     .k = kIndexDim,
                     .c = b.dots,
                     .c_pitch = width,
                     .accumulate = false});
      const UnitBytes scored = here;
      if (j + panels.rows >= panels.q && unit + 1 < end) {  // decoded here, the next unit overlaps with matrix units at work
        here = next;
        if (unit + 2 < end) next = places.at(unit + 2);
        decode(here, next, b.keys[(unit + 1) % 2]);
      }
      for (int i = j; i < std::min(j + panels.rows, panels.q); ++i) {
        uint32_t* keys = out.keys_of(i) + unit * kUnitTokens;
        to_keys(b.dots + (i - j) * panels.columns, width, b.weights + i * panels.columns, fp8 ? scored.scales : nullptr, keys);
        if ((unit + 1) * kUnitTokens > seen[i]) clear_unseen(unit * kUnitTokens, seen[i], keys);
      }
    }
  }
  constexpr int kGroups = kIndexPage / kKeyGroup;
  for (int j = 0; j < panels.q; ++j) {
    group_maxima(out.keys_of(j) + first * kIndexPage, (last - first) * kGroups, out.maxima_of(j) + first * kGroups);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
