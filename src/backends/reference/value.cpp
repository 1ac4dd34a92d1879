// Step 12 of spec.md: latent -> v -> gated output; and the gate alone, for merged `proj` partials.
#include <cmath>

#include "backends/reference/arithmetic.h"
#include "backends/reference/kernels.h"

namespace dsacore::reference {
namespace {

/// (v * sigmoid(gate)) ->bf16
BFloat16 gated(BFloat16 v, BFloat16 gate) { return to_bf16(value_of(v) / (1.0 + std::exp(-value_of(gate)))); }

/// v_h = (latent_h . W_UV[h]) ->bf16, then the gate where there is one.
void project_head(const ValueArgs& args, int64_t row, int64_t head) {
  for (int64_t i = 0; i < kValue; ++i) {
    const BFloat16 v = to_bf16(dot(args.latent.row(row, head), args.w_uv.row(head, i), kLatent));
    const int64_t column = head * kValue + i;
    args.out(row, column) = args.gate.empty() ? v : gated(v, args.gate(row, column));
  }
}

void run_value(const ValueArgs& args, const Workspace& workspace) {
  const int64_t heads = args.latent.extent(1);
  workspace.threads->for_each(args.latent.extent(0) * heads,
                              [&](int64_t task, int) { project_head(args, task / heads, task % heads); });
}

void run_gate(const GateArgs& args, const Workspace& workspace) {
  workspace.threads->for_each(args.v.extent(0), [&](int64_t row, int) {
    for (int64_t i = 0; i < args.v.extent(1); ++i) args.out(row, i) = gated(args.v(row, i), args.gate(row, i));
  });
}

constexpr Kernel<ValueArgs> kValueKernels[] = {{"reference", accept_all, no_scratch, run_value}};
constexpr Kernel<GateArgs> kGateKernels[] = {{"reference", accept_all, no_scratch, run_gate}};

}  // namespace

std::span<const Kernel<ValueArgs>> value_kernels() { return kValueKernels; }
std::span<const Kernel<GateArgs>> gate_kernels() { return kGateKernels; }

}  // namespace dsacore::reference
