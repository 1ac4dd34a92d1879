// What the value and gate kernels share: which rows are live, pairs of columns, the gate.
#pragma once

#include <cstdint>

#include "dsacore/view.h"
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

/// Which rows belong to a request that has a length; the others give zeros, whatever their inputs hold.
struct LiveRows {
  View<const int32_t, 1> seq_lens;  ///< [requests], or empty: every row is live
  int q;

  __device__ __forceinline__ bool operator()(int row) const {
    if (seq_lens.empty()) return true;
    const int request = row / q;
    return request < int(seq_lens.extent(0)) && seq_lens(request) > 0;
  }
};

/// (v * sigmoid(gate)) ->bf16; by exp(-|gate|), which cannot overflow. A NaN gate gives NaN.
__device__ __forceinline__ BFloat16 gated(BFloat16 v, BFloat16 gate) {
  const float g = to_float(gate);
  const float e = expf(-fabsf(g));
  const float sigmoid = __fdiv_rn(g < 0.0f ? e : 1.0f, 1.0f + e);
  return to_bf16(to_float(v) * sigmoid);
}
__device__ __forceinline__ Bf16Pair gated(Bf16Pair v, Bf16Pair gate) {
  return make_pair(gated(v.first(), gate.first()), gated(v.second(), gate.second()));
}

}  // namespace dsacore::cuda
