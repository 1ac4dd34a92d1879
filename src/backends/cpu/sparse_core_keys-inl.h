// Cache rows and query rows -> BF16, as the sparse core multiplies them.
//
// cache row -> key [576], row-major, for query . key | two keys -> pairs of tokens [512][2], for p . value
// query rows [heads, 576] -> pairs along the row [288][padded heads][2]
//
// Column order of the packed values: interleaving works within 128-bit blocks, so of each group of `Lanes(u16)` columns
// the first vector holds columns 0..3 of every 8, the second columns 4..7. The latents keep that order until
// `store_latent`.

// Per-target include guard
#if defined(DSACORE_CPU_SPARSE_CORE_KEYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_CPU_SPARSE_CORE_KEYS_INL_H_
#undef DSACORE_CPU_SPARSE_CORE_KEYS_INL_H_
#else
#define DSACORE_CPU_SPARSE_CORE_KEYS_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "backends/cpu/bf16_ops.h"
#include "backends/cpu/sparse_core_layout.h"
#include "backends/cpu/sparse_core_nvfp4.h"
#include "format/layouts.h"
#include "hwy/highway.h"
#include "stages/stages.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Multiplies 128 values that came from e4m3 by 2^exponent, where no product leaves the normal range.
inline void scale_tile(BFloat16* values, int exponent) {
  const hn::ScalableTag<uint16_t> d;
  constexpr int kSmallest = 0x3B00, kLargest = 0x43E0;  // 2^-9, 448: zero and NaN, which stay, lie outside
  const auto low15 = hn::Set(d, 0x7FFF);
  const auto smallest = hn::Set(d, kSmallest);
  const auto span = hn::Set(d, kLargest - kSmallest);
  const auto change = hn::Set(d, uint16_t(exponent << 7));
  for (int i = 0; i < KvFp8DsMla::kTile; i += int(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, &values[i].bits);
    const auto above = hn::Sub(hn::And(v, low15), smallest);
    const auto number = hn::Eq(hn::Min(above, span), above);
    hn::StoreU(hn::Add(v, hn::IfThenElseZero(number, change)), d, &values[i].bits);
  }
}

/// Exponent of a tile scale that is a power of two by which every e4m3 value can be multiplied in BF16 exactly.
inline bool exact_exponent(float scale, int* exponent) {
  const uint32_t bits = bits_of(scale);
  *exponent = int(bits >> 23) - 127;  // a sign bit makes it too large
  return (bits & 0x7FFFFFu) == 0 && *exponent >= -117 && *exponent <= 119;
}

/// Decodes one row to `key` [576]. Returns whether values are complete; else `scales` [4] are to be folded into logits
/// and p. Where they are complete, `scales` are 1.
inline bool decode_row(KvFp8DsMla, const Bf16Ops& ops, const std::byte* row, BFloat16* key, float* scales) {
  ops.decode_e4m3(reinterpret_cast<const uint8_t*>(row + KvFp8DsMla::kValuesAt), key, kLatent);
  std::memcpy(static_cast<void*>(key + kLatent), row + KvFp8DsMla::kPeAt, kPe * sizeof(BFloat16));
  int exponents[kScaleTiles];
  bool exact = true;
  for (int tile = 0; tile < kScaleTiles; ++tile) {
    scales[tile] = KvFp8DsMla::scale(row, tile);
    exact &= exact_exponent(scales[tile], &exponents[tile]);
  }
  if (!exact) return false;
  for (int tile = 0; tile < kScaleTiles; ++tile) {
    if (exponents[tile] != 0) scale_tile(key + tile * KvFp8DsMla::kTile, exponents[tile]);
    scales[tile] = 1;
  }
  return true;
}

inline bool decode_row(KvFp8, const Bf16Ops& ops, const std::byte* row, BFloat16* key, float*) {
  ops.decode_e4m3(reinterpret_cast<const uint8_t*>(row), key, kQueryRow);
  return true;
}

