// partial_merge: step 4 of spec 7 on the cpu. Partials of all ranks, and their LSE -> one latent (or v) a row and head.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/partial_merge.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "backends/cpu/numeric-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr int kTaskItems = 16;  // rows times heads of one task

/// How much each rank's partial weighs, `exp(lse_d - max)`, and what the sum is to be divided by.
struct Weights {
  float of[kMaxRanks];
  float total;
  float lse;  // of all ranks together, natural log
};

/// Of one row and head, in FP64. A rank without rows (LSE -infinity) weighs 0; where one LSE is NaN the total is too.
Weights weights_of(const PartialMergeArgs& args, int row, int head) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  const int ranks = int(args.partial_lse.extent(0));
  double top = kNone;
  for (int rank = 0; rank < ranks; ++rank) top = std::max(top, double(args.partial_lse(rank, row, head)));
  Weights w{};
  double total = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const double lse = double(args.partial_lse(rank, row, head));
    const double weight = lse == kNone ? 0 : std::exp(lse - top);
    w.of[rank] = float(weight);
    total += weight;
  }
  w.total = total == 0 ? 1 : float(total);
  w.lse = float(total == 0 ? kNone : top + std::log(total));
  return w;
}

void merge(const PartialMergeArgs& args, int row, int head) {
  const hn::CappedTag<float, 16> d;
  const int ranks = int(args.partial_lse.extent(0));
  const Weights w = weights_of(args, row, head);
  args.lse(row, head) = w.lse;
  // Ranks that weigh nothing are not read: their partial may hold anything.
  const BFloat16* partial[kMaxRanks];
  float weight[kMaxRanks];
  int read = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (w.of[rank] == 0) continue;
    partial[read] = &args.partials(rank, row, head, 0);
    weight[read++] = w.of[rank];
  }
  // Divided at the end: a sum that is exact stays so until its one rounding.
  const auto total = hn::Set(d, w.total);
  BFloat16* out = args.merged.row(row, head);
  for (int i = 0; i < int(args.merged.extent(2)); i += int(hn::Lanes(d))) {
    auto sum = hn::Zero(d);
    for (int j = 0; j < read; ++j) sum = hn::MulAdd(hn::Set(d, weight[j]), load_bf16(d, partial[j] + i), sum);
    store_bf16(d, hn::Div(sum, total), out + i);
  }
}

Verdict accepts(const ShapeKey&) { return {}; }
int64_t no_scratch(const ShapeKey&, int) { return 0; }

void run(const PartialMergeArgs& args, const Workspace& workspace) {
  const int64_t heads = args.merged.extent(1);
  const int64_t items = args.merged.extent(0) * heads;
  workspace.threads->for_each((items + kTaskItems - 1) / kTaskItems, [&](int64_t task, int) {
    const int64_t end = std::min(items, (task + 1) * kTaskItems);
    for (int64_t i = task * kTaskItems; i < end; ++i) merge(args, int(i / heads), int(i % heads));
  });
}

constexpr Kernel<PartialMergeArgs> kKernels[] = {{"by_lse", accepts, no_scratch, run}};

}  // namespace

std::span<const Kernel<PartialMergeArgs>> PartialMergeKernels() { return kKernels; }

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dsacore::cpu {

HWY_EXPORT(PartialMergeKernels);
std::span<const Kernel<PartialMergeArgs>> partial_merge_kernels() {
  return HWY_DYNAMIC_DISPATCH(PartialMergeKernels)();
}

}  // namespace dsacore::cpu
#endif
