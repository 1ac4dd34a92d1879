// sparse_core of the cpu backend: step 11 of spec.md.
//
// task (row, split): cache rows -> keys, values -> logits -> p -> partial latent | task (row, heads): partials ->
// latent, lse
//
// A split is one softmax: all its logits are there before the first p. Matrix work is BF16 with FP32 sums. Keys are
// exact in BF16, but for `fp8_ds_mla` rows with a scale that is no power of two: those scales are folded into the
// logits and into p, which then is the sum of two BF16 numbers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "backends/cpu/bf16_ops.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/sparse_core_layout.h"
#include "stages/stages.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/sparse_core.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "backends/cpu/sparse_core_keys-inl.h"
#include "backends/cpu/sparse_core_softmax-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr int kCacheLine = 64;

/// One task.
struct Split {
  const SparseCoreArgs& args;
  const Bf16Ops& ops;
  const CoreLayout& layout;
  CoreScratch s;
  const int32_t* rows;  ///< [keys] physical rows
  int keys;             ///< >= 1
  SplitPartial out;

  int packed_keys() const { return (keys + 31) / 32 * 32; }
};

/// Asks for the cache rows of a block, to the L2 cache. All at once: a row whose page is not in the TLB holds up what
/// comes after it until its page walk is done, and walks overlap where nothing else stands between them. Inlined,
/// because GCC takes a function that only prefetches for one without effect and drops its calls.
template <class Format>
HWY_INLINE void prefetch_keys(const Split& split, int first) {
  const int last = std::min(first + kKeyBlock, split.keys);
  for (int t = first; t < last; ++t) {
    const std::byte* row = row_at(split.args.kv, PhysicalRow(split.rows[t]));
    for (int at = 0; at < Format::kRowBytes; at += kCacheLine) __builtin_prefetch(row + at, 0, 2);
    __builtin_prefetch(row + Format::kRowBytes - 1, 0, 2);
  }
}

/// Keys first..first+n-1 of the split -> s.keys, s.values, s.scales. Returns whether all are complete, without scales
/// to fold.
template <class Format>
bool decode_keys(const Split& split, int first, int n) {
  const CoreScratch& s = split.s;
  const KvCache& kv = split.args.kv;
  const auto row = [&](int t) { return row_at(kv, PhysicalRow(split.rows[t])); };
  bool complete = true;
  for (int t = 0; t < n; t += 2) {
    for (int i = t; i < t + 2; ++i) {
      BFloat16* key = s.keys + i * kQueryRow;
      if (i == n) {  // an odd number of keys: the last pair's second value is zero
        std::memset(static_cast<void*>(key), 0, kQueryRow * sizeof(BFloat16));
        continue;
      }
      complete &= decode_row(Format{}, split.ops, row(first + i), key, s.scales + (first + i) * kScaleTiles);
    }
    pack_values(s.keys + t * kQueryRow, s.keys + (t + 1) * kQueryRow, s.values + (first + t) / 2 * kValuePitch);
  }
  return complete;
}

/// Logits of the first `n` keys of `s.keys`, over dimensions from..from+k-1.
void multiply_keys(const Split& split, int n, int from, int k, float* logits) {
  const int padded = split.layout.padded_heads();
  split.ops.block_dot({.a = split.s.keys + from,
                       .a_pitch = kQueryRow,
                       .m = n,
                       .b = split.s.query + int64_t(from / 2) * split.layout.query_pitch(),
                       .b_pitch = split.layout.query_pitch(),
                       .n = padded,
                       .k = k,
                       .c = logits,
                       .c_pitch = padded,
                       .accumulate = false});
}

/// All logits of the split. Returns whether some scales are to be folded into p.
template <class Format>
bool compute_logits(const Split& split) {
  const CoreScratch& s = split.s;
  const int padded = split.layout.padded_heads();
  bool folded = false;
  prefetch_keys<Format>(split, 0);
  for (int first = 0; first < split.keys; first += kKeyBlock) {
    const int n = std::min(split.keys - first, kKeyBlock);
    float* logits = s.logits + first * padded;
    prefetch_keys<Format>(split, first + kKeyBlock);
    if (decode_keys<Format>(split, first, n)) {
      multiply_keys(split, n, 0, kQueryRow, logits);
      continue;
    }
    folded = true;
    multiply_keys(split, n, kLatent, kPe, logits);
    for (int tile = 0; tile < kScaleTiles; ++tile) {
      multiply_keys(split, n, tile * KvFp8DsMla::kTile, KvFp8DsMla::kTile, s.parts + tile * kKeyBlock * padded);
    }
    add_scaled_parts(s, padded, first, n);
  }
  const int pairs = (split.keys + 1) / 2;
  std::memset(static_cast<void*>(s.values + pairs * kValuePitch), 0,
              size_t(split.packed_keys() / 2 - pairs) * kValuePitch * sizeof(BFloat16));
  return folded;
}

/// Latents (+)= p . values over columns from..from+n-1.
void multiply_values(const Split& split, int from, int n, bool accumulate) {
  split.ops.block_dot({.a = split.s.p,
                       .a_pitch = kSplitKeys,
                       .m = split.layout.heads(),
                       .b = split.s.values + 2 * from,
                       .b_pitch = kValuePitch,
                       .n = n,
                       .k = split.packed_keys(),
                       .c = split.out.latent + from,
                       .c_pitch = kLatent,
                       .accumulate = accumulate});
}