inline bool decode_row(KvNvfp4DsMla, const Bf16Ops& ops, const std::byte* row, BFloat16* key, float*) {
  static constexpr Nvfp4Products kProducts = make_nvfp4_products();
  const hn::Full128<uint8_t> d;
  const hn::Full128<uint16_t> d16;
  const auto bytes = reinterpret_cast<const uint8_t*>(row);
  const auto low4 = hn::Set(d, 15);
  const auto block = [&](int s, hn::Vec<decltype(d)> codes) {
    const uint8_t* products = kProducts.bytes[bytes[KvNvfp4DsMla::scale_at(s)]];
    const auto low = hn::TableLookupBytes(hn::Load(d, products), codes);
    const auto high = hn::TableLookupBytes(hn::Load(d, products + 16), codes);
    uint16_t* to = &key[s * KvNvfp4DsMla::kBlock].bits;
    hn::StoreU(hn::BitCast(d16, hn::InterleaveLower(d, low, high)), d16, to);
    hn::StoreU(hn::BitCast(d16, hn::InterleaveUpper(d, low, high)), d16, to + 8);
  };
  for (int s = 0; s < KvNvfp4DsMla::kBlocks; s += 2) {
    const auto pairs = hn::LoadU(d, bytes + KvNvfp4DsMla::kValuesAt + s * KvNvfp4DsMla::kBlock / 2);
    const auto even = hn::And(pairs, low4);
    const auto odd = hn::And(hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, pairs))), low4);
    block(s, hn::InterleaveLower(d, even, odd));
    block(s + 1, hn::InterleaveUpper(d, even, odd));
  }
  ops.decode_e4m3(bytes + KvNvfp4DsMla::kPeAt, key + kLatent, kPe);
  return true;
}

/// Packs the latents of two keys as pairs [512][2], in the column order above.
inline void pack_values(const BFloat16* even, const BFloat16* odd, BFloat16* pairs) {
  const hn::ScalableTag<uint16_t> d;
  const int lanes = int(hn::Lanes(d));
  for (int i = 0; i < kLatent; i += lanes) {
    const auto a = hn::LoadU(d, &even[i].bits);
    const auto b = hn::LoadU(d, &odd[i].bits);
    hn::StoreU(hn::InterleaveLower(d, a, b), d, &pairs[2 * i].bits);
    hn::StoreU(hn::InterleaveUpper(d, a, b), d, &pairs[2 * i + lanes].bits);
  }
}

/// Transposes 32-bit words: `to[c][r] = rows[r][c]` for 4 rows and `columns` (a multiple of 4) columns, `to` rows
/// `pitch` words apart. Words are pairs of 16-bit values.
inline void transpose_words(const uint16_t* const rows[4], int columns, uint16_t* to, int64_t pitch) {
  const hn::Full128<uint16_t> d16;
  const hn::Full128<uint32_t> d32;
  const hn::Full128<uint64_t> d64;
  const auto load = [&](int r, int c) { return hn::BitCast(d32, hn::LoadU(d16, rows[r] + 2 * c)); };
  for (int c = 0; c < columns; c += 4) {
    const auto r0 = load(0, c), r1 = load(1, c), r2 = load(2, c), r3 = load(3, c);
    const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d32, r0, r1));
    const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d32, r2, r3));
    const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d32, r0, r1));
    const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d32, r2, r3));
    uint16_t* at = to + 2 * c * pitch;
    hn::StoreU(hn::BitCast(d16, hn::InterleaveLower(d64, low01, low23)), d16, at);
    hn::StoreU(hn::BitCast(d16, hn::InterleaveUpper(d64, low01, low23)), d16, at + 2 * pitch);
    hn::StoreU(hn::BitCast(d16, hn::InterleaveLower(d64, high01, high23)), d16, at + 4 * pitch);
    hn::StoreU(hn::BitCast(d16, hn::InterleaveUpper(d64, high01, high23)), d16, at + 6 * pitch);
  }
}

/// Query rows of row `row` -> s.query; heads past the last are zero. Uses `s.keys`.
inline void pack_query(const QueryRows& query, int64_t row, const Bf16Ops& ops, const CoreLayout& layout,
                       const CoreScratch& s) {
  for (int first = 0; first < layout.padded_heads(); first += 4) {
    const uint16_t* rows[4];
    for (int i = 0; i < 4; ++i) {
      BFloat16* staged = s.keys + i * kQueryRow;
      rows[i] = &staged->bits;
      if (first + i >= query.heads) {
        std::memset(static_cast<void*>(staged), 0, kQueryRow * sizeof(BFloat16));
      } else if (query.element == 1) {
        ops.decode_e4m3(query.e4m3(row, first + i), staged, kQueryRow);
      } else {
        rows[i] = &query.bf16(row, first + i)->bits;
      }
    }
    transpose_words(rows, kQueryRow / 2, &s.query[2 * first].bits, layout.query_pitch() / 2);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // DSACORE_CPU_SPARSE_CORE_KEYS_INL_H_
