// query: steps 1 to 5 of spec 4 on the cpu.
// q_a -> norm -> q_c -> W_QB -> x -> W_UK, scale, round -> query rows | kv_a -> norm -> quantise -> MLA cache row
//
// The weights are read once: a task takes a part of one head's and multiplies it with every row. Kernels: few_rows and
// many_rows (rows.h says which when), which share the order of the work, run_query.
#include <algorithm>

#include "backends/cpu/bf16_ops.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/rows.h"
#include "format/layouts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/query.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "backends/cpu/norm-inl.h"
#include "backends/cpu/numeric-inl.h"
#include "backends/cpu/row_group-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr int kChunk = 64;  // weight rows of one block_dot
constexpr int kProjectParts = kHeadQuery / kChunk;
constexpr int kAbsorbRows = 128;  // rows of the transposed W_UK in one task
constexpr int kAbsorbParts = kLatent / kAbsorbRows;

int rows_of(const QueryArgs& args) { return int(args.projected.extent(0)); }

/// Step 1 of one row.
void normalise_row(const QueryArgs& args, int row) {
  const LayerModel& m = *args.model;
  rms_norm(args.projected.row(row), m.q_norm.data(), m.sizes.q_lora, m.config.eps, args.q_c.row(row));
}

/// Step 5 of one row.
void insert_row(const QueryArgs& args, int row) {
  const Slot slot(args.slots(row));
  if (slot.value() < 0) return;
  const LayerModel& m = *args.model;
  const BFloat16* kv_a = args.projected.row(row) + m.sizes.kv_a_at();
  BFloat16 rounded[kLatent];
  rms_norm(kv_a, m.kv_norm.data(), kLatent, m.config.eps, rounded);
  float c[kLatent];
  for (int i = 0; i < kLatent; ++i) c[i] = to_float(rounded[i]);
  std::byte* to = row_at(args.kv, physical_row(place_of(slot, args.kv.page), args.kv.stride_rows));
  encode_kv(args.kv.format, c, kv_a + kLatent, m.config.k_scale_inv, to);
}

/// Steps 2 to 5, once q_c is there. A method has `project` (step 2 of some of a head's 192 rows of W_QB; nope is kept
/// for step 3, pe goes to the query) and `absorb` (step 3 of some of the head's 512 values); both may run for any head
/// at once.
template <class Method>
void run_query(const QueryArgs& args, Threads& threads, const Method& method) {
  const int heads = args.model->sizes.heads;
  const int rows = rows_of(args);
  // A head a task needs one parallel region less; smaller parts keep every thread busy where heads do not share out
  // evenly.
  if (heads % threads.count() == 0 || heads >= 4 * threads.count()) {
    threads.for_each(heads + rows, [&](int64_t task, int worker) {
      if (task >= heads) return insert_row(args, int(task - heads));
      method.project(int(task), 0, kHeadQuery, worker);
      method.absorb(int(task), 0, kLatent, worker);
    });
    return;
  }
  const int parts = heads * kProjectParts;
  threads.for_each(parts + rows, [&](int64_t task, int worker) {
    if (task >= parts) return insert_row(args, int(task - parts));
    method.project(int(task) / kProjectParts, int(task) % kProjectParts * kChunk, kChunk, worker);
  });
  threads.for_each(heads * kAbsorbParts, [&](int64_t task, int worker) {
    method.absorb(int(task) / kAbsorbParts, int(task) % kAbsorbParts * kAbsorbRows, kAbsorbRows, worker);
  });
}

// ---- few rows ----

struct FewRowsScratch {
  BFloat16* nope;  // [heads, rows, 128]
  float* sums;     // [threads, rows, 512]
  int64_t bytes;
};
FewRowsScratch few_rows_scratch(std::byte* base, int heads, int rows, int threads) {
  ScratchPieces pieces(base);
  FewRowsScratch s{};
  s.nope = pieces.take<BFloat16>(int64_t(heads) * rows * kNope);
  s.sums = pieces.take<float>(int64_t(threads) * rows * kLatent);
  s.bytes = pieces.bytes();
  return s;
}

struct FewRows {
  const QueryArgs& args;
  const Bf16Ops& ops;
  FewRowsScratch scratch;
  int rows;

