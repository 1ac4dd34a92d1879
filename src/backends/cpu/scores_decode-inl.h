// Index keys -> BF16, half a page (a unit) at a time. Included once per Highway target.
//
// The two bytes of a BF16 value come from table lookups and are interleaved within 128-bit blocks. That leaves the 128
// values of a key in another order, kFp8Order or kMxfp4Order, which a dot product does not mind: the packed queries
// have the same.

// Per-target include guard
#if defined(DSACORE_CPU_SCORES_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_CPU_SCORES_DECODE_INL_H_
#undef DSACORE_CPU_SCORES_DECODE_INL_H_
#else
#define DSACORE_CPU_SCORES_DECODE_INL_H_
#endif

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

#include "backends/cpu/indexer_layout.h"
#include "format/layouts.h"
#include "format/numeric.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using CodeD = hn::ScalableTag<uint8_t>;
using CodeV = hn::Vec<CodeD>;
constexpr int kCodeLanes = int(hn::MaxLanes(CodeD()));
constexpr int kBlockBytes = 16;
constexpr int kLineBytes = 64;
constexpr int kSlotTokens = 2;
constexpr int kUnitSlots = kUnitTokens / kSlotTokens;

/// The bytes of a unit in its page.
struct UnitBytes {
  const std::byte* values;
  const std::byte* scales;
};

/// Asks for a cache line, as far as L2: there is more room for lines under way than in L1, and none is pushed out of
/// L1.
HWY_INLINE void prefetch_line(const std::byte* at) { __builtin_prefetch(at, 0, 2); }

/// Asks for a slot's share of a unit.
template <class Layout>
HWY_INLINE void prefetch_slot(const UnitBytes& unit, int slot) {
  constexpr int kBytes = kSlotTokens * Layout::kValueBytes;
  for (int at = 0; at < kBytes; at += kLineBytes) prefetch_line(unit.values + slot * kBytes + at);
  if (slot * kLineBytes < kUnitTokens * Layout::kScaleBytes) prefetch_line(unit.scales + slot * kLineBytes);
}

/// Asks for a line of each page of memory in which a unit lies.
HWY_INLINE void touch_unit(const UnitBytes& unit) {
  prefetch_line(unit.values);
  prefetch_line(unit.scales);
}

using KeyOrder = std::array<uint8_t, kIndexDim>;

/// Which value of a key stands at each place after decode_fp8: a vector of codes becomes its blocks' lower, then upper
/// halves.
constexpr KeyOrder kFp8Order = [] {
  KeyOrder order{};
  for (int i = 0; i < kIndexDim; ++i) {
    const int vector = i / kCodeLanes, upper = i % kCodeLanes / (kCodeLanes / 2), at = i % (kCodeLanes / 2);
    order[size_t(i)] = uint8_t(vector * kCodeLanes + at / 8 * kBlockBytes + upper * 8 + at % 8);
  }
  return order;
}();

/// The same after decode_mxfp4: a vector of pairs becomes even values of lower, then upper halves, then odd values.
constexpr KeyOrder kMxfp4Order = [] {
  KeyOrder order{};
  for (int i = 0; i < kIndexDim; ++i) {
    const int vector = i / (2 * kCodeLanes), part = i % (2 * kCodeLanes) / (kCodeLanes / 2), at = i % (kCodeLanes / 2);
    const int pair = vector * kCodeLanes + at / 8 * kBlockBytes + part % 2 * 8 + at % 8;
    order[size_t(i)] = uint8_t(2 * pair + part / 2);
  }
  return order;
}();

HWY_INLINE CodeV load_codes(const std::byte* p) { return hn::LoadU(CodeD(), reinterpret_cast<const uint8_t*>(p)); }
/// 16 bytes, repeated in every block of a vector.
struct alignas(64) Table {
  constexpr explicit Table(const std::array<uint8_t, kBlockBytes>& block) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = block[i % kBlockBytes];
  }
  std::array<uint8_t, size_t(kCodeLanes)> bytes{};
};
HWY_INLINE CodeV load(const Table& table) { return hn::Load(CodeD(), table.bytes.data()); }

/// Stores values given by their low and high bytes.
HWY_INLINE void store_values(CodeV low, CodeV high, BFloat16* values) {
  const hn::Repartition<uint16_t, CodeD> d16;
  const CodeD d;
  hn::Store(hn::BitCast(d16, hn::InterleaveLower(d, low, high)), d16, &values->bits);
  hn::Store(hn::BitCast(d16, hn::InterleaveUpper(d, low, high)), d16, &values[kCodeLanes / 2].bits);
}

// ---- e4m3 ----

enum class Byte : uint8_t { kLow, kHigh };

