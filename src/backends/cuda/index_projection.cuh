// What the kernels of the index projection share: how the inner products are split and added, how a head's 128 values
// become codes and a weight (step 7), and how an index key is made and inserted (step 8).
//
// The order of the sums of step 6 is one for all of them, so that they give the same bits: the columns are split into
// four parts of whole blocks of 128; wgmma adds a part in ascending order; then (0 + 1) + (2 + 3).
#pragma once

#include "backends/cuda/launch.h"
#include "backends/cuda/norm.cuh"
#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "format/layouts.h"
#include "format/paging.h"

namespace dsacore::cuda {

inline constexpr int kParts = 4;          ///< of the columns of W_IQ
inline constexpr int kChunkColumns = 64;  ///< columns of a tile in shared memory: rows of 128 bytes, swizzled
inline constexpr int kBlockChunks = kNormBlock / kChunkColumns;
inline constexpr int kChunkBytes = kChunkColumns * int(sizeof(BFloat16));  ///< of a row
inline constexpr int kValuesPerLane = kIndexDim / 32;

/// A part of the columns, in blocks of 128.
struct Part {
  int first;
  int blocks;
};
DSACORE_HD constexpr Part part_of(int part, int row_blocks) {
  const int first = part * row_blocks / kParts;
  return {first, (part + 1) * row_blocks / kParts - first};
}

/// The largest of the lanes' values, all of them >= 0 and not NaN, among `Lanes` neighbours.
template <int Lanes>
__device__ __forceinline__ float largest_of_lanes(float value) {
  if constexpr (Lanes == 32) {
    return float_of(__reduce_max_sync(0xFFFFFFFF, bits_of(value)));
  } else {
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, step));
    return value;
  }
}

/// The largest magnitude of a lane's values; NaNs do not count.
__device__ __forceinline__ float largest_magnitude(const float (&values)[kValuesPerLane]) {
  float largest = 0;
#pragma unroll
  for (const float value : values) largest = fmaxf(largest, magnitude(value));
  return largest;
}

/// Four values as e4m3 by a power-of-two scale: the product with its inverse is the quotient, exactly.
__device__ __forceinline__ uint32_t scaled_codes(const float (&values)[kValuesPerLane], uint8_t scale_code) {
  const float inverse = ue8m0_to_float(uint8_t(254 - scale_code));
  return pack_e4m3(values[0] * inverse, values[1] * inverse) | pack_e4m3(values[2] * inverse, values[3] * inverse)
                                                                   << 16;
}

/// Four values of two BF16 pairs.
struct FourValues {
  float values[kValuesPerLane];

  __device__ __forceinline__ explicit FourValues(uint2 pairs)
      : values{low_bf16(pairs.x), high_bf16(pairs.x), low_bf16(pairs.y), high_bf16(pairs.y)} {}
  __device__ __forceinline__ float largest() const { return largest_magnitude(values); }
};

/// Step 7 of one head: its scale, by the largest magnitude of its values.
struct HeadScale {
  uint8_t code;

  __device__ __forceinline__ explicit HeadScale(float largest)
      : code(ue8m0_ceil(fmaxf(largest, 1e-10f) * (1.0f / kE4m3Max))) {}  // of every BF16 as of the quotient
  __device__ __forceinline__ uint32_t codes(const FourValues& four) const { return scaled_codes(four.values, code); }
};

/// Step 7: where the codes and weights of the heads go.
struct HeadOutput {
  View<const BFloat16, 2> projected;
  int64_t wv_at;
  View<uint8_t, 3> index_query;
  View<float, 2> head_weights;
  float softmax_scale, head_scale;

  __device__ __forceinline__ BFloat16 wv(int64_t row, int head) const { return projected(row, wv_at + head); }
  __device__ __forceinline__ void write_weight(int64_t row, int head, BFloat16 wv, HeadScale scale) const {
    head_weights(row, head) = to_float(wv) * ue8m0_to_float(scale.code) * softmax_scale * head_scale;
  }
};

/// Step 8.
struct KeyInsert {
  View<const BFloat16, 2> projected;
  int64_t wk_at;
  View<const int64_t, 1> slots;
  View<const float, 1> weight, bias;
  float eps;
  IndexCache index;

  /// What a lane needs of the norm's constants: of values 4 l .. 4 l + 3.
  struct Norm {
    float weight[kValuesPerLane], bias[kValuesPerLane];
  };
  __device__ __forceinline__ Norm norm(int lane) const {
    Norm n;
#pragma unroll
    for (int i = 0; i < kValuesPerLane; ++i) {
      n.weight[i] = weight(lane * kValuesPerLane + i);
      n.bias[i] = bias(lane * kValuesPerLane + i);
    }
    return n;
  }