/// A split from its packed query to its partial.
void attend_split(const Split& split) {
  const int padded = split.layout.padded_heads();
  const float scale = split.args.model->attention_scale() * 0x1.715476p0f;  // p = 2^(scale * (logit - max))
  const bool folded =
      with_layout(split.args.kv.format, [&](auto format) { return compute_logits<decltype(format)>(split); });
  if (!folded) {
    softmax(split.s, padded, split.keys, split.packed_keys(), scale, split.out);
    return multiply_values(split, 0, kLatent, false);
  }
  softmax_unrounded(split.s, padded, split.keys, scale, split.out);
  for (int tile = 0; tile < kScaleTiles; ++tile) {
    for (const bool second : {false, true}) {
      scaled_p(split.s, padded, split.keys, split.packed_keys(), tile, second);
      multiply_values(split, tile * KvFp8DsMla::kTile, KvFp8DsMla::kTile, second);
    }
  }
}

/// Merges the splits of heads first..last-1 of a row, in order.
void merge_splits(const SparseCoreArgs& args, int64_t row, const SplitPartial* partials, int splits, int first,
                  int last) {
  const double scale = double(args.model->attention_scale());
  for (int head = first; head < last; ++head) {
    float max = partials[0].max[head];
    for (int i = 1; i < splits; ++i) max = partials[i].max[head] > max ? partials[i].max[head] : max;
    float weights[kMaxSplits];
    double sum = 0, rounded_sum = 0;
    for (int i = 0; i < splits; ++i) {
      weights[i] = float(std::exp(scale * (double(partials[i].max[head]) - double(max))));
      sum += double(weights[i]) * double(partials[i].sum[head]);
      rounded_sum += double(weights[i]) * double(partials[i].rounded_sum[head]);
    }
    store_latent(partials, splits, head, weights, float(double(args.model->k_scale) / rounded_sum),
                 args.latent.row(row, head));
    args.lse(row, head) = float(double(max) * scale + std::log(sum));
  }
}

void clear_row(const SparseCoreArgs& args, int64_t row) {
  for (int head = 0; head < args.query.heads; ++head) {
    std::memset(static_cast<void*>(args.latent.row(row, head)), 0, kLatent * sizeof(BFloat16));
    args.lse(row, head) = -HUGE_VALF;
  }
}

int splits_of(int valid) { return (valid + kSplitKeys - 1) / kSplitKeys; }

/// Rows first..last-1: their splits, then the merges of rows that have more than one.
void run_wave(const SparseCoreArgs& args, const Workspace& workspace, const CoreLayout& layout, int64_t first,
              int64_t last) {
  std::byte* scratch = workspace.scratch.data();
  const auto& ops = *static_cast<const Bf16Ops*>(workspace.target);
  workspace.threads->for_each((last - first) * layout.splits(), [&](int64_t task, int worker) {
    const int64_t row = first + task / layout.splits();
    const int index = int(task % layout.splits());
    const int valid = args.valid(row);
    if (valid <= 0 && index == 0) clear_row(args, row);
    if (index >= splits_of(valid)) return;
    const int at = index * kSplitKeys;
    const Split split{.args = args,
                      .ops = ops,
                      .layout = layout,
                      .s = layout.worker(scratch, worker),
                      .rows = args.topk_rows.row(row) + at,
                      .keys = std::min(valid - at, kSplitKeys),
                      .out = layout.partial(scratch, row - first, index)};
    pack_query(args.query, row, ops, layout, split.s);
    attend_split(split);
    if (valid <= kSplitKeys) merge_splits(args, row, &split.out, 1, 0, layout.heads());
  });

  bool split_rows = false;
  for (int64_t row = first; row < last; ++row) split_rows |= args.valid(row) > kSplitKeys;
  if (!split_rows) return;
  const int groups = (layout.heads() + kMergeHeads - 1) / kMergeHeads;
  workspace.threads->for_each((last - first) * groups, [&](int64_t task, int) {
    const int64_t row = first + task / groups;
    const int head = int(task % groups) * kMergeHeads;
    const int splits = splits_of(args.valid(row));
    if (splits < 2) return;
    SplitPartial partials[kMaxSplits];
    for (int i = 0; i < splits; ++i) partials[i] = layout.partial(scratch, row - first, i);
    merge_splits(args, row, partials, splits, head, std::min(head + kMergeHeads, layout.heads()));
  });
}

void run_sparse_core(const SparseCoreArgs& args, const Workspace& workspace) {
  const int64_t rows = args.topk_rows.extent(0);
  const CoreLayout layout(args.query.heads, int(args.topk_rows.extent(1)), int(rows));
  for (int64_t first = 0; first < rows; first += layout.wave_rows()) {
    run_wave(args, workspace, layout, first, std::min(first + layout.wave_rows(), rows));
  }
}

Verdict accepts(const ShapeKey& shape) {
  const int heads = shape.sizes.heads * shape.ranks;
  if (heads > kMaxHeads) return {false, "heads of all ranks = " + std::to_string(heads) + ": allowed 1..128"};
  return {};
}

int64_t scratch_bytes(const ShapeKey& shape, int threads) {
  return CoreLayout(shape.sizes.heads * shape.ranks, shape.topk, shape.rows).bytes(threads);
}

constexpr Kernel<SparseCoreArgs> kKernels[] = {{"splits", accepts, scratch_bytes, run_sparse_core}};

}  // namespace

std::span<const Kernel<SparseCoreArgs>> SparseCoreKernels() { return kKernels; }

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dsacore::cpu {

HWY_EXPORT(SparseCoreKernels);
std::span<const Kernel<SparseCoreArgs>> sparse_core_kernels() { return HWY_DYNAMIC_DISPATCH(SparseCoreKernels)(); }

}  // namespace dsacore::cpu
#endif
