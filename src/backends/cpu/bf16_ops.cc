// Bf16Ops by Highway, for every target: BF16 widened to FP32, multiplied and added in FP32.
//
// Two BF16 values are read as one 32-bit lane: shifted left the lower is an FP32 number, masked the upper is one. So
// pairs along k need no shuffles, and both halves of a pair go to the same accumulator, even k first.
#include "backends/cpu/bf16_ops.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/bf16_ops.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<D32>;
using U16 = hn::Repartition<uint16_t, D32>;
using V32 = hn::Vec<D32>;

/// 32 vector registers, else 16: enough for 16 sums and their operands, or for 8.
constexpr bool kManyRegisters = HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON;

/// FP32 values of one vector of BF16 pairs.
struct Pairs {
  V32 even, odd;
};

HWY_INLINE Pairs Widen(hn::Vec<U32> pairs) {
  return {hn::BitCast(D32(), hn::ShiftLeft<16>(pairs)),
          hn::BitCast(D32(), hn::And(pairs, hn::Set(U32(), 0xFFFF0000u)))};
}
HWY_INLINE Pairs LoadPairs(const BFloat16* p) { return Widen(hn::BitCast(U32(), hn::LoadU(U16(), &p->bits))); }
HWY_INLINE Pairs BroadcastPair(const BFloat16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return Widen(hn::Set(U32(), pair));
}
HWY_INLINE V32 MulAddPairs(Pairs a, Pairs b, V32 sum) {
  return hn::MulAdd(a.odd, b.odd, hn::MulAdd(a.even, b.even, sum));
}

/// Rows n..n+R-1 of the matrix with vectors b..b+B-1. One accumulator each, its lanes summed at the end. `ahead`
/// elements further on lie the rows of the next tile, which are asked for meanwhile: a tile's rows are short streams,
/// over before the hardware's prefetcher has found its stride.
template <int R, int B>
HWY_INLINE void RowsTile(const RowsDot& op, int n, int b, int64_t ahead) {
  const BFloat16* w = op.w + n * op.w_pitch;
  const BFloat16* x = op.x + b * op.x_pitch;
  V32 sums[R][B];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < B; ++i) sums[r][i] = hn::Zero(D32());
  }
  for (int k = 0; k < op.k; k += 2 * int(hn::Lanes(D32()))) {
    Pairs xs[B];
    for (int i = 0; i < B; ++i) xs[i] = LoadPairs(x + i * op.x_pitch + k);
    for (int r = 0; r < R; ++r) {
      const Pairs row = LoadPairs(w + r * op.w_pitch + k);
      if (ahead != 0) hwy::Prefetch(w + r * op.w_pitch + k + ahead);
      for (int i = 0; i < B; ++i) sums[r][i] = MulAddPairs(row, xs[i], sums[r][i]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < B; ++i) {
      op.y[(b + i) * op.y_pitch + n + r] = hn::GetLane(hn::SumOfLanes(D32(), sums[r][i]));
    }
  }
}

/// R rows from n with vectors b.., B at a time, then fewer.
template <int R, int B>
HWY_INLINE void RowsTiles(const RowsDot& op, int n, int b) {
  for (; b + B <= op.b; b += B) RowsTile<R, B>(op, n, b, b == 0 && n + 2 * R <= op.n ? R * op.w_pitch : 0);
  if constexpr (B > 1) {
    if (b < op.b) RowsTiles<R, B / 2>(op, n, b);
  }
}

void RowsDotKernel(const RowsDot& op) {
  int n = 0;
  for (; n + 4 <= op.n; n += 4) RowsTiles<4, kManyRegisters ? 4 : 2>(op, n, 0);
  for (; n < op.n; ++n) RowsTiles<1, 4>(op, n, 0);
}