/// A byte of the BF16 values of the codes `first`, `first + step`, ...
constexpr Table e4m3_bytes(Byte byte, int first, int step) {
  std::array<uint8_t, kBlockBytes> bytes{};
  for (int i = 0; i < 16; ++i) {
    const uint16_t bits = to_bf16(e4m3_to_float(uint8_t(first + i * step))).bits;
    bytes[size_t(i)] = uint8_t(byte == Byte::kLow ? bits & 0xFF : bits >> 8);
  }
  return Table(bytes);
}
// Of a normal number the high byte depends on the code's upper four bits alone, and the low byte is the lower four
// bits.
constexpr Table kNormalHigh = e4m3_bytes(Byte::kHigh, 8, 16);
constexpr Table kSubnormalLow = e4m3_bytes(Byte::kLow, 0, 1);
constexpr Table kSubnormalHigh = e4m3_bytes(Byte::kHigh, 0, 1);

/// Values of codes among which some are below 8 or NaN.
HWY_NOINLINE inline void store_any_fp8(const std::byte* codes, BFloat16* values) {
  const CodeD d;
  const auto code = load_codes(codes);
  const auto magnitude = hn::And(code, hn::Set(d, 0x7F));
  const auto sign = hn::And(code, hn::Set(d, 0x80));
  const auto subnormal = hn::Lt(magnitude, hn::Set(d, 8));
  const auto nan = hn::Eq(magnitude, hn::Set(d, kE4m3Nan));
  auto low = hn::ShiftLeft<4>(code);
  auto high = hn::TableLookupBytes(load(kNormalHigh), hn::ShiftRight<4>(code));
  low = hn::IfThenElse(subnormal, hn::TableLookupBytes(load(kSubnormalLow), magnitude), low);
  high = hn::IfThenElse(subnormal, hn::Or(hn::TableLookupBytes(load(kSubnormalHigh), magnitude), sign), high);
  low = hn::IfThenElse(nan, hn::Set(d, 0xC0), low);
  high = hn::IfThenElse(nan, hn::Or(hn::Set(d, 0x7F), sign), high);
  store_values(low, high, values);
}

/// The BF16 bytes of normal e4m3 numbers.
struct NormalBytes {
  CodeV low, high;
};
struct ByTable {
  HWY_INLINE NormalBytes operator()(CodeV code) const {
    return {hn::ShiftLeft<4>(code), hn::TableLookupBytes(load(kNormalHigh), hn::ShiftRight<4>(code))};
  }
};

/// Decodes kSlotTokens tokens of e4m3 keys without their scales, in the order kFp8Order. Returns whether some are to be
/// decoded by store_any_fp8.
template <class Normal>
HWY_INLINE bool decode_fp8_slot(Normal normal, const std::byte* codes, BFloat16* values) {
  const CodeD d;
  auto least = hn::Set(d, 0xFF);
  HWY_UNROLL(4)
  for (int i = 0; i < kSlotTokens * kIndexDim; i += kCodeLanes) {
    const auto code = load_codes(codes + i);
    const NormalBytes bytes = normal(code);
    store_values(bytes.low, bytes.high, values + i);
    // Twice the magnitude plus 2, modulo 256: up to 16 below code 8, 0 for NaN, 18 and more for all others.
    least = hn::Min(least, hn::Add(hn::Add(code, code), hn::Set(d, 2)));
  }
  return !hn::AllFalse(d, hn::Lt(least, hn::Set(d, 18)));
}

// ---- e2m1 with ue8m0 scales ----

// A value's BF16 exponent is its block's scale byte plus kExponent - 1; the rest of its bits does not depend on the
// scale. Zeros are made by the masks.
constexpr Table kExponent({0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3});
constexpr Table kMantissa({0, 0, 0, 0x40, 0, 0x40, 0, 0x40, 0, 0, 0, 0x40, 0, 0x40, 0, 0x40});
constexpr Table kSign({0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80});
constexpr Table nonzero_mask(uint8_t mask) {
  std::array<uint8_t, kBlockBytes> bytes{};
  for (size_t i = 0; i < 16; ++i) bytes[i] = i % 8 == 0 ? 0 : mask;
  return Table(bytes);
}
constexpr Table kLowMask = nonzero_mask(0x80);
constexpr Table kHighMask = nonzero_mask(0x7F);

/// Which scale byte of a token each byte of its vector `index` takes.
constexpr std::array<uint8_t, size_t(kCodeLanes)> scale_places(int index) {
  std::array<uint8_t, size_t(kCodeLanes)> places{};
  for (int i = 0; i < kCodeLanes; ++i) places[size_t(i)] = uint8_t((index * kCodeLanes + i) / kBlockBytes);
  return places;
}

/// Low and high bytes of all 16 codes in every block of a vector, from the block's scale byte.
struct BlockTables {
  CodeV low, high;
};
template <bool kNan>
HWY_INLINE BlockTables block_tables(CodeV scale) {
  const CodeD d;
  const hn::Repartition<uint16_t, CodeD> d16;
  // Saturated: what BF16 has no exponent for becomes its largest binade, or nearly zero.
  const auto exponent = hn::SaturatedSub(hn::SaturatedAdd(scale, load(kExponent)), hn::Set(d, 1));
  const auto wide = hn::BitCast(d16, exponent);
  BlockTables tables = {
      hn::OrAnd(load(kMantissa), hn::BitCast(d, hn::ShiftLeft<7>(wide)), load(kLowMask)),
      hn::OrAnd(load(kSign), hn::BitCast(d, hn::ShiftRight<1>(wide)), load(kHighMask)),
  };
  if constexpr (kNan) {
    const auto nan = hn::VecFromMask(d, hn::Eq(scale, hn::Set(d, 0xFF)));
    tables.low = hn::OrAnd(tables.low, nan, hn::Set(d, 0xC0));
    tables.high = hn::OrAnd(tables.high, nan, hn::Set(d, 0x7F));
  }
  return tables;
}

