#include "driver/stage_work.h"

#include <algorithm>

#include "format/paging.h"

namespace dsacore {
namespace {

constexpr double kBf16 = sizeof(BFloat16);

/// Sums over the live rows of a step.
struct Keys {
  double scored_rows = 0;      ///< keys that a row must score, over rows
  double scored_requests = 0;  ///< the same, each request's keys once
  double attended = 0;         ///< keys attended to, over rows
};

Keys count_keys(const Inputs& in) {
  Keys keys;
  const int64_t topk = in.config.topk;
  for (int64_t r = 0; r < in.step.seq_lens.extent(0); ++r) {
    int64_t longest = 0;
    for (int j = 0; j < in.step.q; ++j) {
      const int64_t n = keys_seen(in.step.seq_lens(r), in.step.q, j);
      keys.attended += double(std::min(topk, n));
      if (n > topk) keys.scored_rows += double(n);
      longest = std::max(longest, n);
    }
    if (longest > topk) keys.scored_requests += double(longest);
  }
  return keys;
}

}  // namespace

Work stage_work(StageId stage, const Inputs& in) {
  const double rows = double(in.step.projected.extent(0)), heads = in.sizes.heads, q_lora = in.sizes.q_lora;
  const double index_heads = in.sizes.index_heads, topk = in.config.topk;
  const double query_bytes = rows * heads * kQueryRow * (has_fp8_query(in.config.kv_format) ? 1 : kBf16);
  switch (stage) {
    case StageId::kNorm: return {kBf16 * (1 + 2 * rows) * q_lora, 4 * rows * q_lora};
    case StageId::kQuery: {
      const double weights = heads * (kHeadQuery * q_lora + double(kNope) * kLatent);
      return {kBf16 * (weights + rows * (q_lora + kQueryRow) + rows * q_lora) + query_bytes + rows * in.kv.row_bytes,
              2 * rows * weights};
    }
    case StageId::kIndexProjection: {
      const double weights = index_heads * kIndexDim * q_lora;
      const double out = rows * (index_heads * (kIndexDim + double(sizeof(float))) + in.index.row_bytes);
      return {kBf16 * (weights + rows * (q_lora + kIndexDim + index_heads)) + out, 2 * rows * weights};
    }
    case StageId::kIndexer: {
      const Keys keys = count_keys(in);
      return {keys.scored_requests * in.index.row_bytes + rows * index_heads * (kIndexDim + double(sizeof(float))) +
                  rows * topk * 2 * double(sizeof(int32_t)),
              2 * keys.scored_rows * index_heads * kIndexDim};
    }
    case StageId::kSparseCore: {
      const Keys keys = count_keys(in);
      return {keys.attended * in.kv.row_bytes + query_bytes + kBf16 * rows * heads * kLatent,
              2 * keys.attended * heads * (kQueryRow + kLatent)};
    }
    case StageId::kValueProjection: {
      const double weights = heads * kLatent * kValue;
      return {kBf16 * (weights + rows * heads * (kLatent + 2 * kValue)), 2 * rows * weights};
    }
    case StageId::kCandidateMerge:
    case StageId::kPartialMerge:
    case StageId::kGate: break;
  }
  return {};
}

double floor_seconds(const Work& work, const Peaks& peaks) {
  double seconds = 0;
  if (peaks.bytes_per_second > 0) seconds = std::max(seconds, work.bytes / peaks.bytes_per_second);
  if (peaks.flops_per_second > 0) seconds = std::max(seconds, work.flops / peaks.flops_per_second);
  return seconds;
}

}  // namespace dsacore
