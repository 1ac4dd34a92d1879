// One row of the query stage by one warp: step 1, and step 5 with the cache formats of spec 6.
#pragma once

#include "backends/cuda/norm.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/query.h"
#include "format/layouts.h"
#include "format/paging.h"

namespace dsacore::cuda::query {

inline constexpr int kLaneValues = 8;                 ///< values of a lane: 16 bytes of BF16
inline constexpr int kWarpValues = 32 * kLaneValues;  ///< of a warp, two blocks of the norm
inline constexpr uint32_t kAllLanes = 0xFFFFFFFF;

/// A row of up to `Steps * 256` values in a warp: `values[i]` of lane l begins at value 256 i + 8 l.
template <int Steps>
struct WarpRow {
  uint4 values[Steps];

  __device__ __forceinline__ static int first_value(int step, int lane) {
    return step * kWarpValues + lane * kLaneValues;
  }

  __device__ __forceinline__ void load(const BFloat16* from, int n, bool aligned16, int lane) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
      const int at = first_value(i, lane);
      values[i] = at < n ? load_bf16x8(from + at, aligned16) : uint4{};
    }
  }

  /// RMS norm in place (norm.cuh).
  __device__ __forceinline__ void normalise(const WarpRow& weights, int n, float eps) {
    const int blocks = n / kNormBlock;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
      const float block = block_sum(sum_of_squares(values[i]));
      const float even = __shfl_sync(kAllLanes, block, 0);
      const float odd = __shfl_sync(kAllLanes, block, 16);
      if (2 * i < blocks) sum += even;
      if (2 * i + 1 < blocks) sum += odd;
    }
    const float factor = norm_factor(sum, blocks, eps);
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
      values[i] = normalised(values[i], factor, weights.values[i]);
    }
  }
};

__device__ __forceinline__ float largest_magnitude(const uint4& v) {
  const auto pair = [](uint32_t x) { return fmaxf(magnitude(low_bf16(x)), magnitude(high_bf16(x))); };
  return fmaxf(fmaxf(pair(v.x), pair(v.y)), fmaxf(pair(v.z), pair(v.w)));
}
/// The largest over groups of `Lanes` neighbouring lanes.
template <int Lanes>
__device__ __forceinline__ float largest_of_lanes(float x) {
#pragma unroll
  for (int step = 1; step < Lanes; step *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// Each writes eight neighbouring latent values, `at` the first of them, or two pe values of lane `lane`. All lanes of
// the warp call it together.

__device__ __forceinline__ void encode_latent(KvFp8DsMla, const uint4& c, int at, int lane, float, std::byte* row) {
  using L = KvFp8DsMla;
  constexpr int kTileLanes = L::kTile / kLaneValues;
  const float scale = L::scale_for(largest_of_lanes<kTileLanes>(largest_magnitude(c)));
  // A power of two from 2^-13 up: its inverse is exact and so is the product.
  *reinterpret_cast<uint2*>(row + L::kValuesAt + at) = scaled_e4m3(c, __fdiv_rn(1.0f, scale));
  if (lane % kTileLanes == 0) reinterpret_cast<float*>(row + L::kScalesAt)[at / L::kTile] = scale;
}
__device__ __forceinline__ void encode_pe(KvFp8DsMla, uint32_t pair, int lane, float, std::byte* row) {
  reinterpret_cast<uint32_t*>(row + KvFp8DsMla::kPeAt)[lane] = pair;
}

__device__ __forceinline__ void encode_latent(KvFp8, const uint4& c, int at, int, float k_scale_inv, std::byte* row) {
  *reinterpret_cast<uint2*>(row + KvFp8::kValuesAt + at) = scaled_e4m3(c, k_scale_inv);
}
__device__ __forceinline__ void encode_pe(KvFp8, uint32_t pair, int lane, float k_scale_inv, std::byte* row) {
  reinterpret_cast<uint16_t*>(row + KvFp8::kPeAt)[lane] =
      uint16_t(pack_e4m3(low_bf16(pair) * k_scale_inv, high_bf16(pair) * k_scale_inv));
}

__device__ __forceinline__ void encode_latent(KvNvfp4DsMla, const uint4& c, int at, int lane, float, std::byte* row) {
  using L = KvNvfp4DsMla;
  constexpr int kBlockLanes = L::kBlock / kLaneValues;
  const uint8_t code = L::scale_code_for(largest_of_lanes<kBlockLanes>(largest_magnitude(c)));
  const float scale = e4m3_to_float(code);
  const auto pair = [scale](uint32_t v) {
    return uint32_t(to_e2m1(__fdiv_rn(low_bf16(v), scale))) | uint32_t(to_e2m1(__fdiv_rn(high_bf16(v), scale))) << 4;
  };
  *reinterpret_cast<uint32_t*>(row + L::kValuesAt + at / 2) =
      pair(c.x) | pair(c.y) << 8 | pair(c.z) << 16 | pair(c.w) << 24;
  if (lane % kBlockLanes == 0) row[L::scale_at(at / L::kBlock)] = std::byte(code);
}
__device__ __forceinline__ void encode_pe(KvNvfp4DsMla, uint32_t pair, int lane, float, std::byte* row) {
  reinterpret_cast<uint16_t*>(row + KvNvfp4DsMla::kPeAt)[lane] = uint16_t(pack_e4m3(low_bf16(pair), high_bf16(pair)));
}

using LatentRow = WarpRow<kLatent / kWarpValues>;

/// Step 5 of one row; `weights` are kv_norm's.
__device__ __forceinline__ void insert_row(const Parameters& p, const LatentRow& weights, int row, int lane) {
  const Slot slot(__ldcg(&p.slots(row)));
  if (slot.value() < 0) return;
  const BFloat16* kv_a = p.projected.row(row) + p.kv_a_at;
  LatentRow c;
  c.load(kv_a, kLatent, p.aligned_rows, lane);  // kv_a_at is a multiple of 128
  const auto* pe = reinterpret_cast<const uint16_t*>(kv_a + kLatent + 2 * lane);
  const uint32_t pe_pair = uint32_t(__ldcg(pe)) | uint32_t(__ldcg(pe + 1)) << 16;
  c.normalise(weights, kLatent, p.eps);
  std::byte* to = row_at(p.kv, physical_row(place_of(slot, p.kv.page), p.kv.stride_rows));
  const auto encode = [&](auto layout) {
#pragma unroll
    for (int i = 0; i < kLatent / kWarpValues; ++i) {
      encode_latent(layout, c.values[i], c.first_value(i, lane), lane, p.k_scale_inv, to);
    }
    encode_pe(layout, pe_pair, lane, p.k_scale_inv, to);
  };
  switch (p.kv.format) {
    case KvFormat::kFp8DsMla: return encode(KvFp8DsMla{});
    case KvFormat::kFp8: return encode(KvFp8{});
    case KvFormat::kNvfp4DsMla: return encode(KvNvfp4DsMla{});
  }
}

/// The CTAs from `first_cta` on: a warp inserts a row.
__device__ __forceinline__ void insert_rows(const Parameters& p, int first_cta) {
  LatentRow weights;
  const int lane = int(threadIdx.x) % 32;
  weights.load(p.kv_norm.data(), kLatent, true, lane);
  if (!p.beside) wait_for_earlier_kernels();
  let_next_kernel_start();
  const int row = int((blockIdx.x - unsigned(first_cta)) * blockDim.x + threadIdx.x) / 32;
  if (row < p.rows) insert_row(p, weights, row, lane);
}

}  // namespace dsacore::cuda::query
