// value and gate: step 12 of the specification. The kernels are in value_merge.cu, value_fused.cu, value_wide.cu and
// gate.cu; from latents all take every shape of the specification.
#include "backends/cuda/value.h"

#include <string>

#include "backends/cuda/kernels.h"

namespace dsacore::cuda {
namespace {

/// More heads are merged by the core itself, so that `fused` has only latents to read: 96 heads, one row, core and
/// value 15.7 us against 18.7.
constexpr int kMergedHeads = 16;

Verdict accepts_parts(const ShapeKey& shape) {
  if (!shape.parts) return {false, "takes the parts of a sparse core that leaves them, on one rank"};
  if (shape.sizes.heads <= kMergedHeads) return {};
  return {false, "takes 1 to 16 heads, not " + std::to_string(shape.sizes.heads)};
}
Verdict accepts_all(const ShapeKey&) { return {}; }
int64_t no_scratch(const ShapeKey&, int) { return 0; }

constexpr Kernel<ValueArgs> kValueKernels[] = {
    {.name = "merge", .accepts = accepts_parts, .scratch_bytes = no_scratch, .run = run_value_merge, .parts = true},
    {"fused", accepts_all, no_scratch, run_fused_value},
    {"wide", accepts_all, wide_value_bytes, run_wide_value, prepare_wide_value},
};
constexpr Kernel<GateArgs> kGateKernels[] = {{"rows", accepts_all, no_scratch, run_gate}};

}  // namespace

std::span<const Kernel<ValueArgs>> value_kernels() { return kValueKernels; }
std::span<const Kernel<GateArgs>> gate_kernels() { return kGateKernels; }

}  // namespace dsacore::cuda