/// Rows m..m+R-1 with C vectors of columns from n.
template <int R, int C>
HWY_INLINE void BlockTile(const BlockDot& op, int m, int n) {
  const int lanes = int(hn::Lanes(D32()));
  const BFloat16* a = op.a + m * op.a_pitch;
  const BFloat16* b = op.b + 2 * n;
  float* c = op.c + m * op.c_pitch + n;
  V32 sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < C; ++i) {
      sums[r][i] = op.accumulate ? hn::LoadU(D32(), c + r * op.c_pitch + i * lanes) : hn::Zero(D32());
    }
  }
  for (int k = 0; k < op.k; k += 2, b += op.b_pitch) {
    Pairs columns[C];
    for (int i = 0; i < C; ++i) columns[i] = LoadPairs(b + 2 * i * lanes);
    for (int r = 0; r < R; ++r) {
      const Pairs row = BroadcastPair(a + r * op.a_pitch + k);
      for (int i = 0; i < C; ++i) sums[r][i] = MulAddPairs(row, columns[i], sums[r][i]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < C; ++i) hn::StoreU(sums[r][i], D32(), c + r * op.c_pitch + i * lanes);
  }
}

constexpr int kBlockRows = kManyRegisters ? 8 : 4;

template <int R>
HWY_INLINE void BlockTiles(const BlockDot& op, int m) {
  const int step = 2 * int(hn::Lanes(D32()));
  int n = 0;
  for (; n + step <= op.n; n += step) BlockTile<R, 2>(op, m, n);
  if (n < op.n) BlockTile<R, 1>(op, m, n);
}

void BlockDotKernel(const BlockDot& op) {
  int m = 0;
  for (; m + kBlockRows <= op.m; m += kBlockRows) BlockTiles<kBlockRows>(op, m);
  if constexpr (kBlockRows > 4) {
    for (; m + 4 <= op.m; m += 4) BlockTiles<4>(op, m);
  }
  for (; m + 2 <= op.m; m += 2) BlockTiles<2>(op, m);
  if (m < op.m) BlockTiles<1>(op, m);
}

void DecodeE4m3(const uint8_t* codes, BFloat16* values, int64_t n) {
  const U16 d;
  const hn::Rebind<uint8_t, U16> d8;
  const auto low7 = hn::Set(d, 0x7F);
  const auto rebias = hn::Set(d, 120 << 7);
  // BF16 of 0..7 times 2^-9: what codes below 8 are.
  HWY_ALIGN static constexpr uint16_t kSubnormals[8] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
  const auto subnormals = hn::LoadDup128(d, kSubnormals);
  for (int64_t i = 0; i < n; i += int64_t(hn::Lanes(d))) {
    const auto code = hn::PromoteTo(d, hn::LoadU(d8, codes + i));
    const auto magnitude = hn::And(code, low7);
    const auto sign = hn::ShiftLeft<8>(hn::AndNot(low7, code));
    const auto normal = hn::Add(hn::ShiftLeft<4>(magnitude), rebias);
    // Bytes 2m and 2m + 1 of the table; what this gives for m >= 8 is not used.
    const auto bytes = hn::And(hn::Or(hn::ShiftLeft<1>(magnitude), hn::ShiftLeft<9>(magnitude)), hn::Set(d, 0x0E0E));
    const auto subnormal = hn::TableLookupBytes(subnormals, hn::Or(bytes, hn::Set(d, 0x0100)));
    auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 8)), subnormal, normal);
    value = hn::IfThenElse(hn::Eq(magnitude, low7), hn::Set(d, 0x7FC0), value);
    hn::StoreU(hn::Or(value, sign), d, &values[i].bits);
  }
}

const Bf16Ops& HighwayOps() {
  static const Bf16Ops ops{hwy::TargetName(HWY_TARGET), RowsDotKernel, BlockDotKernel, DecodeE4m3};
  return ops;
}

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dsacore::cpu {

HWY_EXPORT(HighwayOps);
const Bf16Ops& highway_ops() { return HWY_DYNAMIC_DISPATCH(HighwayOps)(); }

}  // namespace dsacore::cpu
#endif
