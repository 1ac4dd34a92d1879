// The kernels of the value stage, as value.cu lists them; host side.
#pragma once

#include "plan/registry.h"

namespace dsacore::cuda {

/// value_merge.cu: the parts of a sparse core, W_UV and the gate in one kernel.
void run_value_merge(const ValueArgs& args, const Workspace& workspace);

/// value_fused.cu: W_UV and the gate in one kernel.
void run_fused_value(const ValueArgs& args, const Workspace& workspace);

/// value_wide.cu: a matrix product over all heads into `v`, then the gate kernel.
int64_t wide_value_bytes(const ShapeKey& shape, int threads);
void prepare_wide_value(const ShapeKey& shape);
void run_wide_value(const ValueArgs& args, const Workspace& workspace);

/// gate.cu: the gate alone.
void run_gate(const GateArgs& args, const Workspace& workspace);

}  // namespace dsacore::cuda
