// What the value and gate kernels share: which rows are live, pairs of columns, weights ahead of the wait, the gate.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/cache_policy.cuh"
#include "backends/cuda/ptx/convert.cuh"
#include "dsacore/problem.h"
#include "format/numeric.h"

namespace dsacore::cuda {

/// Two neighbouring BF16 values as one word; the first is the low half.
struct Bf16Pair {
  uint32_t bits;

  __device__ __forceinline__ BFloat16 first() const { return {uint16_t(bits)}; }
  __device__ __forceinline__ BFloat16 second() const { return {uint16_t(bits >> 16)}; }
};
__device__ __forceinline__ Bf16Pair make_pair(BFloat16 first, BFloat16 second) {
  return {first.bits | uint32_t(second.bits) << 16};
}

/// Two FP32 values, each rounded to nearest even by the hardware; as to_bf16, but for the bits of a NaN.
__device__ __forceinline__ Bf16Pair round_pair(float first, float second) { return {pack_bf16(first, second)}; }

/// Whether every pair that starts at an even column lies on a word: the gate is a part of the packed projection row,
/// whose pitch and parts may be odd, and the caller's `out` may begin anywhere.
template <class T>
bool has_aligned_pairs(const View<T, 2>& v) {
  return reinterpret_cast<uintptr_t>(v.data()) % sizeof(Bf16Pair) == 0 && v.stride(0) % 2 == 0;
}
__device__ __forceinline__ Bf16Pair load_pair(const BFloat16* from, bool aligned) {
  return aligned ? Bf16Pair{*reinterpret_cast<const uint32_t*>(from)} : make_pair(from[0], from[1]);
}
__device__ __forceinline__ void store_pair(BFloat16* to, Bf16Pair pair, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint32_t*>(to) = pair.bits;
  } else {
    to[0] = pair.first();
    to[1] = pair.second();
  }
}

/// 16 bytes of weights, loaded before the wait. By a load that the assembler keeps there: it takes one through the
/// read-only path (ld.global.nc, __ldg) for free to move, and moves the wait ahead of it.
__device__ __forceinline__ uint4 load_weights(const BFloat16* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at), "l"(read_once())
               : "memory");
  return v;
}

/// Which rows belong to a request that has a length; the others give zeros, whatever their inputs hold.
struct LiveRows {
  View<const int32_t, 1> seq_lens;  ///< [requests], or empty: every row is live
  uint32_t inverse_q;               ///< ceil(2^16 / q): `row * inverse_q >> 16` is `row / q` for all rows of a batch

  __device__ __forceinline__ bool operator()(int row) const {
    if (seq_lens.empty()) return true;
    const uint32_t request = uint32_t(row) * inverse_q >> 16;
    return request < uint32_t(seq_lens.extent(0)) && seq_lens(request) > 0;
  }
};
inline LiveRows live_rows(View<const int32_t, 1> seq_lens, int q) {
  return {seq_lens, (0x10000u + uint32_t(q) - 1) / uint32_t(q)};
}
static_assert(kMaxRows * kMaxQ < 0x10000, "the inverse of q is exact");

/// 1 / (1 + exp(-x)) to an FP32 unit or two; by exp(-|x|), which cannot overflow. NaN gives NaN.
__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  const float sum = 1.0f + e;  // 1..2: an estimate and one step of Newton's, without special cases
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(sum));
  const float inverse = fmaf(estimate, fmaf(-sum, estimate, 1.0f), estimate);
  return x < 0.0f ? e * inverse : inverse;
}

/// (v * sigmoid(gate)) ->bf16
__device__ __forceinline__ Bf16Pair gated(Bf16Pair v, Bf16Pair gate) {
  return round_pair(to_float(v.first()) * sigmoid(to_float(gate.first())),
                    to_float(v.second()) * sigmoid(to_float(gate.second())));
}

}  // namespace dsacore::cuda
