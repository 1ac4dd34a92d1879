// How the keys of a page become the A operand of a warpgroup's products, one struct a format. The page lies in shared
// memory as in the cache. A thread holds its part of two keys, row r and row r + 8 of its warp's 16, in registers, so
// the page needs no swizzle. The order of the 128 dimensions inside a product is free: it is chosen so that a thread's
// bytes lie together, and `place_query` puts the query's into the same order.
#pragma once

#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "format/index_fp8.h"
#include "format/index_mxfp4.h"

namespace dsacore::cuda {

inline constexpr int kSteps = kIndexDim / 32;  ///< k-steps of an FP8 product

/// Where a thread stands in the 64 keys of a page.
struct KeyPlace {
  int row;      ///< first of its two keys; the other is `row + 8`
  int quarter;  ///< which 8 of the 32 dimensions of a k-step

  __device__ explicit KeyPlace(int thread) : row(thread / 32 % 4 * 16 + thread % 32 / 4), quarter(thread % 4) {}
  /// The key whose score the thread ends up with.
  __device__ int scored() const { return row + 8 * (quarter & 1); }
};

/// Two words of a query's 8 bytes, and the k-step and quarter that they belong to. They are words 8 * step + quarter
/// and 4 after that of the query's line in the B operand.
struct QueryPart {
  int step, quarter;
  uint32_t first, second;
};

/// Descriptor of a query tile; shared addresses are below 256 KB, so its high half is the same for all.
__device__ __forceinline__ uint64_t query_tile(uint32_t address) { return swizzled_tile(0) | address >> 4; }

/// e4m3 keys with one FP32 scale: 128 bytes are one sum. A thread's dimensions are bytes 32 * quarter ... + 31.
struct Fp8Keys {
  using Layout = IndexFp8;
  static constexpr int kTilesAtOnce = 2;

  uint32_t fragments[kSteps][4];
  float scale;

  __device__ __forceinline__ void load(const std::byte* page, const KeyPlace& place) {
    for (int half = 0; half < 2; ++half) {
      const std::byte* bytes = page + Layout::value_at(place.row + 8 * half) + 32 * place.quarter;
      const uint4 low = *reinterpret_cast<const uint4*>(bytes);
      const uint4 high = *reinterpret_cast<const uint4*>(bytes + 16);
      fragments[0][half] = low.x, fragments[0][2 + half] = low.y;
      fragments[1][half] = low.z, fragments[1][2 + half] = low.w;
      fragments[2][half] = high.x, fragments[2][2 + half] = high.y;
      fragments[3][half] = high.z, fragments[3][2 + half] = high.w;
    }
    scale = *reinterpret_cast<const float*>(page + Layout::scale_at(place.scored()));
  }
  /// Products with the N heads of a tile of the B operand.
  template <int N>
  __device__ __forceinline__ void multiply(uint32_t tile, float (&dots)[N / 2]) const {
    wgmma_fence();
    for (int step = 0; step < kSteps; ++step) {
      WgmmaShape<Operands::kE4m3, N>::registers(dots, fragments[step], query_tile(tile + uint32_t(32 * step)),
                                                step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
  __device__ __forceinline__ float score(float sum) const { return sum * scale; }

  static __device__ __forceinline__ QueryPart place_query(int eighth, uint2 bytes) {
    return {eighth % 4, eighth / 4, bytes.x, bytes.y};
  }
};

/// e2m1 keys with a power of two for every 32 dimensions: a k-step is a block, summed alone and multiplied by its scale
/// in FP32, so that scales of any distance are exact. A thread's dimensions in each block are 8 * quarter ... + 7: the
/// even ones, then the odd ones.
/// A scale of 2^-127 (byte 0, which no writer of spec 6 makes) counts as zero.
struct Mxfp4Keys {
  using Layout = IndexMxfp4;
  static constexpr int kTilesAtOnce = 1;
  static_assert(Layout::kBlocks == kSteps);

  uint32_t fragments[kSteps][4];
  float scales[2][kSteps];

  __device__ __forceinline__ void load(const std::byte* page, const KeyPlace& place) {
    for (int half = 0; half < 2; ++half) {
      const int row = place.row + 8 * half;
      const uint32_t codes = *reinterpret_cast<const uint32_t*>(page + Layout::scale_at(row));
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t nibbles =
            *reinterpret_cast<const uint32_t*>(page + Layout::value_at(row) + 16 * step + 4 * place.quarter);
        fragments[step][half] = (nibbles << 4 & 0x80808080u) | (nibbles << 2 & 0x1C1C1C1Cu);
        fragments[step][2 + half] = (nibbles & 0x80808080u) | (nibbles >> 2 & 0x1C1C1C1Cu);
        scales[half][step] = float_of((step < 3 ? codes << (23 - 8 * step) : codes >> 1) & 0x7F800000u);
      }
      // A scale of 255 is NaN and makes the score NaN whatever the rest is.
      if (((~codes - 0x01010101u) & codes & 0x80808080u) != 0) scales[half][0] = float_of(0x7FC00000u);
    }
  }
  /// Products with the N heads of a tile of the B operand: one block is multiplied while another is scaled.
  template <int N>
  __device__ __forceinline__ void multiply(uint32_t tile, float (&dots)[N / 2]) const {
    float sums[2][N / 2];
    multiply_block<N>(tile, 0, sums[0]);
    multiply_block<N>(tile, 1, sums[1]);
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      for (int i = 0; i < N / 2; ++i) {
        const float scale = scales[i / 2 % 2][step];
        dots[i] = step == 0 ? sums[0][i] * scale : fmaf(sums[step % 2][i], scale, dots[i]);
      }
      if (step + 2 < kSteps) multiply_block<N>(tile, step + 2, sums[step % 2]);
    }
  }
  /// An e2m1 code with its magnitude moved up two bits, as e4m3, is 2^-6 of its value, subnormal ones too.
  __device__ __forceinline__ float score(float sum) const { return sum * 64.0f; }

  static __device__ __forceinline__ QueryPart place_query(int eighth, uint2 bytes) {
    return {eighth / 4, eighth % 4, permute_bytes(bytes.x, bytes.y, 0x6420), permute_bytes(bytes.x, bytes.y, 0x7531)};
  }

 private:
  template <int N>
  __device__ __forceinline__ void multiply_block(uint32_t tile, int step, float (&sums)[N / 2]) const {
    wgmma_fence();
    WgmmaShape<Operands::kE4m3, N>::registers(sums, fragments[step], query_tile(tile + uint32_t(32 * step)), 0);
    wgmma_commit();
  }
};

}  // namespace dsacore::cuda
