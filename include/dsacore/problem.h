// The nouns of spec 1, 2, 6 and 8: sizes, a layer's weights and constants, caches, one step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dsacore/formats.h"
#include "dsacore/view.h"

namespace dsacore {

// Sizes that no model of this family changes (spec 2).
inline constexpr int kLatent = 512;     ///< `kv_lora`
inline constexpr int kPe = 64;          ///< the part of a key that is kept beside the latent
inline constexpr int kQueryRow = 576;   ///< latent, then pe
inline constexpr int kNope = 128;       ///< per head
inline constexpr int kValue = 128;      ///< per head
inline constexpr int kHeadQuery = 192;  ///< nope, then pe: rows of W_QB per head
inline constexpr int kKvB = 256;        ///< rows of kv_b_proj per head: W_UK, then W_UV transposed
inline constexpr int kIndexDim = 128;
inline constexpr int kIndexPage = 64;  ///< tokens of an index page, always

// Ranges (spec 2, 10). Outside them prepare refuses.
inline constexpr int kMaxTopk = 2048;
inline constexpr int kMaxHeads = 128;
inline constexpr int kMinIndexHeads = 8, kMaxIndexHeads = 64;
inline constexpr int kQLoraStep = 128, kMaxQLora = 2048;
inline constexpr int kMaxQ = 8;
inline constexpr int kMaxRows = 256;
inline constexpr int64_t kMaxPitch = 1 << 24;  ///< elements from row to row of `projected` and `out`
inline constexpr int64_t kMaxContext = 1048576;
inline constexpr int kMaxRanks = 8;

/// What a layer's weights fix.
struct LayerSizes {
  int q_lora = 0;
  int heads = 0;  ///< held by this rank
  int index_heads = 0;

  /// Elements of the packed projection row `[q_a | kv_a | gate | wk | wv]` and where its parts begin.
  constexpr int64_t kv_a_at() const { return q_lora; }
  constexpr int64_t gate_at() const { return kv_a_at() + kQueryRow; }
  constexpr int64_t wk_at() const { return gate_at() + int64_t(heads) * kValue; }
  constexpr int64_t wv_at() const { return wk_at() + kIndexDim; }
  constexpr int64_t width() const { return wv_at() + index_heads; }

  bool operator==(const LayerSizes&) const = default;
};

/// A layer's constants.
struct LayerConfig {
  KvFormat kv_format = KvFormat::kFp8DsMla;
  IndexFormat index_format = IndexFormat::kFp8;
  int topk = kMaxTopk;             ///< 1..2048
  double eps = 1e-6;               ///< of all three norms
  double softmax_scale = 0;        ///< (nope + pe)^-0.5
  double index_softmax_scale = 0;  ///< index_dim^-0.5
  double index_head_scale = 0;     ///< index_heads^-0.5
  float q_scale_inv = 1;           ///< FP8 queries: `fp8(value * q_scale_inv)`; not read otherwise
  float k_scale_inv = 1;           ///< `fp8` cache: `fp8(value * k_scale_inv)`; not read otherwise
};

/// A borrowed dense tensor of one or two axes whose type is checked at prepare.
struct TensorRef {
  const void* data = nullptr;  ///< null: absent
  ElementType type = ElementType::kBf16;
  int rank = 0;
  int64_t shape[2] = {0, 0};
};

/// A layer's weights, borrowed for the life of the PreparedLayer. Shapes and types as in spec 8, "Layer file".
struct LayerWeights {
  TensorRef q_a_layernorm;   ///< BF16 [q_lora]
  TensorRef kv_a_layernorm;  ///< BF16 [512]
  TensorRef q_b_proj;        ///< BF16 [heads*192, q_lora]
  TensorRef kv_b_proj;       ///< BF16 [heads*256, 512]
  TensorRef wq_b;            ///< BF16 [index_heads*128, q_lora]
  TensorRef k_norm_weight;   ///< F32 or BF16 [128]
  TensorRef k_norm_bias;     ///< F32 or BF16 [128]; absent: zero
};

/// The packed MLA cache: `page` rows at `data + (id * stride_rows + offset) * row_bytes`.
struct KvCache {
  std::byte* data = nullptr;
  KvFormat format = KvFormat::kFp8DsMla;
  int64_t pages = 0;
  int page = kIndexPage;    ///< P: 64 or a multiple of 64
  int64_t stride_rows = 0;  ///< >= page
  int row_bytes = 0;        ///< checked against the format
};

/// The indexer cache: `pages` pages of 64 tokens, `64 * row_bytes` apart: all values, then all scales.
struct IndexCache {
  std::byte* data = nullptr;
  IndexFormat format = IndexFormat::kFp8;
  int64_t pages = 0;
  int row_bytes = 0;
};

/// One decode step. `B` rows were prepared; the tensors hold `r <= R = B / q` requests, and rows past them are empty
/// requests.
struct Step {
  int batch = 0;                             ///< B, one of the prepared ones
  int q = 1;                                 ///< rows per request, one of the prepared ones
  View<const BFloat16, 2> projected;         ///< [r*q, width], row pitch >= width
  View<const int64_t, 1> slots;              ///< [r*q] MLA cache slots; negative: write nothing
  View<const int64_t, 1> index_slots;        ///< [r*q] index cache slots
  View<const int32_t, 2> block_table;        ///< [r, W] page ids; entries past ceil(local len / P) are not read
  View<const int32_t, 2> index_block_table;  ///< [r, W'] index page ids, or empty: derived from `block_table`
  View<const int32_t, 1> seq_lens;           ///< [r] global lengths, this step's q tokens included
  View<BFloat16, 2> out;                     ///< [B, heads*128], written whole
  int page = 0;  ///< P that `block_table` counts in, refused where the bound cache has another; 0: the bound cache's
};

}  // namespace dsacore
