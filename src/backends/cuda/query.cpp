// query: steps 1 to 5 of spec 4, projected row -> q_c, query rows, MLA cache row.
//
// A launch that normalises and inserts, while the second one already fetches its first weights; where q_c is there,
// one launch.
#include "backends/cuda/query.h"

#include "backends/cuda/kernels.h"

namespace dsacore::cuda {
namespace query {

Parameters parameters_of(const QueryArgs& args, const Workspace& workspace) {
  const LayerModel& m = *args.model;
  const bool aligned =
      reinterpret_cast<uintptr_t>(args.projected.data()) % 16 == 0 && args.projected.stride(0) % 8 == 0;
  return {.projected = args.projected,
          .slots = args.slots,
          .kv = args.kv,
          .q_c = args.q_c,
          .query = args.query,
          .q_norm = m.q_norm,
          .kv_norm = m.kv_norm,
          .w_qb = m.w_qb,
          .kv_b = m.kv_b,
          .kv_a_at = m.sizes.kv_a_at(),
          .rows = int(args.projected.extent(0)),
          .q_lora = m.sizes.q_lora,
          .heads = m.sizes.heads,
          .aligned_rows = aligned,
          .fp8_query = has_fp8_query(m.config.kv_format),
          .beside = workspace.beside && args.q_c_ready,
          .tiles_at_once = 1,
          .eps = float(m.config.eps),
          .q_scale_inv = m.config.q_scale_inv,
          .k_scale_inv = m.config.k_scale_inv};
}

}  // namespace query

namespace {

Verdict accepts(const ShapeKey&) { return {}; }
int64_t no_scratch(const ShapeKey&, int) { return 0; }

void prepare(const ShapeKey& shape) { query::prepare_stream(shape.sizes.heads); }

void run(const QueryArgs& args, const Workspace& workspace) {
  const query::Parameters p = query::parameters_of(args, workspace);
  if (p.rows == 0) return;
  if (!args.q_c_ready) query::enqueue_norm(p, workspace, true);
  query::enqueue_stream(p, workspace, args.q_c_ready);
}

constexpr Kernel<QueryArgs> kKernels[] = {{"stream", accepts, no_scratch, run, prepare}};

}  // namespace

std::span<const Kernel<QueryArgs>> query_kernels() { return kKernels; }

void enqueue_query_norm(const QueryArgs& args, const Workspace& workspace) {
  const query::Parameters p = query::parameters_of(args, workspace);
  if (p.rows > 0) query::enqueue_norm(p, workspace, false);
}

}  // namespace dsacore::cuda
