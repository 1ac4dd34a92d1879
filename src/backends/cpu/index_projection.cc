// index_projection: steps 6 to 8 of spec 4 on the cpu.
// q_c -> W_IQ -> round, scale -> index query and head weights | wk -> LayerNorm -> quantise -> index cache
//
// A task takes one index head's weights and multiplies them with every row. Kernels: few_rows and many_rows (rows.h).
#include <algorithm>
#include <cmath>

#include "backends/cpu/bf16_ops.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/rows.h"
#include "format/layouts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/index_projection.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "backends/cpu/numeric-inl.h"
#include "backends/cpu/row_group-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {
namespace {

int rows_of(const IndexProjectionArgs& args) { return int(args.projected.extent(0)); }

/// Step 8 of one row, in FP64.
void insert_row(const IndexProjectionArgs& args, int row) {
  const Slot slot(args.index_slots(row));
  if (slot.value() < 0) return;
  const LayerModel& m = *args.model;
  const BFloat16* wk = args.projected.row(row) + m.sizes.wk_at();
  double mean = 0, variance = 0;
  for (int i = 0; i < kIndexDim; ++i) mean += double(to_float(wk[i]));
  mean /= kIndexDim;
  for (int i = 0; i < kIndexDim; ++i) {
    const double d = double(to_float(wk[i])) - mean;
    variance += d * d;
  }
  const double r = 1.0 / std::sqrt(variance / kIndexDim + m.config.eps);
  float key[kIndexDim];
  for (int i = 0; i < kIndexDim; ++i) {
    const double y = (double(to_float(wk[i])) - mean) * r * double(m.k_norm_weight(i)) + double(m.k_norm_bias(i));
    key[i] = to_float(to_bf16(y));
  }
  const Place place = place_of(slot, kIndexPage);
  std::byte* page = args.index.data + int64_t(place.page.value()) * kIndexPage * args.index.row_bytes;
  encode_index(args.index.format, key, place.offset, page);
}

/// Step 7's `s` from the largest magnitude; NaN where that is NaN or infinite.
float index_scale(float amax) {
  const float at_least = amax < 1e-10f ? 1e-10f : amax;
  return ue8m0_to_float(ue8m0_ceil(at_least / kE4m3Max));
}

/// `w_h`, multiplied left to right.
void store_weight(const IndexProjectionArgs& args, int row, int head, float scale) {
  const LayerModel& m = *args.model;
  const float wv = to_float(args.projected.row(row)[m.sizes.wv_at() + head]);
  args.head_weights(row, head) = wv * scale * float(m.config.index_softmax_scale) * float(m.config.index_head_scale);
}

/// A task a head, then a task a row for its index key.
template <class Method>
void run_heads(const IndexProjectionArgs& args, Threads& threads, const Method& method) {
  const int heads = args.model->sizes.index_heads;
  threads.for_each(heads + rows_of(args), [&](int64_t task, int worker) {
    if (task >= heads) return insert_row(args, int(task - heads));
    method.project(int(task), worker);
  });
}

// ---- few rows ----

/// Largest magnitude of `n` values rounded to BF16, as bits compare: NaN above infinity. `n` a multiple of 16.
float largest_bf16(const float* x, int n) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  auto largest = hn::Zero(di);
  for (int i = 0; i < n; i += int(hn::Lanes(d))) {
    largest = hn::Max(largest, hn::BitCast(di, hn::Abs(round_bf16(d, hn::LoadU(d, x + i)))));
  }
  return float_of(uint32_t(hn::GetLane(hn::MaxOfLanes(di, largest))));
}

struct FewRows {
  const IndexProjectionArgs& args;
  const Bf16Ops& ops;
  float* sums;  // [threads, rows, 128]
  int rows;

  void project(int head, int worker) const {
    const View<const BFloat16, 2>& w = args.model->w_iq;
    float* iq = sums + int64_t(worker) * rows * kIndexDim;
    ops.rows_dot({.w = w.row(int64_t(head) * kIndexDim),
                  .w_pitch = w.stride(0),
                  .n = kIndexDim,
                  .x = args.q_c.data(),
                  .x_pitch = args.q_c.stride(0),
                  .b = rows,
                  .k = args.model->sizes.q_lora,
                  .y = iq,
                  .y_pitch = kIndexDim});
    for (int row = 0; row < rows; ++row, iq += kIndexDim) {
      const float scale = index_scale(largest_bf16(iq, kIndexDim));
      // The scale is a power of two between 2^-42 and 2^120, so its reciprocal is exact, and multiplying rounds as
      // dividing does.
      round_to_e4m3(iq, 1.0f / scale, args.index_query.row(row, head), kIndexDim);
      store_weight(args, row, head, scale);
    }
  }
};

