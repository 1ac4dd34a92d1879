// Sparse core for many heads: how heads and keys are cut over CTAs, and what the host hands to the kernels.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "plan/registry.h"
#include "stages/stages.h"

namespace dsacore::cuda {

/// One CTA works on `columns` heads (or fewer: `group_heads`) of one row and on one of `splits` parts of its tiles.
struct ManyHeadsPlan {
  int columns;      ///< N of the matrix products: 24 or 48
  int groups;       ///< CTAs that share the heads of a row
  int group_heads;  ///< of each but the last, at most `columns`
  int splits = 1;   ///< CTAs that share the keys of a row; where there are several, a kernel merges their parts

  int ctas(int rows) const { return rows * groups * splits; }
  /// First of `tiles` that split `split` takes.
  DSACORE_HD constexpr int first_tile(int tiles, int split) const { return tiles * split * reciprocal >> 16; }
  int reciprocal = (0xFFFF + splits) / splits;  ///< of `splits`, exact enough for 32 tiles
};

inline constexpr int kManyHeadsTile = 64;    ///< keys: the M of a warpgroup's matrix product
inline constexpr int kManyHeadsSplits = 32;  ///< most parts of a row: a lane of the merge has one each

/// Fixed by (rows, heads, topk) alone, so that the bits of a row depend on nothing else of the batch.
ManyHeadsPlan many_heads_plan(int rows, int heads, int topk);

/// One split's share of the softmax: `largest` is the base 2 logit, an integer, that `sum` refers to. No key: sum 0.
struct SplitSum {
  float largest;
  float sum;
};

inline constexpr int kPartUnits = 8;  ///< of a head's latents in a part: 64 each, those of a warp

/// What CTAs that share a row's keys leave for the merge; those without keys only their sums of 0.
struct ManyHeadsParts {
  uint4* latents;  ///< [ctas, columns, 8 units, 8 lanes]: FP16, eight of a lane
  float* units;    ///< [ctas, columns, 8]
  SplitSum* sums;  ///< [ctas, columns]

  /// Of `heads` heads in all CTAs.
  static constexpr int64_t bytes(int64_t heads) {
    return heads * int64_t(kLatent * sizeof(uint16_t) + kPartUnits * sizeof(float) + sizeof(SplitSum));
  }
  static ManyHeadsParts in(std::byte* scratch, int64_t heads) {
    auto* latents = reinterpret_cast<uint4*>(scratch);
    auto* units = reinterpret_cast<float*>(latents + heads * kPartUnits * 8);
    return {latents, units, reinterpret_cast<SplitSum*>(units + heads * kPartUnits)};
  }
};

/// Natural logarithm of sum * 2^largest, `largest` an integer: two products, so that large logits keep their last bits.
inline __device__ float natural_lse(float largest, float sum) {
  constexpr float kHigh = 0x1.62e4p-1f, kLow = 0x1.7f7d1cp-20f;  // of ln 2
  return fmaf(largest, kHigh, fmaf(largest, kLow, logf(sum)));
}

/// The kernel's parameter.
struct ManyHeadsArgs {
  QueryRows query;
  View<const int32_t, 2> topk_rows;
  View<const int32_t, 1> valid;
  const std::byte* cache;
  View<BFloat16, 3> latent;
  View<float, 2> lse;
  float scale_high;    ///< attention scale * log2(e) * unit of the keys, not 0; the product is exact to FP32
  float scale_low;     ///< what `scale_high` lacks
  float latent_scale;  ///< of the latent, once, before its rounding
  ManyHeadsParts parts;
  ManyHeadsPlan plan;
};

/// The kernel of one cache format: sparse_core_many_<format>.cu.
template <class Layout>
struct ManyHeadsKernel {
  static void prepare();
  static void launch(const ManyHeadsArgs& args, const Workspace& workspace);
};

/// Values of `nvfp4_ds_mla` keys are handled in this unit: times 2^-7 they are exact in FP16.
inline constexpr float kNvfp4Unit = 128;

}  // namespace dsacore::cuda