  float* sums(int worker) const { return scratch.sums + int64_t(worker) * rows * kLatent; }
  BFloat16* nope(int head, int row) const { return scratch.nope + (int64_t(head) * rows + row) * kNope; }

  /// Step 4: values `at`.. of a query row.
  void store(const float* values, int row, int head, int at, int n) const {
    if (has_fp8_query(args.model->config.kv_format)) {
      round_to_e4m3(values, args.model->config.q_scale_inv, args.query.e4m3(row, head) + at, n);
    } else {
      round_to_bf16(values, args.query.bf16(row, head) + at, n);
    }
  }

  void project(int head, int first, int count, int worker) const {
    const View<const BFloat16, 2>& w = args.model->w_qb;
    float* x = sums(worker);
    ops.rows_dot({.w = w.row(int64_t(head) * kHeadQuery + first),
                  .w_pitch = w.stride(0),
                  .n = count,
                  .x = args.q_c.data(),
                  .x_pitch = args.q_c.stride(0),
                  .b = rows,
                  .k = args.model->sizes.q_lora,
                  .y = x,
                  .y_pitch = count});
    const int nopes = std::clamp(kNope - first, 0, count);
    for (int row = 0; row < rows; ++row, x += count) {
      round_to_bf16(x, nope(head, row) + first, nopes);
      store(x + nopes, row, head, kLatent + first + nopes - kNope, count - nopes);
    }
  }

  void absorb(int head, int first, int count, int worker) const {
    const BFloat16* w =
        reinterpret_cast<const BFloat16*>(args.model->packed) + (int64_t(head) * kLatent + first) * kNope;
    float* u = sums(worker);
    ops.rows_dot({.w = w,
                  .w_pitch = kNope,
                  .n = count,
                  .x = nope(head, 0),
                  .x_pitch = kNope,
                  .b = rows,
                  .k = kNope,
                  .y = u,
                  .y_pitch = count});
    for (int row = 0; row < rows; ++row, u += count) store(u, row, head, first, count);
  }
};

void run_few_rows(const QueryArgs& args, const Workspace& workspace) {
  const int rows = rows_of(args);
  if (rows == 0) return;
  Threads& threads = *workspace.threads;
  // A norm takes about a microsecond: a few of them are done before a parallel region would have begun.
  if (rows <= 8) {
    for (int row = 0; row < rows; ++row) normalise_row(args, row);
  } else {
    threads.for_each(rows, [&](int64_t row, int) { normalise_row(args, int(row)); });
  }
  const FewRowsScratch scratch =
      few_rows_scratch(workspace.scratch.data(), args.model->sizes.heads, rows, threads.count());
  run_query(args, threads, FewRows{args, ops_of(workspace), scratch, rows});
}

int64_t few_rows_bytes(const ShapeKey& shape, int threads) {
  return few_rows_scratch(nullptr, shape.sizes.heads, shape.rows, threads).bytes;
}

// ---- many rows ----

struct ManyRowsScratch {
  BFloat16* q_c;   // [groups][q_lora/2][columns][2], kRowGroup columns apart
  BFloat16* nope;  // [heads][groups][128/2][columns][2]
  float* sums;     // [threads, kChunk, kRowGroup]
  int64_t bytes;
};
ManyRowsScratch many_rows_scratch(std::byte* base, const LayerSizes& sizes, int rows, int threads) {
  const int64_t columns = int64_t(groups_of(rows)) * kRowGroup;
  ScratchPieces pieces(base);
  ManyRowsScratch s{};
  s.q_c = pieces.take<BFloat16>(columns * sizes.q_lora);
  s.nope = pieces.take<BFloat16>(sizes.heads * columns * kNope);
  s.sums = pieces.take<float>(int64_t(threads) * kChunk * kRowGroup);
  s.bytes = pieces.bytes();
  return s;
}

struct ManyRows {
  const QueryArgs& args;
  const Bf16Ops& ops;
  ManyRowsScratch scratch;
  int rows;

  BFloat16* q_c(int group) const { return scratch.q_c + int64_t(group) * kRowGroup * args.model->sizes.q_lora; }
  BFloat16* nope(int head, int group) const {
    return scratch.nope + (int64_t(head) * groups_of(rows) + group) * kRowGroup * kNope;
  }
  float* sums(int worker) const { return scratch.sums + int64_t(worker) * kChunk * kRowGroup; }

