// Step 4 of spec 7: the ranks' partials of a head, weighed by their lse -> merged latent (or v) and its lse.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/reference/arithmetic.h"
#include "backends/reference/kernels.h"

namespace dsacore::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void merge_head(const PartialMergeArgs& args, int64_t row, int64_t head) {
  const int ranks = int(args.partials.extent(0));
  double max = -kInfinity;
  for (int d = 0; d < ranks; ++d) max = std::max(max, double(args.partial_lse(d, row, head)));

  // exp(lse_d - max); a source with no rows weighs 0, and what its partial holds is not read.
  double weights[kMaxRanks];
  double total = 0;
  for (int d = 0; d < ranks; ++d) {
    const double lse = double(args.partial_lse(d, row, head));
    weights[d] = lse == -kInfinity ? 0.0 : std::exp(lse - max);
    total += weights[d];
  }
  for (int64_t i = 0; i < args.merged.extent(2); ++i) {
    double sum = 0;
    for (int d = 0; d < ranks; ++d) {
      if (weights[d] != 0) sum += weights[d] / total * value_of(args.partials(d, row, head, i));
    }
    args.merged(row, head, i) = to_bf16(sum);
  }
  args.lse(row, head) = float(total == 0 ? -kInfinity : max + std::log(total));
}

void run(const PartialMergeArgs& args, const Workspace& workspace) {
  const int64_t heads = args.merged.extent(1);
  workspace.threads->for_each(args.merged.extent(0) * heads,
                              [&](int64_t task, int) { merge_head(args, task / heads, task % heads); });
}

constexpr Kernel<PartialMergeArgs> kKernels[] = {{"reference", accept_all, no_scratch, run}};

}  // namespace

std::span<const Kernel<PartialMergeArgs>> partial_merge_kernels() { return kKernels; }

}  // namespace dsacore::reference
