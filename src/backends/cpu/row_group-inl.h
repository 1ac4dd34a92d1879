// Rows in groups of up to 64, the way many rows go through Bf16Ops::block_dot: the weights are its row-major `a`, read
// where they lie, and the rows are the columns of `b`, packed in pairs along k. The product therefore has a column for
// each row, and is turned back into rows here, where it is rounded anyway.
#if defined(DSACORE_BACKENDS_CPU_ROW_GROUP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DSACORE_BACKENDS_CPU_ROW_GROUP_INL_H_
#undef DSACORE_BACKENDS_CPU_ROW_GROUP_INL_H_
#else
#define DSACORE_BACKENDS_CPU_ROW_GROUP_INL_H_
#endif

#include <cstring>

#include "backends/cpu/numeric-inl.h"
#include "backends/cpu/rows.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

HWY_INLINE void copy_four(void* to, const uint32_t* from) { std::memcpy(to, from, 4 * sizeof(uint32_t)); }

/// Packs up to kPackRows rows [rows, k] as kPackRows columns of a group, `column`.. of out[k/2][columns][2]; those past
/// the rows become zero. `k` is a multiple of 32.
inline void pack_pairs(const BFloat16* x, int64_t x_pitch, int rows, int k, BFloat16* out, int columns, int column) {
  const hn::CappedTag<uint32_t, 16> d;
  const hn::Repartition<uint16_t, decltype(d)> d16;
  const int lanes = int(hn::Lanes(d));
  HWY_ALIGN uint32_t turned[16 * 4];
  for (int pair = 0; pair < k / 2; pair += lanes) {
    for (int r = 0; r < kPackRows; r += 4) {
      const auto row = [&](int i) HWY_ATTR {
        return r + i < rows ? hn::BitCast(d, hn::LoadU(d16, &x[(r + i) * x_pitch + 2 * pair].bits)) : hn::Zero(d);
      };
      hn::StoreInterleaved4(row(0), row(1), row(2), row(3), d, turned);
      BFloat16* to = out + (int64_t(pair) * columns + column + r) * 2;
      for (int i = 0; i < lanes; ++i) copy_four(to + int64_t(i) * columns * 2, turned + 4 * i);
    }
  }
}

/// Rounds a product [m, columns] to BF16 and packs it as the next product's `b`: out[m/2][columns][2].
inline void repack_pairs(const float* c, int64_t c_pitch, int m, int columns, BFloat16* out) {
  const hn::CappedTag<float, 16> d;
  const hn::Repartition<uint16_t, decltype(d)> d16;
  for (int k = 0; k < m; k += 2) {
    for (int r = 0; r < columns; r += int(hn::Lanes(d))) {
      const auto even = hn::ShiftRight<16>(bf16_upper(d, hn::LoadU(d, c + k * c_pitch + r)));
      const auto odd = bf16_upper(d, hn::LoadU(d, c + (k + 1) * c_pitch + r));
      hn::StoreU(hn::BitCast(d16, hn::Or(even, odd)), d16, &out[(int64_t(k) / 2 * columns + r) * 2].bits);
    }
  }
}

/// Columns 0..rows-1 of a product [m, columns] as rows of `m` BF16; `m` a multiple of 8, `columns` of 16.
inline void store_rows_bf16(const float* c, int64_t c_pitch, int m, int rows, BFloat16* out, int64_t out_pitch) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const int lanes = int(hn::Lanes(d));
  HWY_ALIGN uint32_t turned[16 * 4];
  for (int r = 0; r < rows; r += lanes) {
    const int live = rows - r < lanes ? rows - r : lanes;
    for (int k = 0; k < m; k += 8) {
      const auto pair = [&](int i) HWY_ATTR {
        const float* at = c + (k + 2 * i) * c_pitch + r;
        return hn::Or(hn::ShiftRight<16>(bf16_upper(d, hn::LoadU(d, at))), bf16_upper(d, hn::LoadU(d, at + c_pitch)));
      };
      hn::StoreInterleaved4(pair(0), pair(1), pair(2), pair(3), du, turned);
      for (int i = 0; i < live; ++i) copy_four(out + (r + i) * out_pitch + k, turned + 4 * i);
    }
  }
}

/// The same as e4m3 of the BF16 value times the column's factor; `m` a multiple of 16.
inline void store_rows_e4m3(const float* c, int64_t c_pitch, int m, int rows, const float* factors, uint8_t* out,
                            int64_t out_pitch) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const int lanes = int(hn::Lanes(d));
  HWY_ALIGN uint32_t turned[16 * 4];
  for (int r = 0; r < rows; r += lanes) {
    const int live = rows - r < lanes ? rows - r : lanes;
    const auto factor = hn::LoadU(d, factors + r);
    for (int k = 0; k < m; k += 16) {
      const auto code = [&](int i) HWY_ATTR {
        const auto x = round_bf16(d, hn::LoadU(d, c + (k + i) * c_pitch + r));
        return hn::BitCast(du, e4m3_codes(d, hn::Mul(x, factor)));
      };
      const auto four = [&](int i) HWY_ATTR {
        const auto low = hn::Or(code(i), hn::ShiftLeft<8>(code(i + 1)));
        return hn::Or(low, hn::Or(hn::ShiftLeft<16>(code(i + 2)), hn::ShiftLeft<24>(code(i + 3))));
      };
      hn::StoreInterleaved4(four(0), four(4), four(8), four(12), du, turned);
      for (int i = 0; i < live; ++i) copy_four(out + (r + i) * out_pitch + k, turned + 4 * i);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
