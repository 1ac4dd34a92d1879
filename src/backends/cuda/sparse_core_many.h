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
  int splits;       ///< CTAs that share the keys of a row: a cluster, which merges through its shared memory

  int ctas(int rows) const { return rows * groups * splits; }
};

inline constexpr int kManyHeadsTile = 64;    ///< keys: the M of a warpgroup's matrix product
inline constexpr int kManyHeadsSplits = 16;  ///< most parts of a row: the largest cluster

/// Fixed by (rows, heads, topk) alone, so that the bits of a row depend on nothing else of the batch.
ManyHeadsPlan many_heads_plan(int rows, int heads, int topk);

/// One split's share of the softmax: `largest` is the base 2 logit, an integer, that `sum` refers to. No key: sum 0.
struct SplitSum {
  float largest;
  float sum;
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
