// The kernels of the index projection that its list (index_projection.cu) is made of.
#pragma once

#include "plan/registry.h"

namespace dsacore::cuda {

/// One kernel from q_c (index_projection_front.cuh).
void run_front_from_q_c(const IndexProjectionArgs& args, const Workspace& workspace);
void prepare_front_from_q_c(const ShapeKey& shape);

/// One kernel from the packed row, step 1 included (index_projection_front.cuh).
void run_front(const IndexProjectionArgs& args, const Workspace& workspace);
void prepare_front(const ShapeKey& shape);

/// A matrix product into scratch, then a kernel over its rows (index_projection_plain.cu).
void run_plain(const IndexProjectionArgs& args, const Workspace& workspace);
void prepare_plain(const ShapeKey& shape);
int64_t plain_scratch_bytes(const ShapeKey& shape, int threads);

}  // namespace dsacore::cuda
