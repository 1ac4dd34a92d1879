// Step 9 of spec.md for a run of index pages: score keys of all rows of a request. Included once per Highway target.
//
// page -> decode (scores_decode-inl.h) -> block_dot with the packed index queries -> relu, head weights, sum over
// heads, key scale
// -> keys [q, tokens] -> the largest key of every kKeyGroup tokens
//
// A token's score takes the same operations in the same order wherever the token lies, so equal bytes give equal bits
// (spec 5).

// Per-target include guard
#if defined(DSACORE_CPU_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_CPU_SCORES_INL_H_
#undef DSACORE_CPU_SCORES_INL_H_
#else
#define DSACORE_CPU_SCORES_INL_H_
#endif

#include <algorithm>
#include <array>
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

/// Of four vectors, the combination of lanes i, i + 2, then i + 1, i + 3 of every 128-bit block: element t of a block
/// belongs to v[t].
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
      const ScoreV y =
          hn::SwapAdjacentBlocks(hn::Add(hn::ConcatLowerLower(d, v3, v1), hn::ConcatUpperUpper(d, v3, v1)));
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

/// Keys of tokens first..last-1 of a unit for one row. `scales` are the unit's FP32 scales, at any address, or null.
template <int kVectors>
HWY_INLINE void token_keys(int first, int last, const float* HWY_RESTRICT dots, int64_t pitch,
                           const float* HWY_RESTRICT weights, const std::byte* scales, uint32_t* HWY_RESTRICT keys) {
  const ScoreD d;
  const hn::Repartition<uint8_t, ScoreD> d8;
  for (int t = first; t < last; t += kScoreLanes) {
    ScoreV score = sum_tokens<kVectors>(dots + t * pitch, pitch, weights);
    if (scales != nullptr) {
      score = hn::Mul(score,
                      hn::BitCast(d, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(scales) + t * int(sizeof(float)))));
    }
    hn::Store(keys_of_scores(score), KeyD(), keys + t);
  }
}

template <int kVectors>
void unit_keys(const float* dots, int64_t pitch, const float* weights, const std::byte* scales, uint32_t* keys) {
  token_keys<kVectors>(0, kUnitTokens, dots, pitch, weights, scales, keys);
}

using UnitKeys = void (*)(const float* dots, int64_t pitch, const float* weights, const std::byte* scales,
                          uint32_t* keys);

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

// ---- a run of pages ----

/// Units begin..end-1 of a request, to be scored for all of its rows.
struct ScoreTask {
  const IndexerArgs& args;
  const Bf16Ops& ops;
  const QueryPanels& panels;
  const RequestKeys& out;
  const int64_t* seen;  ///< [q] local tokens of the rows
  int64_t begin, end;
  const ScoreBuffers& b;
};

/// A ScoreTask's units, with what is asked for ahead of each. Places are looked up once a page: that takes divisions.
template <class Unit>
class TaskUnits {
 public:
  using Layout = typename Unit::Layout;

  explicit TaskUnits(const ScoreTask& task) : begin_(task.begin), last_(task.end - 1), keys_(task.b.keys) {
    const IndexerArgs& args = task.args;
    const int32_t* table = args.block_table.row(task.out.request);
    const int32_t* index_table =
        args.index_block_table.empty() ? nullptr : args.index_block_table.row(task.out.request);
    for (int64_t unit = begin_; unit <= last_; unit += kUnitsOfPage) {
      const Place place = index_place(table, index_table, args.page, LocalId(int32_t(unit * kUnitTokens)));
      pages_[size_t(unit - begin_) / kUnitsOfPage] = args.index.data + int64_t(place.page.value()) * Layout::kPageBytes;
    }
    for (int64_t unit = begin_; unit <= last_ && unit < begin_ + kTouchAhead; ++unit) touch_unit(bytes(unit));
    for (int64_t unit = begin_; unit <= last_ && unit < begin_ + kUnitsAhead; ++unit) {
      for (int slot = 0; slot < kUnitSlots; ++slot) prefetch_slot<Layout>(bytes(unit), slot);
    }
  }

