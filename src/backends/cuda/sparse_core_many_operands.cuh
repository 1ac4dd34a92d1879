// Sparse core for many heads: raw cache rows in shared memory -> FP16 fragments of A operands (64 x 16, wgmma), and the
// query as B operand.
//
// Keys for S^T = K Q^T: M = keys. The byte order inside a k-step of 16 dims is a permutation of K that costs nothing
// where the query is stored in the same order. Values for O^T = V^T P^T: M = latents, read by transposing loads of
// 16-bit units, 2 (e4m3) or 4 (e2m1) latents a unit; which latent a row of M is, `latent_of` says.
//
// A CTA's rows lie in slots of 16. Fragments are made in pairs: `fetch` loads the raw words of a pair, kPairsAhead
// before `make` turns them into the fragments of its two products.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "format/layouts.h"

namespace dsacore::cuda::many {

inline constexpr int kSlotKeys = 16;     ///< of a warp that scores them
inline constexpr int kLatentPairs = 16;  ///< pairs of products of the latents of keys; two more are of their pe
inline constexpr int kKeyPairs = kLatentPairs + 2;
inline constexpr int kValuePairs = 8;  ///< of the 256 latents of a warpgroup and 64 keys
inline constexpr int kPairsAhead = 2;

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ uint32_t load_half(uint32_t address) {
  uint16_t r;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(r) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ uint2 load_words2(uint32_t address) {
  uint2 r;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ uint4 load_words4(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}
__device__ __forceinline__ void store_half(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(uint16_t(value)) : "memory");
}
__device__ __forceinline__ void store_word(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_words4(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

/// A warp's place: `warp` of the four of its warpgroup.
struct Lane {
  int warp, lane;
  __device__ __forceinline__ int row() const { return lane / 4; }     ///< of 8, in a fragment
  __device__ __forceinline__ int column() const { return lane % 4; }  ///< of 4
};

// ---- tables: what a helper warp makes of the scales of a slot ----

/// FP16 factors of the keys of a slot by block of latents: [block][key % 8 / 2][key / 8][key % 2], so that a lane takes
/// the factors of its keys with one load.
inline constexpr int kFactorBytes = 2 * kSlotKeys;  ///< of a block
__device__ __forceinline__ constexpr uint32_t factor_at(int block, int key) {
  return uint32_t(block * kFactorBytes + key % 8 / 2 * 8 + key / 8 * 4 + key % 2 * 2);
}

/// Both halves of a word are the factor of one key.
__device__ __forceinline__ uint32_t load_factor(uint32_t table, int block, int key) {
  const uint32_t half = load_half(table + factor_at(block, key));
  return half | half << 16;
}

// ---- e4m3 latents: fp8_ds_mla and fp8 ----

/// Two k-steps of 16 bytes from `address`, this lane's row of the warp's 16 keys: rows 0-7 and 8-15 of bytes 0-15, and
/// of bytes 16-31.
__device__ __forceinline__ void make_byte_keys(const uint32_t (&raw)[4], int product, uint32_t (&a)[4]) {
  a[0] = low_e4m3_to_f16(raw[2 * product]);
  a[1] = low_e4m3_to_f16(raw[2 * product + 1]);
  a[2] = high_e4m3_to_f16(raw[2 * product]);
  a[3] = high_e4m3_to_f16(raw[2 * product + 1]);
}

/// 16 latents of this warp of 32 keys: 8 keys a word, two keys by two latents a lane.
__device__ __forceinline__ void make_byte_values(const uint32_t (&raw)[4], int product, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t word = permute_bytes(raw[2 * product + i], 0, 0x3120);
    a[2 * i] = low_e4m3_to_f16(word);
    a[2 * i + 1] = high_e4m3_to_f16(word);
  }
}

/// Address of this lane's row among a slot's keys for load_matrices, and of its value's row among those of two slots
/// for load_matrices_transposed.
__device__ __forceinline__ uint32_t key_row_address(uint32_t slot, int pitch, Lane lane) {
  return slot + uint32_t(lane.lane % 16 * pitch + lane.lane / 16 * 16);
}
__device__ __forceinline__ uint32_t value_row_address(const uint32_t* slots, int pitch, Lane lane) {
  return (lane.lane < 16 ? slots[0] : slots[1]) + uint32_t(lane.lane % 16 * pitch + 16 * lane.warp);
}

/// What fp8_ds_mla and fp8 share.
struct ByteOperands {
  static constexpr bool kPairedValueBlocks = false;
  /// Latent of row 8 i + r of M block `block` (of the warpgroup's 4), relative to the warpgroup's first.
  static __device__ __forceinline__ int latent_of(int block, Lane lane, int i) {
    return 64 * block + 16 * lane.warp + 2 * lane.row() + i;
  }
  /// M block of a pair's products. The first half of the pairs are of the first two slots of a tile.
  static __device__ __forceinline__ constexpr int value_block(int pair) { return pair % 4; }

  /// 16 dims of a query, as FP16 pairs of neighbours, in the order of make_byte_keys. `row` is the head's row in the B
  /// tile of 64 dims, `swizzle` its xor.
  static __device__ __forceinline__ void store_query(uint32_t row, uint32_t swizzle, int unit,
                                                     const uint32_t (&pairs)[8]) {
    const uint32_t chunk = uint32_t(unit % 4 * 32);
    store_words4(row + (chunk ^ swizzle), {pairs[0], pairs[2], pairs[4], pairs[6]});
    store_words4(row + ((chunk + 16) ^ swizzle), {pairs[1], pairs[3], pairs[5], pairs[7]});
  }
};

template <class Layout>
struct RowOperands;

template <>
struct RowOperands<KvFp8> : ByteOperands {
  static constexpr int kPitch = KvFp8::kRowBytes + 16;  ///< in shared memory; 592 meets no bank twice
  static constexpr int kTableBytes = 0;
  static constexpr bool kScaledKeys = false;  ///< keys have powers of two of their own
  static constexpr bool kPlainPe = false;     ///< pe is BF16, and added once latents are in units of logits
  static constexpr float kPeUnit = 1;         ///< of the query's pe against its latents

  struct Keys {
    uint32_t address;
    __device__ __forceinline__ Keys(uint32_t slot, uint32_t, Lane lane)
        : address(key_row_address(slot, kPitch, lane)) {}
    uint32_t raw[kPairsAhead][4];
    __device__ __forceinline__ void fetch(int pair) { load_matrices(raw[pair % kPairsAhead], address + 32 * pair); }
    __device__ __forceinline__ void make(int pair, int product, uint32_t (&a)[4]) const {
      make_byte_keys(raw[pair % kPairsAhead], product, a);
    }
  };

  struct Values {
    uint32_t address[2];
    __device__ __forceinline__ Values(const uint32_t (&slots)[4], const uint32_t (&)[4], int group, Lane lane) {
      for (int i = 0; i < 2; ++i) address[i] = value_row_address(slots + 2 * i, kPitch, lane) + uint32_t(256 * group);
    }
    uint32_t raw[kPairsAhead][4];
    __device__ __forceinline__ void fetch(int pair) {
      load_matrices_transposed(raw[pair % kPairsAhead], address[pair / 4] + pair % 4 * 64);
    }
    __device__ __forceinline__ void make(int pair, int product, uint32_t (&a)[4]) const {
      make_byte_values(raw[pair % kPairsAhead], product, a);
    }
  };

  static __device__ __forceinline__ void make_table(uint32_t, uint32_t, int) {}
};

/// A key's values are kept times 2^-exponent, its largest scale between 2^5 and 2^6, so that 448 times it fits FP16.
/// Exact where scales are powers of two not more than 2^20 apart in a key; else factors and values have FP16's 11 bits.
template <>
struct RowOperands<KvFp8DsMla> : ByteOperands {
  static constexpr int kPitch = KvFp8DsMla::kRowBytes;  // 656 meets no bank twice
  static constexpr int kUnitsAt = KvFp8DsMla::kTiles * kFactorBytes;
  static constexpr int kTableBytes = kUnitsAt + kSlotKeys * int(sizeof(float));
  static constexpr bool kScaledKeys = true;
  static constexpr bool kPlainPe = true;
  static constexpr float kPeUnit = 1;

  struct Keys {
    uint32_t address, table;
    int key;
    __device__ __forceinline__ Keys(uint32_t slot, uint32_t table, Lane lane)
        : address(key_row_address(slot, kPitch, lane)), table(table), key(lane.row()) {}
    uint32_t raw[kPairsAhead][4], factors[2];
    __device__ __forceinline__ void fetch(int pair) {
      if (pair < kLatentPairs) load_matrices(raw[pair % kPairsAhead], address + 32 * pair);
    }
    __device__ __forceinline__ void make(int pair, int product, uint32_t (&a)[4]) {
      if (pair >= kLatentPairs) {  // BF16, in its own order
        return load_matrices(a, address + KvFp8DsMla::kPeAt + 64 * (pair - kLatentPairs) + 32 * product);
      }
      if (pair % 4 == 0 && product == 0) {
        for (int i = 0; i < 2; ++i) factors[i] = load_factor(table, pair / 4, key + 8 * i);
      }
      make_byte_keys(raw[pair % kPairsAhead], product, a);
      for (int i = 0; i < 4; ++i) a[i] = multiply_f16(a[i], factors[i % 2]);
    }
  };

  struct Values {
    uint32_t address[2], table[4];
    __device__ __forceinline__ Values(const uint32_t (&slots)[4], const uint32_t (&tables)[4], int group, Lane lane) {
      for (int i = 0; i < 2; ++i) address[i] = value_row_address(slots + 2 * i, kPitch, lane) + uint32_t(256 * group);
      for (int i = 0; i < 4; ++i) table[i] = tables[i] + factor_at(2 * group, 2 * lane.column());
    }
    uint32_t raw[kPairsAhead][4];
    __device__ __forceinline__ void fetch(int pair) {
      load_matrices_transposed(raw[pair % kPairsAhead], address[pair / 4] + pair % 4 * 64);
    }
    __device__ __forceinline__ void make(int pair, int product, uint32_t (&a)[4]) const {
      const uint2 factors = load_words2(table[pair / 4 * 2 + product] + pair % 4 / 2 * kFactorBytes);
      make_byte_values(raw[pair % kPairsAhead], product, a);
      const uint32_t f[2] = {factors.x, factors.y};
      for (int i = 0; i < 4; ++i) a[i] = multiply_f16(a[i], f[i / 2]);
    }
  };

  /// By one warp, a lane a key.
  static __device__ __forceinline__ void make_table(uint32_t slot, uint32_t table, int key) {
    const uint4 scales = load_words4(slot + uint32_t(key * kPitch + KvFp8DsMla::kScalesAt));
    const uint32_t bits[4] = {scales.x, scales.y, scales.z, scales.w};
    uint32_t largest = 6u << 23;  // of subnormal scales too
#pragma unroll
    for (const uint32_t scale : bits) largest = max(largest, scale & 0x7F800000u);
    const float unit = float_of((259u << 23) - largest);  // 2^-exponent
#pragma unroll
    for (int tile = 0; tile < KvFp8DsMla::kTiles; ++tile) {
      store_half(table + factor_at(tile, key), to_f16(float_of(bits[tile]) * unit, 0));
    }
    store_word(table + kUnitsAt + 4 * key, largest - (5u << 23));
  }
};

// ---- e2m1 latents: nvfp4_ds_mla ----

/// Nibbles `Pair` of the low and the high half of `codes` as an FP16 pair, times 2^-14: sign to bit 15, magnitude to
/// bits 9 to 11.
template <int Pair>
__device__ __forceinline__ uint32_t e2m1_to_f16(uint32_t codes) {
  constexpr int kShift = 9 - 4 * Pair;
  const uint32_t magnitude = kShift < 0 ? codes >> (kShift < 0 ? -kShift : 0) : codes << (kShift < 0 ? 0 : kShift);
  return (magnitude & 0x0E000E00u) | ((codes << (12 - 4 * Pair)) & 0x80008000u);
}

template <>
struct RowOperands<KvNvfp4DsMla> {
  static constexpr int kPitch = KvNvfp4DsMla::kRowBytes;  // 352: 8-byte loads of four rows meet no bank twice
  static constexpr int kTableBytes = KvNvfp4DsMla::kBlocks * kFactorBytes;
  static constexpr bool kScaledKeys = false;
  static constexpr bool kPlainPe = false;
  static constexpr float kPeUnit = 1 / 128.0f;          ///< latents are handled times 2^-7
  static constexpr uint32_t kFactorUnit = 0x58005800u;  ///< 2^7 twice: 2^-14 of the nibbles to 2^-7

  static __device__ __forceinline__ int latent_of(int block, Lane lane, int i) {
    return 128 * (block / 2) + 32 * lane.warp + 4 * lane.row() + 2 * (block % 2) + i;
  }
  static __device__ __forceinline__ constexpr int value_block(int pair) { return pair % 4; }

  /// Of 64 dims, two pairs, a lane holds a block of 16: the order in which the row keeps its scales.
  struct Keys {
    uint32_t nibbles, pe;
    uint2 scales[2];  // of rows r and r + 8: block 4 n + column
    __device__ __forceinline__ Keys(uint32_t slot, uint32_t, Lane lane)
        : nibbles(slot + uint32_t(lane.row() * kPitch + 8 * lane.column())),
          pe(key_row_address(slot, kPitch, lane) + KvNvfp4DsMla::kPeAt) {
      for (int i = 0; i < 2; ++i) scales[i] = load_words2(nibbles + i * 8 * kPitch + KvNvfp4DsMla::kScalesAt);
    }
    uint2 codes[2];
    uint32_t factors[2];
    uint32_t raw_pe[kPairsAhead][4];
    __device__ __forceinline__ void fetch(int pair) {
      if (pair >= kLatentPairs) {
        return load_matrices(raw_pe[pair % kPairsAhead], pe + 32 * (pair - kLatentPairs));
      }
      if (pair % 2 == 0) return;  // with the next, when both pairs before are made
      const int n = pair / 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        codes[i] = load_words2(nibbles + i * 8 * kPitch + 32 * n);
        const uint32_t word = n < 4 ? scales[i].x : scales[i].y;
        factors[i] = multiply_f16(low_e4m3_to_f16(permute_bytes(word, 0, uint32_t(n % 4 * 0x1111))), kFactorUnit);
      }
    }
    __device__ __forceinline__ void make(int pair, int product, uint32_t (&a)[4]) const {
      if (pair >= kLatentPairs) return make_byte_keys(raw_pe[pair % kPairsAhead], product, a);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = pair % 2 == 0 ? codes[i].x : codes[i].y;
        a[i] = multiply_f16(product == 0 ? e2m1_to_f16<0>(word) : e2m1_to_f16<2>(word), factors[i]);
        a[2 + i] = multiply_f16(product == 0 ? e2m1_to_f16<1>(word) : e2m1_to_f16<3>(word), factors[i]);
      }
    }
  };

  /// Two pairs are two M blocks of one slot: a unit's latents 0, 1 are rows r, r + 8 of the first, 2 and 3 of the
  /// second.
  struct Values {
    uint32_t address[2], table[4];
    __device__ __forceinline__ Values(const uint32_t (&slots)[4], const uint32_t (&tables)[4], int group, Lane lane) {
      for (int i = 0; i < 2; ++i) address[i] = value_row_address(slots + 2 * i, kPitch, lane) + uint32_t(128 * group);
      for (int i = 0; i < 4; ++i) {
        table[i] = tables[i] + factor_at(16 * group + 2 * lane.warp + lane.row() / 4, 2 * lane.column());
      }
    }
    uint32_t raw[4];  // of 8 keys each: two keys by four latents a lane
    __device__ __forceinline__ void fetch(int pair) {
      if (pair % 2 != 0) load_matrices_transposed(raw, address[pair / 4] + pair / 2 % 2 * 64);
    }
    __device__ __forceinline__ void make(int pair, int product, uint32_t (&a)[4]) const {
      const uint2 both = load_words2(table[pair / 4 * 2 + product] + pair / 2 % 2 * 8 * kFactorBytes);
      const uint32_t factors[2] = {both.x, both.y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = raw[2 * product + i];
        a[2 * i] = multiply_f16(pair % 2 == 0 ? e2m1_to_f16<0>(word) : e2m1_to_f16<2>(word), factors[i]);
        a[2 * i + 1] = multiply_f16(pair % 2 == 0 ? e2m1_to_f16<1>(word) : e2m1_to_f16<3>(word), factors[i]);
      }
    }
  };

  /// By one warp, a lane a key.
  static __device__ __forceinline__ void make_table(uint32_t slot, uint32_t table, int key) {
    const uint32_t scales = slot + uint32_t(key * kPitch + KvNvfp4DsMla::kScalesAt);
#pragma unroll
    for (int word = 0; word < KvNvfp4DsMla::kBlocks / 4; ++word) {
      const uint32_t codes = load_word(scales + 4 * word);
      const uint32_t factors[2] = {multiply_f16(low_e4m3_to_f16(codes), kFactorUnit),
                                   multiply_f16(high_e4m3_to_f16(codes), kFactorUnit)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // byte 8 (s & 3) + (s >> 2) of the row's scales is block s
        const int byte = 4 * word + i;
        const int block = byte % 8 * 4 + byte / 8;
        static_assert(KvNvfp4DsMla::scale_at(5) == KvNvfp4DsMla::kScalesAt + 9);
        store_half(table + factor_at(block, key), i % 2 == 0 ? factors[i / 2] : factors[i / 2] >> 16);
      }
    }
  }

  /// `pairs` are neighbours; a lane's k-step takes elements four apart.
  static __device__ __forceinline__ void store_query(uint32_t row, uint32_t swizzle, int unit,
                                                     const uint32_t (&pairs)[8]) {
    if (unit >= kLatent / 16) return ByteOperands::store_query(row, swizzle, unit, pairs);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // elements 8 word + j and 4 more
        const uint32_t both =
            permute_bytes(pairs[4 * word + j / 2], pairs[4 * word + 2 + j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
        store_word(row + (uint32_t((2 * word + j / 2) * 32 + j % 2 * 16) ^ swizzle) + uint32_t(unit % 4 * 4), both);
      }
    }
  }
};

}  // namespace dsacore::cuda::many
