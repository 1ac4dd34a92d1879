// value and gate: step 12 of the specification. The kernels are in value_fused.cu, value_wide.cu and gate.cu; all take
// every shape of the specification.
#include "backends/cuda/value.h"

#include "backends/cuda/kernels.h"

namespace dsacore::cuda {
namespace {

Verdict accepts_all(const ShapeKey&) { return {}; }
int64_t no_scratch(const ShapeKey&, int) { return 0; }

constexpr Kernel<ValueArgs> kValueKernels[] = {
    {"fused", accepts_all, no_scratch, run_fused_value},
    {"wide", accepts_all, wide_value_bytes, run_wide_value, prepare_wide_value},
};
constexpr Kernel<GateArgs> kGateKernels[] = {{"rows", accepts_all, no_scratch, run_gate}};

}  // namespace

std::span<const Kernel<ValueArgs>> value_kernels() { return kValueKernels; }
std::span<const Kernel<GateArgs>> gate_kernels() { return kGateKernels; }

}  // namespace dsacore::cuda
