// How the keys of a page become the A operand of a warpgroup's products, one struct a format. The page lies in shared
// memory as in the cache. A thread holds its part of two keys, row r and row r + 8 of its warp's 16, in registers, so
// the page needs no swizzle. The order of the 128 dimensions inside a product is free: a thread has 32 that lie
// together, eight of them in each k-step, and the query is put into the same order.
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
  int quarter;  ///< which 32 of the dimensions: 8 * step ... + 7 of these are in k-step `step`

  __device__ explicit KeyPlace(int thread) : row(thread / 32 % 4 * 16 + thread % 32 / 4), quarter(thread % 4) {}
  /// The key whose score the thread ends up with.
  __device__ int scored() const { return row + 8 * (quarter & 1); }
};

/// In which of the 16-byte pieces of its line a head's dimensions 8 * eighth ... + 7 lie, four and four; they are word
/// `eighth / 4` there. The tile's swizzle is part of it.
struct QueryPieces {
  int first, second;

  __device__ QueryPieces(int eighth, int line)
      : first((2 * (eighth % 4)) ^ (line % 8)), second((2 * (eighth % 4) + 1) ^ (line % 8)) {}
};

/// Adds w_h * relu(query_h . key) of a tile's heads to the sums of the thread's two keys. x + |x| is twice relu(x), and
/// NaN where x is; with halves of the weights the products are the same. FADD's pipe is less in demand than FMNMX's.
template <int N>
__device__ __forceinline__ void add_heads(const float* dots, const float* half_weights, float (&sums)[2]) {
  for (int j = 0; j < N / 8; ++j) {
    const float2 weight = *reinterpret_cast<const float2*>(half_weights + 8 * j);
    for (int half = 0; half < 2; ++half) {
      const float x = dots[4 * j + 2 * half], y = dots[4 * j + 2 * half + 1];
      sums[half] = fmaf(weight.x, x + fabsf(x), sums[half]);
      sums[half] = fmaf(weight.y, y + fabsf(y), sums[half]);
    }
  }
}

/// Descriptor of a query tile; shared addresses are below 256 KB, so its high half is the same for all.
__device__ __forceinline__ uint64_t query_tile(uint32_t address) { return swizzled_tile(0) | address >> 4; }

