// Step 9 with AMX: as score_units() of scores-inl.h, but with the three kinds of work of a unit interleaved,
// instruction by instruction. Included by the Highway target that AMX goes with (AVX3).
//
// unit u: tile products of its keys with the queries, between which unit u + 1 is decoded, unit u + 4 is asked for, and
// the dot products that the previous tiles stored become keys.
//
// A core executes tile products beside everything else, but finds nothing else to execute when hundreds of tile
// instructions stand together; and memory rests while nobody asks it for more. Besides, configuring tiles waits for all
// that is under way, which a call of block_dot does each time: here it is done once a task. Tile instructions are
// written in assembly: so they need no target of their own and stay where they are put.

// Per-target include guard
#if defined(DSACORE_CPU_SCORES_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_CPU_SCORES_AMX_INL_H_
#undef DSACORE_CPU_SCORES_AMX_INL_H_
#else
#define DSACORE_CPU_SCORES_AMX_INL_H_
#endif

#include <immintrin.h>

#include <algorithm>

#include "backends/cpu/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

// ---- tiles: 0..3 sums, [16 tokens, 16 columns] each; 4, 5 keys; 6, 7 queries ----

struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// All tiles are 16 x 64 bytes until the end of the scope.
class TileScope {
 public:
  TileScope() { asm volatile("ldtilecfg %0" : : "m"(kShapes)); }
  ~TileScope() { asm volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  static constexpr TileShapes kShapes{};
};

template <int kTile>
HWY_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
HWY_INLINE void load_tile(const void* from, int64_t pitch_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(pitch_bytes), "i"(kTile) : "memory");
}
template <int kTile>
HWY_INLINE void store_tile(void* to, int64_t pitch_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(pitch_bytes), "i"(kTile) : "memory");
}
template <int kSum, int kKeys, int kQueries>
HWY_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kKeys), "i"(kQueries));
}

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;  ///< k of one product
constexpr int kProducts = kUnitTokens / kTileRows * (kTileColumns / 16) * (kIndexDim / kTileDepth);
static_assert(kUnitTokens == 2 * kTileRows && kTileColumns == 32 && kProducts == kUnitSlots);

/// Dot products of a unit's keys with a panel of 32 columns, to `dots`; `between(i)` is called after each of the 16
/// tile products.
template <class Between>
HWY_INLINE void multiply_unit(const BFloat16* keys, const BFloat16* panel, float* dots, int64_t pitch,
                              Between between) {
  constexpr int64_t kKeyBytes = kIndexDim * sizeof(BFloat16), kPairBytes = kTileColumns * 2 * sizeof(BFloat16);
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (int k = 0; k < kIndexDim / kTileDepth; ++k, keys += kTileDepth, panel += kTileDepth * kTileColumns) {
    load_tile<4>(keys, kKeyBytes);
    load_tile<6>(panel, kPairBytes);
    multiply_tiles<0, 4, 6>();
    between(4 * k);
    load_tile<7>(panel + kTileColumns, kPairBytes);
    multiply_tiles<1, 4, 7>();
    between(4 * k + 1);
    load_tile<5>(keys + kTileRows * kIndexDim, kKeyBytes);
    multiply_tiles<2, 5, 6>();
    between(4 * k + 2);
    multiply_tiles<3, 5, 7>();
    between(4 * k + 3);
  }
  const int64_t pitch_bytes = pitch * int64_t(sizeof(float));
  store_tile<0>(dots, pitch_bytes);
  store_tile<1>(dots + 16, pitch_bytes);
  store_tile<2>(dots + kTileRows * pitch, pitch_bytes);
  store_tile<3>(dots + kTileRows * pitch + 16, pitch_bytes);
}

// ---- units ----

/// Normal e4m3 numbers by GFNI: both bytes are an affine map of the code's bits, 0x3C + (code >> 4 & 7) and the sign
/// being one.
struct ByGfni {
  HWY_INLINE NormalBytes operator()(CodeV code) const {
    NormalBytes bytes;
    asm("vgf2p8affineqb $0x3C, %2, %1, %0"
        : "=v"(bytes.high.raw)
        : "v"(code.raw), "v"(_mm512_set1_epi64(0x1020404040404080)));
    asm("vgf2p8affineqb $0, %2, %1, %0"
        : "=v"(bytes.low.raw)
        : "v"(code.raw), "v"(_mm512_set1_epi64(0x0000000001020408)));
    return bytes;
  }
};

