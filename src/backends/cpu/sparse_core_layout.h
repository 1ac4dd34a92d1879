// How the sparse core of the cpu backend divides a step and its scratch. The selected keys of a row are cut into splits
// of `kSplitKeys`; a task attends all heads of one row to one split; a second pass merges the splits of a row in order.
// The cut depends on `valid` alone, so bits depend neither on threads nor on other rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dsacore/formats.h"
#include "dsacore/problem.h"

namespace dsacore::cpu {

inline constexpr int kSplitKeys = 256;
inline constexpr int kKeyBlock = 64;   ///< keys decoded at a time, then multiplied by the query
inline constexpr int kHeadStep = 16;   ///< heads are padded to a multiple of it
inline constexpr int kMergeHeads = 8;  ///< heads of a merge task
inline constexpr int kScaleTiles = 4;  ///< FP32 scales of an `fp8_ds_mla` row
inline constexpr int kMaxSplits = (kMaxTopk + kSplitKeys - 1) / kSplitKeys;

/// Elements between token pairs of the packed values. The extra line keeps neighbours in different sets of the L1
/// cache.
inline constexpr int kValuePitch = 2 * kLatent + 32;
static_assert(kSplitKeys % kKeyBlock == 0 && kKeyBlock % 32 == 0 && kKeyBlock >= kHeadStep);

/// What a split leaves: latents before normalisation, in the column order of `values` (sparse_core_keys-inl.h), and of
/// each head the largest logit (before the attention scale) and two sums of p: as computed, for the lse, and as the
/// latents took part of it, rounded to BF16.
struct SplitPartial {
  float* latent;       ///< [heads, 512]
  float* max;          ///< [padded heads]
  float* sum;          ///< [padded heads]
  float* rounded_sum;  ///< [padded heads]
};

/// Scratch of one worker.
struct CoreScratch {
  BFloat16* query;   ///< [288][query pitch], in pairs along the row: [288][padded heads][2]
  BFloat16* keys;    ///< [kKeyBlock, 576]
  BFloat16* values;  ///< [kSplitKeys / 2][kValuePitch], in pairs of tokens: [kSplitKeys / 2][512][2]
  float* logits;     ///< [kSplitKeys, padded heads]
  float* parts;      ///< [kScaleTiles, kKeyBlock, padded heads], logits of single tiles where scales are folded
  uint32_t* words;   ///< [kSplitKeys / 2, padded heads], pairs of BF16 p
  BFloat16* p;       ///< [padded heads, kSplitKeys]
  float* scales;     ///< [kSplitKeys, kScaleTiles]
};

/// Sizes and places, all in bytes and multiples of 64.
class CoreLayout {
 public:
  CoreLayout(int heads, int topk, int rows)
      : heads_(heads),
        padded_((heads + kHeadStep - 1) / kHeadStep * kHeadStep),
        splits_((topk + kSplitKeys - 1) / kSplitKeys),
        partial_bytes_(int64_t(heads) * kLatent * 4 + 3 * int64_t(padded_) * 4) {
    // Partials of a wave of rows stay in the L2 or L3 cache, and a wave has work for many threads.
    constexpr int64_t kWaveBytes = int64_t(4) << 20;
    constexpr int64_t kWaveTasks = 64;
    const int64_t tasks = std::max(kWaveTasks, kWaveBytes / partial_bytes_);
    wave_rows_ = int(std::clamp<int64_t>(tasks / splits_, 1, std::max(rows, 1)));
  }

  int heads() const { return heads_; }
  int padded_heads() const { return padded_; }
  int splits() const { return splits_; }
  int wave_rows() const { return wave_rows_; }
  /// Elements between the pairs of the packed query: an odd number of cache lines.
  int query_pitch() const { return (padded_ / kHeadStep | 1) * 2 * kHeadStep; }

  int64_t bytes(int threads) const { return partials_bytes() + threads * worker_bytes(); }

  /// Split `split` of row `row` of the wave.
  SplitPartial partial(std::byte* scratch, int64_t row, int split) const {
    float* at = reinterpret_cast<float*>(scratch + (row * splits_ + split) * partial_bytes_);
    float* max = at + int64_t(heads_) * kLatent;
    return {at, max, max + padded_, max + 2 * padded_};
  }

  CoreScratch worker(std::byte* scratch, int worker) const {
    std::byte* at = scratch + partials_bytes() + worker * worker_bytes();
    CoreScratch s;
    s.query = reinterpret_cast<BFloat16*>(at);
    s.keys = reinterpret_cast<BFloat16*>(at += query_bytes());
    s.values = reinterpret_cast<BFloat16*>(at += kKeysBytes);
    s.logits = reinterpret_cast<float*>(at += kValuesBytes);
    s.parts = reinterpret_cast<float*>(at += kSplitKeys * head_bytes());
    s.words = reinterpret_cast<uint32_t*>(at += kScaleTiles * kKeyBlock * head_bytes());
    s.p = reinterpret_cast<BFloat16*>(at += kSplitKeys / 2 * head_bytes());
    s.scales = reinterpret_cast<float*>(at += kSplitKeys / 2 * head_bytes());
    return s;
  }

 private:
  static constexpr int64_t kKeysBytes = int64_t(kKeyBlock) * kQueryRow * 2;
  static constexpr int64_t kValuesBytes = int64_t(kSplitKeys / 2) * kValuePitch * 2;
  static constexpr int64_t kScalesBytes = int64_t(kSplitKeys) * kScaleTiles * 4;

  int64_t head_bytes() const { return int64_t(padded_) * 4; }
  int64_t query_bytes() const { return int64_t(kQueryRow / 2) * query_pitch() * 2; }
  int64_t partials_bytes() const { return int64_t(wave_rows_) * splits_ * partial_bytes_; }
  int64_t worker_bytes() const {
    return query_bytes() + kKeysBytes + kValuesBytes + (2 * kSplitKeys + kScaleTiles * kKeyBlock) * head_bytes() +
           kScalesBytes;
  }

  int heads_;
  int padded_;
  int splits_;
  int wave_rows_;
  int64_t partial_bytes_;
};

}  // namespace dsacore::cpu