/// Products of keys with the N heads of a tile of the B operand.
template <Operands Types, int N>
__device__ __forceinline__ void multiply_keys(const uint32_t (&fragments)[kSteps][4], uint32_t tile,
                                              float (&dots)[N / 2]) {
  wgmma_fence();
  for (int step = 0; step < kSteps; ++step) {
    WgmmaShape<Types, N>::registers(dots, fragments[step], query_tile(tile + uint32_t(32 * step)), step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

/// e4m3 keys with one FP32 scale.
struct Fp8Keys {
  using Layout = IndexFp8;

  uint32_t fragments[kSteps][4];
  float scale;

  __device__ __forceinline__ Fp8Keys(const std::byte* page, const KeyPlace& place, int) {
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
  template <int N>
  __device__ __forceinline__ void multiply(uint32_t tile, float (&dots)[N / 2]) const {
    multiply_keys<Operands::kE4m3, N>(fragments, tile, dots);
  }
  __device__ __forceinline__ void correct(uint32_t, int, const float*, const KeyPlace&, int, float (&)[2]) const {}
};

/// e2m1 keys with a power of two for every 32 dimensions, which are those of a thread. The eight magnitudes times the
/// scale are a table of eight bytes of e5m2, from which prmt takes four values by four codes: exact, and all dimensions
/// are one sum, as those of e4m3 keys. There are such tables for scales from 2^-15, the smallest that spec 6 writes, to
/// 2^11. Keys with another scale (NaN is one) are *far*: their sums are made anew, block by block, each scaled in FP32.
struct Mxfp4Keys {
  using Layout = IndexMxfp4;
  static constexpr uint32_t kFirst = 112, kLast = 138;  ///< codes of the scales with tables
  static_assert(Layout::kBlock * 4 == kIndexDim);

  const std::byte* page;
  uint32_t fragments[kSteps][4];
  float scale = 0.25f;   ///< a table has four times the values
  bool any_far = false;  ///< in the warp

  /// `tokens`: of the page and those after it. What lies beyond may be any bytes.
  __device__ __forceinline__ Mxfp4Keys(const std::byte* from, const KeyPlace& place, int tokens) : page(from) {
    bool is_far = false;
    for (int half = 0; half < 2; ++half) {
      const int row = place.row + 8 * half;
      const uint4 codes = *reinterpret_cast<const uint4*>(page + Layout::value_at(row) + 16 * place.quarter);
      const uint32_t scale_code = uint8_t(page[Layout::scale_at(row) + place.quarter]);
      const Table table(scale_code);
      table.widen(codes.x, fragments[0][half], fragments[0][2 + half]);
      table.widen(codes.y, fragments[1][half], fragments[1][2 + half]);
      table.widen(codes.z, fragments[2][half], fragments[2][2 + half]);
      table.widen(codes.w, fragments[3][half], fragments[3][2 + half]);
      is_far |= scale_code - kFirst > kLast - kFirst;
    }
    if (__any_sync(~0u, is_far)) {
      any_far = __any_sync(~0u, far(place.row, tokens) || far(place.row + 8, tokens));
      if (far(place.scored(), tokens)) scale = 4;
    }
  }
  template <int N>
  __device__ __forceinline__ void multiply(uint32_t tile, float (&dots)[N / 2]) const {
    multiply_keys<Operands::kE5m2E4m3, N>(fragments, tile, dots);
  }
  /// Puts the sums of far keys over the heads of a tile in their place: quarters of them, for twice the largest ones
  /// are no longer finite.
  __device__ __forceinline__ void correct(uint32_t tile, int heads, const float* weights, const KeyPlace& place,
                                          int tokens, float (&sums)[2]) const {
    if (!any_far) return;
    int line = int(threadIdx.x) % 32 / 4;
    asm volatile("" : "+r"(line));  // else places that follow from it are kept in registers from page to page
    const QueryPieces at(place.quarter, line);
    const auto* query = static_cast<const std::byte*>(__cvta_shared_to_generic(tile)) + line * kIndexDim;
    float far_sums[2] = {};
#pragma unroll 1
    for (int head = 0; head < heads; head += 8) {
      float dots[4] = {};
#pragma unroll 1
      for (int block = 0; block < Layout::kBlocks; ++block) {
        uint32_t a[4];
        float products[4] = {};
        for (int half = 0; half < 2; ++half) {
          const std::byte* bytes = page + Layout::value_at(place.row + 8 * half) + 16 * block + 4 * place.quarter;
          Table(kPlain).widen(*reinterpret_cast<const uint32_t*>(bytes), a[half], a[2 + half]);
        }
        mma_e5m2_e4m3(products, a, *reinterpret_cast<const uint32_t*>(query + 16 * at.first + 4 * block),
                      *reinterpret_cast<const uint32_t*>(query + 16 * at.second + 4 * block));
        for (int i = 0; i < 4; ++i) {
          const std::byte code = page[Layout::scale_at(place.row + 8 * (i / 2)) + block];
          dots[i] = fmaf(products[i], 0.25f * ue8m0_to_float(uint8_t(code)), dots[i]);
        }
      }
      add_heads<8>(dots, weights + head, far_sums);
      query += 8 * kIndexDim;
    }
    for (int half = 0; half < 2; ++half) {
      if (far(place.row + 8 * half, tokens)) sums[half] = far_sums[half];
    }
  }

 private:
  static constexpr uint32_t kPlain = 125;  ///< its table has the values as they are

  /// Of 0, .5, 1, 1.5 and of 2, 3, 4, 6, four times as large: bytes whose lowest exponent bit is 4.
  struct Table {
    uint32_t low, high;

    __device__ explicit Table(uint32_t code)
        : low(0x0A080400u + (code - kFirst) * 0x04040400u), high(0x12100E0Cu + (code - kFirst) * 0x04040404u) {}

    /// The values of codes 0 to 3 and 4 to 7.
    __device__ __forceinline__ void widen(uint32_t codes, uint32_t& first, uint32_t& second) const {
      const uint32_t magnitudes = codes & 0x77777777u, moved = codes << 4;  // signs of odd codes, of even ones
      first = permute_bytes(low, high, magnitudes) | (permute_bytes(codes, moved, 0x1504) & 0x80808080u);
      second = permute_bytes(low, high, magnitudes >> 16) | (permute_bytes(codes, moved, 0x3726) & 0x80808080u);
    }
  };

  __device__ bool far(int row, int tokens) const {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(page + Layout::scale_at(row));
    bool is_far = false;
    for (int block = 0; block < Layout::kBlocks; ++block) {
      is_far |= uint8_t(codes >> 8 * block) - kFirst > kLast - kFirst;
    }
    return is_far && row < tokens;
  }
};

}  // namespace dsacore::cuda
