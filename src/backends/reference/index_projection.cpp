// Steps 6 to 8 of spec.md: q_c -> index query, wv -> head weights, wk -> index key in the cache.
#include <cmath>

#include "backends/reference/arithmetic.h"
#include "backends/reference/kernels.h"
#include "format/layouts.h"

namespace dsacore::reference {
namespace {

/// Steps 6 and 7 of one index head.
void project_head(const IndexProjectionArgs& args, int64_t row, int head) {
  const LayerModel& model = *args.model;

  // Step 6: iq = (W_IQ . q_c) ->bf16.
  float iq[kIndexDim];
  for (int i = 0; i < kIndexDim; ++i) {
    iq[i] =
        to_float(to_bf16(dot(model.w_iq.row(int64_t(head) * kIndexDim + i), args.q_c.row(row), model.sizes.q_lora)));
  }

  // Step 7: FP8 with a power-of-two scale, which goes into the head's weight. Single FP32 operations, left to right.
  float amax = 1e-10f;
  for (int i = 0; i < kIndexDim; ++i) amax = magnitude(iq[i]) > amax ? magnitude(iq[i]) : amax;
  const float s = ue8m0_to_float(ue8m0_ceil(amax / kE4m3Max));
  for (int i = 0; i < kIndexDim; ++i) args.index_query(row, head, i) = to_e4m3(iq[i] / s);
  float w = to_float(args.projected(row, model.sizes.wv_at() + head));
  w *= s;
  w *= float(model.config.index_softmax_scale);
  w *= float(model.config.index_head_scale);
  args.head_weights(row, head) = w;
}

/// Step 8: LayerNorm of wk, written as the token's index key.
void insert_key(const IndexProjectionArgs& args, int64_t row) {
  const LayerModel& model = *args.model;
  const Slot slot(args.index_slots(row));
  if (slot.value() < 0) return;
  const BFloat16* wk = args.projected.row(row) + model.sizes.wk_at();
  double mean = 0;
  for (int i = 0; i < kIndexDim; ++i) mean += value_of(wk[i]);
  mean /= kIndexDim;
  double variance = 0;
  for (int i = 0; i < kIndexDim; ++i) variance += (value_of(wk[i]) - mean) * (value_of(wk[i]) - mean);
  variance /= kIndexDim;
  const double factor = 1.0 / std::sqrt(variance + model.config.eps);
  float key[kIndexDim];
  for (int i = 0; i < kIndexDim; ++i) {
    const double k = (value_of(wk[i]) - mean) * factor * double(model.k_norm_weight(i)) + double(model.k_norm_bias(i));
    key[i] = to_float(to_bf16(k));
  }
  const Place place = place_of(slot, kIndexPage);
  const int64_t page_bytes = int64_t(kIndexPage) * args.index.row_bytes;
  encode_index(args.index.format, key, place.offset, args.index.data + place.page.value() * page_bytes);
}

void run(const IndexProjectionArgs& args, const Workspace& workspace) {
  const int64_t rows = args.projected.extent(0);
  const int heads = args.model->sizes.index_heads;
  workspace.threads->for_each(rows * heads,
                              [&](int64_t task, int) { project_head(args, task / heads, int(task % heads)); });
  workspace.threads->for_each(rows, [&](int64_t row, int) { insert_key(args, row); });
}

constexpr Kernel<IndexProjectionArgs> kKernels[] = {{"reference", accept_all, no_scratch, run}};

}  // namespace

std::span<const Kernel<IndexProjectionArgs>> index_projection_kernels() { return kKernels; }

}  // namespace dsacore::reference
