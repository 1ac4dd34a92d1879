// Steps 1 to 5 of spec.md: projected row -> q_c, query rows, MLA cache row.
#include "backends/reference/arithmetic.h"
#include "backends/reference/kernels.h"
#include "format/layouts.h"

namespace dsacore::reference {
namespace {

/// Step 5: the latent's norm and the cache row of this token.
void insert_row(const QueryArgs& args, int64_t row) {
  const LayerModel& model = *args.model;
  const Slot slot(args.slots(row));
  if (slot.value() < 0) return;
  const BFloat16* kv_a = args.projected.row(row) + model.sizes.kv_a_at();
  BFloat16 c[kLatent];
  rms_norm(kv_a, model.kv_norm.data(), kLatent, model.config.eps, c);
  float values[kLatent];
  for (int i = 0; i < kLatent; ++i) values[i] = to_float(c[i]);
  const PhysicalRow at = physical_row(place_of(slot, args.kv.page), args.kv.stride_rows);
  encode_kv(args.kv.format, values, kv_a + kLatent, model.config.k_scale_inv, row_at(args.kv, at));
}

/// Steps 2 to 4 of one head.
void project_head(const QueryArgs& args, int64_t row, int head) {
  const LayerModel& model = *args.model;
  const int q_lora = model.sizes.q_lora;

  // Step 2: x = (W_QB[h] . q_c) ->bf16, nope then pe.
  BFloat16 x[kHeadQuery];
  for (int i = 0; i < kHeadQuery; ++i) {
    x[i] = to_bf16(dot(model.w_qb.row(int64_t(head) * kHeadQuery + i), args.q_c.row(row), q_lora));
  }

  // Step 3: u = (x_nope . W_UK[h]) ->bf16.
  double u[kLatent] = {};
  for (int i = 0; i < kNope; ++i) {
    const BFloat16* w_uk = model.kv_b.row(head, i);
    for (int j = 0; j < kLatent; ++j) u[j] += value_of(x[i]) * value_of(w_uk[j]);
  }

  // Step 4: [u | x_pe] as the cache format wants it.
  BFloat16 values[kQueryRow];
  for (int i = 0; i < kLatent; ++i) values[i] = to_bf16(u[i]);
  for (int i = 0; i < kPe; ++i) values[kLatent + i] = x[kNope + i];
  for (int i = 0; i < kQueryRow; ++i) {
    if (has_fp8_query(model.config.kv_format)) {
      args.query.e4m3(row, head)[i] = to_e4m3(to_float(values[i]) * model.config.q_scale_inv);
    } else {
      args.query.bf16(row, head)[i] = values[i];
    }
  }
}

void run(const QueryArgs& args, const Workspace& workspace) {
  const LayerModel& model = *args.model;
  const int64_t rows = args.projected.extent(0);
  workspace.threads->for_each(rows, [&](int64_t row, int) {
    rms_norm(args.projected.row(row), model.q_norm.data(), model.sizes.q_lora, model.config.eps, args.q_c.row(row));
    insert_row(args, row);
  });
  const int heads = model.sizes.heads;
  workspace.threads->for_each(rows * heads,
                              [&](int64_t task, int) { project_head(args, task / heads, int(task % heads)); });
}

constexpr Kernel<QueryArgs> kKernels[] = {{"reference", accept_all, no_scratch, run}};

}  // namespace

std::span<const Kernel<QueryArgs>> query_kernels() { return kKernels; }

}  // namespace dsacore::reference