  /// The unit, to be decoded into its buffer.
  Unit at(int64_t unit) const {
    touch_unit(bytes(std::min(unit + kTouchAhead, last_)));
    return Unit(bytes(unit), bytes(std::min(unit + kUnitsAhead, last_)), keys_[unit % 2]);
  }
  UnitBytes bytes(int64_t unit) const {
    const std::byte* page = pages_[size_t(unit - begin_) / kUnitsOfPage];
    const int first = int(unit % kUnitsOfPage) * kUnitTokens;
    return {page + Layout::value_at(first), page + Layout::scale_at(first)};
  }

 private:
  int64_t begin_, last_;
  BFloat16* const* keys_;
  std::array<const std::byte*, kMaxTaskPages> pages_;
};

/// Packs the index queries and head weights of a request, in the order of k of the decoded keys.
inline void pack_queries(const ScoreTask& task, const KeyOrder& order) {
  const QueryPanels& panels = task.panels;
  for (int j = 0; j < panels.q; ++j) {
    const int64_t row = task.out.request * panels.q + j;
    for (int h = 0; h < panels.columns; ++h) {
      BFloat16 query[kIndexDim] = {};
      if (h < panels.heads) task.ops.decode_e4m3(task.args.index_query.row(row, h), query, kIndexDim);
      const int column = j * panels.columns + h, first = column / panels.width * panels.width;
      const int64_t pitch = 2 * int64_t(panels.width_from(first));
      BFloat16* at = task.b.queries + QueryPanels::panel_at(first) + 2 * (column - first);
      for (int pair = 0; pair < kIndexDim / 2; ++pair, at += pitch) {
        at[0] = query[order[size_t(2 * pair)]];
        at[1] = query[order[size_t(2 * pair + 1)]];
      }
    }
    float* weights = task.b.weights + j * panels.columns;
    std::fill(std::copy_n(task.args.head_weights.row(row), panels.heads, weights), weights + panels.columns, 0.0f);
  }
}

/// Zeroes the keys of a unit from the row's n-th token on.
inline void clear_unseen(const ScoreTask& task, int64_t unit, int position) {
  const int64_t first = unit * kUnitTokens;
  uint32_t* keys = task.out.keys_of(position) + first;
  for (int64_t t = std::max<int64_t>(task.seen[position] - first, 0); t < kUnitTokens; ++t) keys[t] = kNanScoreKey;
}

/// Scores by block_dot. FP8 keys are scaled here, MXFP4 keys were when they were decoded.
template <class Unit>
void score_units(const ScoreTask& task) {
  const QueryPanels& panels = task.panels;
  const ScoreBuffers& b = task.b;
  const UnitKeys to_keys = unit_keys_for(panels.columns);
  const TaskUnits<Unit> units(task);
  for (int64_t unit = task.begin; unit < task.end; ++unit) {
    decode_unit(units.at(unit));
    const std::byte* scales = Unit::kScaled ? nullptr : units.bytes(unit).scales;
    for (int column = 0; column < panels.total(); column += panels.width) {
      const int width = panels.width_from(column);
      task.ops.block_dot({.a = b.keys[unit % 2],
                          .a_pitch = kIndexDim,
                          .m = kUnitTokens,
                          .b = b.queries + QueryPanels::panel_at(column),
                          .b_pitch = 2 * width,
                          .n = width,
                          .k = kIndexDim,
                          .c = b.dots[0],
                          .c_pitch = width,
                          .accumulate = false});
      for (int at = 0; at < width; at += panels.columns) {
        const int j = (column + at) / panels.columns;
        uint32_t* keys = task.out.keys_of(j) + unit * kUnitTokens;
        to_keys(b.dots[0] + at, width, b.weights + column + at, scales, keys);
        if ((unit + 1) * kUnitTokens > task.seen[j]) clear_unseen(task, unit, j);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