/// Dot products of a unit's row that are still to become keys.
struct PendingKeys {
  const float* dots;
  const float* weights;
  const std::byte* scales;
  uint32_t* keys;
};

/// What comes between the tile products of a panel: decoding, half of the pending keys at a time, both, or nothing.
template <class Unit, int kVectors, bool kDecode, bool kKeys>
struct BetweenProducts {
  Unit& next;
  const PendingKeys& pending;

  HWY_INLINE void operator()(int slot) const {
    if constexpr (kDecode) next.decode(slot);
    constexpr int kHalf = kUnitSlots / 2;
    if (!kKeys || slot % kHalf != kHalf - 1) return;
    const int first = slot / kHalf * (kUnitTokens / 2);
    token_keys<kVectors>(first, first + kUnitTokens / 2, pending.dots, kVectors * kScoreLanes, pending.weights,
                         pending.scales, pending.keys);
  }
};

/// A row's dot products with a unit, from one panel or two; in the second there is room for the pending keys.
template <class Unit, int kVectors, bool kDecode>
HWY_INLINE void multiply_row(const BFloat16* keys, const BFloat16* panel, float* dots, Unit& next,
                             const PendingKeys& pending) {
  constexpr int kColumns = kVectors * kScoreLanes;
  constexpr bool kOnePanel = kColumns == kTileColumns;
  static_assert(kOnePanel || kColumns == 2 * kTileColumns);
  multiply_unit(keys, panel, dots, kColumns, BetweenProducts<Unit, kVectors, kDecode, kOnePanel>{next, pending});
  if constexpr (!kOnePanel) {
    multiply_unit(keys, panel + QueryPanels::panel_at(kTileColumns), dots + kTileColumns, kColumns,
                  BetweenProducts<Unit, kVectors, false, true>{next, pending});
  }
  if constexpr (kDecode) next.finish();
}

/// Scores with tiles. A row has kVectors * kScoreLanes columns.
template <class Unit, int kVectors>
void score_units_amx(const ScoreTask& task) {
  constexpr int kColumns = kVectors * kScoreLanes;
  const ScoreBuffers& b = task.b;
  const TaskUnits<Unit> units(task);
  const auto scales = [&](int64_t unit) { return Unit::kScaled ? nullptr : units.bytes(unit).scales; };
  // A panel's dot products are stored when those pending have become keys: where a row is one panel they take their
  // place, and L1 has room for more of the rest.
  constexpr int kDots = kColumns == kTileColumns ? 1 : 2;
  decode_unit(units.at(task.begin));
  // Before the first row nothing is pending: its own keys then take the place of these.
  std::fill_n(b.dots[kDots - 1], kUnitTokens * kColumns, 0.0f);
  PendingKeys pending{b.dots[kDots - 1], b.weights, scales(task.begin), task.out.keys_of(0) + task.begin * kUnitTokens};
  const TileScope tiles;
  int buffer = 0;
  for (int64_t unit = task.begin; unit < task.end; ++unit) {
    const BFloat16* keys = b.keys[unit % 2];
    Unit next = units.at(std::min(unit + 1, task.end - 1));
    for (int j = 0; j < task.panels.q; ++j, buffer = (buffer + 1) % kDots) {
      const BFloat16* panel = b.queries + QueryPanels::panel_at(j * kColumns);
      if (j == 0 && unit + 1 < task.end) {
        multiply_row<Unit, kVectors, true>(keys, panel, b.dots[buffer], next, pending);
      } else {
        multiply_row<Unit, kVectors, false>(keys, panel, b.dots[buffer], next, pending);
      }
      pending = {b.dots[buffer], b.weights + j * kColumns, scales(unit), task.out.keys_of(j) + unit * kUnitTokens};
    }
  }
  token_keys<kVectors>(0, kUnitTokens, pending.dots, kColumns, pending.weights, pending.scales, pending.keys);
  for (int j = 0; j < task.panels.q; ++j) {
    for (int64_t unit = std::max(task.begin, task.seen[j] / kUnitTokens); unit < task.end; ++unit)
      clear_unseen(task, unit, j);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
