// The kernels of the query stage (steps 1 to 5 of spec 4) and how query.cpp puts them together. Host side.
#pragma once

#include "plan/registry.h"

namespace dsacore::cuda::query {

/// What every kernel of the stage is given: the Args with the model's device pointers.
struct Parameters {
  View<const BFloat16, 2> projected;
  View<const int64_t, 1> slots;
  KvCache kv;
  View<BFloat16, 2> q_c;
  QueryRows query;
  View<const BFloat16, 1> q_norm;
  View<const BFloat16, 1> kv_norm;
  View<const BFloat16, 2> w_qb;
  View<const BFloat16, 3> kv_b;
  int64_t kv_a_at;
  int rows;
  int q_lora;
  int heads;
  bool aligned_rows;  ///< every projected row begins at a multiple of 16 bytes
  bool fp8_query;
  bool beside;        ///< stream: need not wait for the kernel ahead of it before its end
  int tiles_at_once;  ///< stream: of tokens, by clusters of their own; enqueue_stream sets it
  float eps;
  float q_scale_inv;
  float k_scale_inv;
};
Parameters parameters_of(const QueryArgs& args, const Workspace& workspace);

// query_norm.cu: a warp a row. Writes q_c, and the MLA cache rows where asked for.
void enqueue_norm(const Parameters& p, const Workspace& workspace, bool insert);

// query_stream.cu: steps 2 to 4 from q_c, a CTA a head; and the MLA cache rows where asked for.
void prepare_stream(int heads);
void enqueue_stream(Parameters p, const Workspace& workspace, bool insert);

}  // namespace dsacore::cuda::query