template <bool kNan>
HWY_INLINE void decode_mxfp4_token(const std::byte* values, const std::byte* scales, BFloat16* out) {
  const CodeD d;
  const hn::Repartition<uint32_t, CodeD> d32;
  uint32_t word;
  std::memcpy(&word, scales, sizeof(word));
  const auto all_scales = hn::BitCast(d, hn::Set(d32, word));
  HWY_UNROLL(4)
  for (int i = 0; i < IndexMxfp4::kValueBytes / kCodeLanes; ++i) {
    alignas(64) static constexpr std::array kPlaces = {scale_places(0), scale_places(1), scale_places(2),
                                                       scale_places(3)};
    const auto scale = hn::TableLookupBytes(all_scales, hn::Load(d, kPlaces[size_t(i)].data()));
    const BlockTables tables = block_tables<kNan>(scale);
    const auto codes = load_codes(values + i * kCodeLanes);
    const auto even = hn::And(codes, hn::Set(d, 0x0F));
    const auto odd = hn::ShiftRight<4>(codes);
    BFloat16* at = out + i * 2 * kCodeLanes;
    store_values(hn::TableLookupBytes(tables.low, even), hn::TableLookupBytes(tables.high, even), at);
    store_values(hn::TableLookupBytes(tables.low, odd), hn::TableLookupBytes(tables.high, odd), at + kCodeLanes);
  }
}

/// Whether a scale of the unit is NaN.
HWY_INLINE bool any_nan_scale(const std::byte* scales) {
  const CodeD d;
  auto largest = hn::Zero(d);
  for (int at = 0; at < kUnitTokens * IndexMxfp4::kScaleBytes; at += kCodeLanes) {
    largest = hn::Max(largest, load_codes(scales + at));
  }
  return !hn::AllFalse(d, hn::Eq(largest, hn::Set(d, 0xFF)));
}

// ---- units ----

/// Decodes a unit slot by slot, kUnitSlots of them, so that other work can come between, and asks for the bytes of a
/// later unit.
template <class Normal = ByTable>
class Fp8Unit {
 public:
  using Layout = IndexFp8;
  static constexpr bool kScaled = false;  ///< whether values come with their scales
  Fp8Unit(const UnitBytes& unit, const UnitBytes& later, BFloat16* values)
      : unit_(unit), later_(later), values_(values) {}
  HWY_INLINE void decode(int slot) {
    prefetch_slot<Layout>(later_, slot);
    const int at = slot * kSlotTokens * kIndexDim;
    rest_ |= uint32_t(decode_fp8_slot(Normal(), unit_.values + at, values_ + at)) << slot;
  }
  /// After all slots.
  HWY_INLINE void finish() {
    for (; HWY_UNLIKELY(rest_ != 0); rest_ &= rest_ - 1) {
      const int first = std::countr_zero(rest_) * kSlotTokens * kIndexDim;
      for (int at = first; at < first + kSlotTokens * kIndexDim; at += kCodeLanes)
        store_any_fp8(unit_.values + at, values_ + at);
    }
  }

 private:
  UnitBytes unit_, later_;
  BFloat16* values_;
  uint32_t rest_ = 0;  ///< slots with numbers that are not normal
};

/// The same for MXFP4 keys, scales included. A block with a NaN scale is all NaN.
class Mxfp4Unit {
 public:
  using Layout = IndexMxfp4;
  static constexpr bool kScaled = true;
  Mxfp4Unit(const UnitBytes& unit, const UnitBytes& later, BFloat16* values)
      : unit_(unit), later_(later), values_(values) {}
  HWY_INLINE void decode(int slot) {
    prefetch_slot<Layout>(later_, slot);
    static_assert(kSlotTokens == 2);
    decode_token<false>(2 * slot);
    decode_token<false>(2 * slot + 1);
  }
  /// After all slots.
  HWY_INLINE void finish() {
    if (HWY_LIKELY(!any_nan_scale(unit_.scales))) return;
    for (int t = 0; t < kUnitTokens; ++t) decode_token<true>(t);
  }

 private:
  template <bool kNan>
  HWY_INLINE void decode_token(int t) {
    decode_mxfp4_token<kNan>(unit_.values + t * Layout::kValueBytes, unit_.scales + t * Layout::kScaleBytes,
                             values_ + t * kIndexDim);
  }

  UnitBytes unit_, later_;
  BFloat16* values_;
};

template <class Unit>
void decode_unit(Unit unit) {
  for (int slot = 0; slot < kUnitSlots; ++slot) unit.decode(slot);
  unit.finish();
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