void run_few_rows(const IndexProjectionArgs& args, const Workspace& workspace) {
  if (rows_of(args) == 0) return;
  float* sums = reinterpret_cast<float*>(workspace.scratch.data());
  run_heads(args, *workspace.threads, FewRows{args, ops_of(workspace), sums, rows_of(args)});
}

int64_t few_rows_bytes(const ShapeKey& shape, int threads) {
  return int64_t(threads) * shape.rows * kIndexDim * int64_t(sizeof(float));
}

// ---- many rows ----

struct ManyRowsScratch {
  BFloat16* q_c;  // [groups][q_lora/2][columns][2], kRowGroup columns apart
  float* sums;    // [threads, 128, kRowGroup]
  int64_t bytes;
};
ManyRowsScratch many_rows_scratch(std::byte* base, const LayerSizes& sizes, int rows, int threads) {
  ScratchPieces pieces(base);
  ManyRowsScratch s{};
  s.q_c = pieces.take<BFloat16>(int64_t(groups_of(rows)) * kRowGroup * sizes.q_lora);
  s.sums = pieces.take<float>(int64_t(threads) * kIndexDim * kRowGroup);
  s.bytes = pieces.bytes();
  return s;
}

/// largest_bf16 of each column of iq [128, kRowGroup].
void largest_of_columns(const float* iq, int columns, float* largest) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  for (int r = 0; r < columns; r += int(hn::Lanes(d))) {
    auto most = hn::Zero(di);
    for (int i = 0; i < kIndexDim; ++i) {
      most = hn::Max(most, hn::BitCast(di, hn::Abs(round_bf16(d, hn::LoadU(d, iq + i * kRowGroup + r)))));
    }
    hn::StoreU(hn::BitCast(d, most), d, largest + r);
  }
}

struct ManyRows {
  const IndexProjectionArgs& args;
  const Bf16Ops& ops;
  ManyRowsScratch scratch;
  int rows;

  BFloat16* q_c(int group) const { return scratch.q_c + int64_t(group) * kRowGroup * args.model->sizes.q_lora; }

  void pack_q_c(int task) const {
    const int first = task * kPackRows;
    const RowGroup group = row_group(rows, first / kRowGroup);
    pack_pairs(args.q_c.row(first), args.q_c.stride(0), std::min(rows - first, kPackRows), args.model->sizes.q_lora,
               q_c(first / kRowGroup), group.columns, first - group.first);
  }

  void project(int head, int worker) const {
    const View<const BFloat16, 2>& w = args.model->w_iq;
    float* iq = scratch.sums + int64_t(worker) * kIndexDim * kRowGroup;
    for (int g = 0; g < groups_of(rows); ++g) {
      const RowGroup group = row_group(rows, g);
      ops.block_dot({.a = w.row(int64_t(head) * kIndexDim),
                     .a_pitch = w.stride(0),
                     .m = kIndexDim,
                     .b = q_c(g),
                     .b_pitch = 2 * group.columns,
                     .n = group.columns,
                     .k = args.model->sizes.q_lora,
                     .c = iq,
                     .c_pitch = kRowGroup,
                     .accumulate = false});
      float factors[kRowGroup];
      largest_of_columns(iq, group.columns, factors);
      for (int row = 0; row < group.rows; ++row) {
        const float scale = index_scale(factors[row]);
        store_weight(args, group.first + row, head, scale);
        factors[row] = 1.0f / scale;
      }
      store_rows_e4m3(iq, kRowGroup, kIndexDim, group.rows, factors, args.index_query.row(group.first, head),
                      args.index_query.stride(0));
    }
  }
};

void run_many_rows(const IndexProjectionArgs& args, const Workspace& workspace) {
  const int rows = rows_of(args);
  if (rows == 0) return;
  Threads& threads = *workspace.threads;
  const ManyRowsScratch scratch = many_rows_scratch(workspace.scratch.data(), args.model->sizes, rows, threads.count());
  const ManyRows method{args, ops_of(workspace), scratch, rows};
  threads.for_each((rows + kPackRows - 1) / kPackRows, [&](int64_t task, int) { method.pack_q_c(int(task)); });
  run_heads(args, threads, method);
}

int64_t many_rows_bytes(const ShapeKey& shape, int threads) {
  return many_rows_scratch(nullptr, shape.sizes, shape.rows, threads).bytes;
}

constexpr Kernel<IndexProjectionArgs> kKernels[] = {
    {"few_rows", accepts_few_rows, few_rows_bytes, run_few_rows},
    {"many_rows", accepts_many_rows, many_rows_bytes, run_many_rows},
};

}  // namespace

std::span<const Kernel<IndexProjectionArgs>> IndexProjectionKernels() { return kKernels; }

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dsacore::cpu {

HWY_EXPORT(IndexProjectionKernels);
std::span<const Kernel<IndexProjectionArgs>> index_projection_kernels() {
  return HWY_DYNAMIC_DISPATCH(IndexProjectionKernels)();
}

}  // namespace dsacore::cpu
#endif
