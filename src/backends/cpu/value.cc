// value and gate: step 12 of spec 5 on the cpu.
// latent -> W_UV -> v, rounded -> times sigmoid(gate), rounded -> out
//
// W_UV is read transposed, as kv_b_proj holds it: a task takes one head's 128 rows. Kernels of value: few_rows and
// many_rows (rows.h); of gate: one.
#include <algorithm>

#include "backends/cpu/bf16_ops.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/value.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "backends/cpu/numeric-inl.h"
#include "backends/cpu/row_group-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {
namespace {

/// 1 / (1 + exp(-x)) to a few FP32 units; by exp(-|x|), which cannot overflow. NaN gives NaN.
template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  const auto e = hn::Exp(d, hn::Neg(hn::Abs(x)));  // gives 0 for NaN
  const auto y = hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one), hn::Add(one, e));
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

/// `out = (v * sigmoid(gate)) ->bf16` of `n` values, a multiple of 16; `out` may be `v`.
void apply_gate(const BFloat16* v, const BFloat16* gate, BFloat16* out, int n) {
  const hn::CappedTag<float, 16> d;
  for (int i = 0; i < n; i += int(hn::Lanes(d))) {
    store_bf16(d, hn::Mul(load_bf16(d, v + i), sigmoid(d, load_bf16(d, gate + i))), out + i);
  }
}

int rows_of(const ValueArgs& args) { return int(args.latent.extent(0)); }
int heads_of(const ValueArgs& args) { return int(args.latent.extent(1)); }

/// The gate of one head of a row whose v is in `out` already.
void gate_head(const ValueArgs& args, int row, int head) {
  if (args.gate.empty()) return;
  BFloat16* out = args.out.row(row) + int64_t(head) * kValue;
  apply_gate(out, args.gate.row(row) + int64_t(head) * kValue, out, kValue);
}

// ---- few rows ----

void run_few_rows(const ValueArgs& args, const Workspace& workspace) {
  const int rows = rows_of(args);
  if (rows == 0) return;
  const Bf16Ops& ops = ops_of(workspace);
  float* sums = reinterpret_cast<float*>(workspace.scratch.data());  // [threads, rows, 128]
  workspace.threads->for_each(heads_of(args), [&](int64_t head, int worker) {
    float* v = sums + int64_t(worker) * rows * kValue;
    ops.rows_dot({.w = args.w_uv.row(head),
                  .w_pitch = args.w_uv.stride(1),
                  .n = kValue,
                  .x = args.latent.row(0, head),
                  .x_pitch = args.latent.stride(0),
                  .b = rows,
                  .k = kLatent,
                  .y = v,
                  .y_pitch = kValue});
    for (int row = 0; row < rows; ++row) {
      round_to_bf16(v + row * kValue, args.out.row(row) + head * kValue, kValue);
      gate_head(args, row, int(head));
    }
  });
}

int64_t few_rows_bytes(const ShapeKey& shape, int threads) {
  return int64_t(threads) * shape.rows * kValue * int64_t(sizeof(float));
}

// ---- many rows ----

struct ManyRowsScratch {
  BFloat16* latent;  // [threads][512/2][columns][2], kRowGroup columns apart
  float* sums;       // [threads, 128, kRowGroup]
  int64_t bytes;
};
ManyRowsScratch many_rows_scratch(std::byte* base, int threads) {
  ScratchPieces pieces(base);
  ManyRowsScratch s{};
  s.latent = pieces.take<BFloat16>(int64_t(threads) * kLatent * kRowGroup);
  s.sums = pieces.take<float>(int64_t(threads) * kValue * kRowGroup);
  s.bytes = pieces.bytes();
  return s;
}

/// One head of a group of rows.
void project_group(const ValueArgs& args, const Bf16Ops& ops, int head, RowGroup group, BFloat16* packed, float* v) {
  for (int first = 0; first < group.rows; first += kPackRows) {
    pack_pairs(args.latent.row(group.first + first, head), args.latent.stride(0),
               std::min(group.rows - first, kPackRows), kLatent, packed, group.columns, first);
  }
  ops.block_dot({.a = args.w_uv.row(head),
                 .a_pitch = args.w_uv.stride(1),
                 .m = kValue,
                 .b = packed,
                 .b_pitch = 2 * group.columns,
                 .n = group.columns,
                 .k = kLatent,
                 .c = v,
                 .c_pitch = kRowGroup,
                 .accumulate = false});
  store_rows_bf16(v, kRowGroup, kValue, group.rows, args.out.row(group.first) + int64_t(head) * kValue,
                  args.out.stride(0));
  for (int row = group.first; row < group.first + group.rows; ++row) gate_head(args, row, head);
}

void run_many_rows(const ValueArgs& args, const Workspace& workspace) {
  const int rows = rows_of(args);
  if (rows == 0) return;
  const Bf16Ops& ops = ops_of(workspace);
  const ManyRowsScratch scratch = many_rows_scratch(workspace.scratch.data(), workspace.threads->count());
  // Groups of one head stand together, so that its weights come from memory once.
  const int groups = groups_of(rows);
  workspace.threads->for_each(int64_t(heads_of(args)) * groups, [&](int64_t task, int worker) {
    project_group(args, ops, int(task / groups), row_group(rows, int(task % groups)),
                  scratch.latent + int64_t(worker) * kLatent * kRowGroup,
                  scratch.sums + int64_t(worker) * kValue * kRowGroup);
  });
}

int64_t many_rows_bytes(const ShapeKey&, int threads) { return many_rows_scratch(nullptr, threads).bytes; }

constexpr Kernel<ValueArgs> kValueKernels[] = {
    {"few_rows", accepts_few_rows, few_rows_bytes, run_few_rows},
    {"many_rows", accepts_many_rows, many_rows_bytes, run_many_rows},
};

// ---- gate alone ----

Verdict accepts_all(const ShapeKey&) { return {}; }
int64_t no_scratch(const ShapeKey&, int) { return 0; }

void run_gate(const GateArgs& args, const Workspace& workspace) {
  workspace.threads->for_each(args.out.extent(0), [&](int64_t row, int) {
    apply_gate(args.v.row(row), args.gate.row(row), args.out.row(row), int(args.out.extent(1)));
  });
}

constexpr Kernel<GateArgs> kGateKernels[] = {{"rows", accepts_all, no_scratch, run_gate}};

}  // namespace

std::span<const Kernel<ValueArgs>> ValueKernels() { return kValueKernels; }
std::span<const Kernel<GateArgs>> GateKernels() { return kGateKernels; }

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dsacore::cpu {

HWY_EXPORT(ValueKernels);
HWY_EXPORT(GateKernels);
std::span<const Kernel<ValueArgs>> value_kernels() { return HWY_DYNAMIC_DISPATCH(ValueKernels)(); }
std::span<const Kernel<GateArgs>> gate_kernels() { return HWY_DYNAMIC_DISPATCH(GateKernels)(); }

}  // namespace dsacore::cpu
#endif