  /// Step 1 of kPackRows rows, and their columns of the packed q_c.
  void normalise(int task) const {
    const int first = task * kPackRows;
    const int live = std::min(rows - first, kPackRows);
    for (int row = first; row < first + live; ++row) normalise_row(args, row);
    const RowGroup group = row_group(rows, first / kRowGroup);
    pack_pairs(args.q_c.row(first), args.q_c.stride(0), live, args.model->sizes.q_lora, q_c(first / kRowGroup),
               group.columns, first - group.first);
  }

  /// Step 4: values `at`..at+kChunk-1 of the query rows of a group.
  void store(const float* values, RowGroup group, int head, int at) const {
    if (has_fp8_query(args.model->config.kv_format)) {
      float factors[kRowGroup];
      std::fill_n(factors, kRowGroup, args.model->config.q_scale_inv);
      store_rows_e4m3(values, kRowGroup, kChunk, group.rows, factors, args.query.e4m3(group.first, head) + at,
                      int64_t(args.query.heads) * kQueryRow);
    } else {
      store_rows_bf16(values, kRowGroup, kChunk, group.rows, args.query.bf16(group.first, head) + at,
                      int64_t(args.query.heads) * kQueryRow);
    }
  }

  void project(int head, int first, int count, int worker) const {
    const View<const BFloat16, 2>& w = args.model->w_qb;
    float* x = sums(worker);
    for (int at = first; at < first + count; at += kChunk) {
      for (int g = 0; g < groups_of(rows); ++g) {
        const RowGroup group = row_group(rows, g);
        ops.block_dot({.a = w.row(int64_t(head) * kHeadQuery + at),
                       .a_pitch = w.stride(0),
                       .m = kChunk,
                       .b = q_c(g),
                       .b_pitch = 2 * group.columns,
                       .n = group.columns,
                       .k = args.model->sizes.q_lora,
                       .c = x,
                       .c_pitch = kRowGroup,
                       .accumulate = false});
        if (at < kNope) {
          repack_pairs(x, kRowGroup, kChunk, group.columns, nope(head, g) + int64_t(at) * group.columns);
        } else {
          store(x, group, head, kLatent + at - kNope);
        }
      }
    }
  }

  void absorb(int head, int first, int count, int worker) const {
    const BFloat16* w = reinterpret_cast<const BFloat16*>(args.model->packed) + int64_t(head) * kLatent * kNope;
    float* u = sums(worker);
    for (int at = first; at < first + count; at += kChunk) {
      for (int g = 0; g < groups_of(rows); ++g) {
        const RowGroup group = row_group(rows, g);
        ops.block_dot({.a = w + int64_t(at) * kNope,
                       .a_pitch = kNope,
                       .m = kChunk,
                       .b = nope(head, g),
                       .b_pitch = 2 * group.columns,
                       .n = group.columns,
                       .k = kNope,
                       .c = u,
                       .c_pitch = kRowGroup,
                       .accumulate = false});
        store(u, group, head, at);
      }
    }
  }
};

void run_many_rows(const QueryArgs& args, const Workspace& workspace) {
  const int rows = rows_of(args);
  if (rows == 0) return;
  Threads& threads = *workspace.threads;
  const ManyRowsScratch scratch = many_rows_scratch(workspace.scratch.data(), args.model->sizes, rows, threads.count());
  const ManyRows method{args, ops_of(workspace), scratch, rows};
  threads.for_each((rows + kPackRows - 1) / kPackRows, [&](int64_t task, int) { method.normalise(int(task)); });
  run_query(args, threads, method);
}

int64_t many_rows_bytes(const ShapeKey& shape, int threads) {
  return many_rows_scratch(nullptr, shape.sizes, shape.rows, threads).bytes;
}

constexpr Kernel<QueryArgs> kKernels[] = {
    {"few_rows", accepts_few_rows, few_rows_bytes, run_few_rows},
    {"many_rows", accepts_many_rows, many_rows_bytes, run_many_rows},
};

}  // namespace

std::span<const Kernel<QueryArgs>> QueryKernels() { return kKernels; }

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dsacore::cpu {

HWY_EXPORT(QueryKernels);
std::span<const Kernel<QueryArgs>> query_kernels() { return HWY_DYNAMIC_DISPATCH(QueryKernels)(); }

}  // namespace dsacore::cpu
#endif