  /// Makes and inserts the key of one row by one warp; a negative slot writes nothing.
  __device__ __forceinline__ void insert(int64_t row, const Norm& norm, int lane) const {
    const Slot slot(slots(row));
    const BFloat16* wk = projected.row(row) + wk_at + lane * kValuesPerLane;
    float key[kValuesPerLane];
#pragma unroll
    for (int i = 0; i < kValuesPerLane; ++i) key[i] = to_float(wk[i]);
    if (slot.value() < 0) return;
    normalise(norm, key);
    const Place place = place_of(slot, kIndexPage);
    std::byte* page = index.data + int64_t(place.page.value()) * kIndexPage * index.row_bytes;
    index.format == IndexFormat::kFp8 ? write_fp8(key, place.offset, lane, page)
                                      : write_mxfp4(key, place.offset, lane, page);
  }

 private:
  static __device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
    return value;
  }

  /// LayerNorm of wk, rounded to BF16.
  __device__ __forceinline__ void normalise(const Norm& norm, float (&key)[kValuesPerLane]) const {
    const float mean = sum_of_lanes((key[0] + key[1]) + (key[2] + key[3])) / kIndexDim;
    float squares = 0;
#pragma unroll
    for (float& value : key) {
      value -= mean;
      squares = fmaf(value, value, squares);
    }
    const float variance = sum_of_lanes(squares) / kIndexDim;
    const float factor = __frcp_rn(__fsqrt_rn(variance + eps));
#pragma unroll
    for (int i = 0; i < kValuesPerLane; ++i) {
      key[i] = low_bf16(pack_bf16(key[i] * factor * norm.weight[i] + norm.bias[i], 0));
    }
  }

  static __device__ __forceinline__ void write_fp8(const float (&key)[kValuesPerLane], int token, int lane,
                                                   std::byte* page) {
    const uint8_t scale_code = IndexFp8::scale_code_of(largest_of_lanes<32>(largest_magnitude(key)));
    reinterpret_cast<uint32_t*>(page + IndexFp8::value_at(token))[lane] = scaled_codes(key, scale_code);
    if (lane == 0) *reinterpret_cast<float*>(page + IndexFp8::scale_at(token)) = ue8m0_to_float(scale_code);
  }

  static __device__ __forceinline__ void write_mxfp4(const float (&key)[kValuesPerLane], int token, int lane,
                                                     std::byte* page) {
    constexpr int kLanes = IndexMxfp4::kBlock / kValuesPerLane;
    const uint8_t scale_code = IndexMxfp4::scale_code_of(largest_of_lanes<kLanes>(largest_magnitude(key)));
    const float inverse = ue8m0_to_float(uint8_t(254 - scale_code));  // exact, as in scaled_codes
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < kValuesPerLane; ++i) codes |= uint32_t(to_e2m1(key[i] * inverse)) << 4 * i;
    reinterpret_cast<uint16_t*>(page + IndexMxfp4::value_at(token))[lane] = uint16_t(codes);
    if (lane % kLanes == 0) page[IndexMxfp4::scale_at(token) + lane / kLanes] = std::byte(scale_code);
  }
};

inline HeadOutput head_output(const IndexProjectionArgs& args) {
  const LayerModel& model = *args.model;
  return {args.projected,
          model.sizes.wv_at(),
          args.index_query,
          args.head_weights,
          float(model.config.index_softmax_scale),
          float(model.config.index_head_scale)};
}
inline KeyInsert key_insert(const IndexProjectionArgs& args) {
  const LayerModel& model = *args.model;
  return {args.projected,    model.sizes.wk_at(),     args.index_slots, model.k_norm_weight,
          model.k_norm_bias, float(model.config.eps), args.index};
}

/// `d += weights . activations` over one chunk of columns: four k-steps of wgmma, committed as one group.
template <int Tokens>
__device__ __forceinline__ void multiply_chunk(float (&d)[Tokens / 2], uint32_t weights, uint32_t activations,
                                               bool accumulate) {
  const uint64_t a = swizzled_tile(weights), b = swizzled_tile(activations);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kChunkColumns / 16; ++step) {
    WgmmaShape<Operands::kBf16, Tokens>::shared(d, a + uint64_t(2 * step), b + uint64_t(2 * step),
                                                int(accumulate || step > 0));
  }
  wgmma_commit();
}

}  // namespace dsacore::cuda
