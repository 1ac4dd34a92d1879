#include "driver/rerun.h"

#include <algorithm>
#include <string>

#include "dsacore/status.h"
#include "format/numeric.h"
#include "plan/stage_id.h"

namespace dsacore {
namespace {

double dot(const BFloat16* a, const float* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double(to_float(a[i])) * double(b[i]);
  return sum;
}

/// The query row of one head (spec 4, steps 2 and 3), BF16 values.
void query_of_head(const LayerModel& model, int head, const float* q_c, float* row) {
  const int64_t q_lora = model.sizes.q_lora;
  float x[kHeadQuery];
  for (int i = 0; i < kHeadQuery; ++i) {
    x[i] = to_float(to_bf16(dot(model.w_qb.row(int64_t(head) * kHeadQuery + i), q_c, q_lora)));
  }
  double u[kLatent] = {};
  for (int i = 0; i < kNope; ++i) {
    const BFloat16* w_uk = model.kv_b.row(head, i);
    for (int j = 0; j < kLatent; ++j) u[j] += double(x[i]) * double(to_float(w_uk[j]));
  }
  for (int j = 0; j < kLatent; ++j) row[j] = to_float(to_bf16(u[j]));
  std::copy_n(x + kNope, kPe, row + kLatent);
}

}  // namespace

StageRerun::StageRerun(const Backend& backend, const Inputs& inputs, int threads)
    : backend_(backend),
      inputs_(inputs),
      owned_(make_model(inputs.config, inputs.weights)),
      threads_(threads),
      packed_(backend.packed_bytes(inputs.sizes), "packed weights"),
      shape_{inputs.sizes,
             inputs.config.kv_format,
             inputs.config.index_format,
             inputs.config.topk,
             inputs.step.batch,
             inputs.step.q,
             1,
             std::max<int64_t>(1, longest_context(inputs.step))} {
  if (packed_.size() > 0) {
    backend.pack(owned_.model, packed_.data(), threads_);
    owned_.model.packed = packed_.data();
  }
}

template <class Args>
void StageRerun::run(std::span<const Kernel<Args>> kernels, const Args& args) {
  for (const Kernel<Args>& kernel : kernels) {
    if (!kernel.accepts(shape_).ok) continue;
    const AlignedBytes scratch(kernel.scratch_bytes(shape_, threads_.count()), "kernel scratch");
    kernel.run(args, {{scratch.data(), size_t(scratch.size())}, &threads_, backend_.target_data});
    return;
  }
  throw Exception({ErrorCode::kUnsupported, "kernel", "none", std::string(backend_.name) + " has none for this shape"});
}

std::vector<std::byte> StageRerun::query(const BFloat16* q_c) {
  const LayerModel& m = owned_.model;
  const bool fp8 = has_fp8_query(m.config.kv_format);
  const int64_t rows = inputs_.step.batch, heads = m.sizes.heads, q_lora = m.sizes.q_lora;
  std::vector<std::byte> query(size_t(rows * heads * kQueryRow * (fp8 ? 1 : 2)));
  const QueryRows out{query.data(), m.sizes.heads, fp8 ? 1 : 2};
  threads_.for_each(rows * heads, [&](int64_t task, int) {
    const int64_t row = task / heads;
    const int head = int(task % heads);
    float wide[kMaxQLora] = {}, values[kQueryRow];
    for (int64_t i = 0; i < q_lora; ++i) wide[i] = to_float(q_c[row * q_lora + i]);
    query_of_head(m, head, wide, values);
    for (int i = 0; i < kQueryRow; ++i) {
      if (fp8) {
        out.e4m3(row, head)[i] = to_e4m3(values[i] * m.config.q_scale_inv);
      } else {
        out.bf16(row, head)[i] = to_bf16(values[i]);
      }
    }
  });
  return query;
}

IndexQuery StageRerun::index_query(const BFloat16* q_c) {
  const LayerSizes& sizes = owned_.model.sizes;
  const int64_t rows = inputs_.step.projected.extent(0);
  IndexQuery out{std::vector<uint8_t>(size_t(inputs_.step.batch) * size_t(sizes.index_heads) * kIndexDim),
                 std::vector<float>(size_t(inputs_.step.batch) * size_t(sizes.index_heads))};
  const std::vector<int64_t> nowhere(size_t(rows), -1);  // no index key is written
  run(backend_.index_projection,
      IndexProjectionArgs{&owned_.model, inputs_.step.projected, View<const BFloat16, 2>(q_c, rows, sizes.q_lora),
                          View<const int64_t, 1>(nowhere.data(), rows), inputs_.index,
                          View<uint8_t, 3>(out.codes.data(), rows, sizes.index_heads, kIndexDim),
                          View<float, 2>(out.weights.data(), rows, sizes.index_heads)});
  return out;
}

Attention StageRerun::attend(const std::byte* query, const std::vector<int32_t>& tokens,
                             const std::vector<int32_t>& valid, const KvCache& kv) {
  const LayerModel& m = owned_.model;
  const int64_t rows = inputs_.step.projected.extent(0), heads = m.sizes.heads, topk = m.config.topk;
  std::vector<int32_t> physical(tokens.size(), -1);
  for (int64_t b = 0; b < rows; ++b) {
    const int32_t* table = inputs_.step.block_table.row(b / inputs_.step.q);
    for (int64_t i = 0; i < valid[size_t(b)]; ++i) {
      const size_t at = size_t(b * topk + i);
      physical[at] = physical_row(kv_place(table, kv.page, LocalId(tokens[at])), kv.stride_rows).value();
    }
  }
  Attention out{std::vector<BFloat16>(size_t(inputs_.step.batch * heads * kLatent)),
                std::vector<float>(size_t(inputs_.step.batch * heads))};
  // Kernels take their query rows writable because stages share one type; they do not write them.
  std::vector<std::byte> own(query, query + rows * heads * kQueryRow * (has_fp8_query(m.config.kv_format) ? 1 : 2));
  run(backend_.sparse_core, SparseCoreArgs{&m,
                                           {own.data(), m.sizes.heads, has_fp8_query(m.config.kv_format) ? 1 : 2},
                                           View<const int32_t, 2>(physical.data(), rows, topk),
                                           View<const int32_t, 1>(valid.data(), rows),
                                           kv,
                                           View<BFloat16, 3>(out.latent.data(), rows, heads, kLatent),
                                           View<float, 2>(out.lse.data(), rows, heads)});
  return out;
}

std::vector<BFloat16> StageRerun::value(const std::vector<BFloat16>& latent) {
  const LayerModel& m = owned_.model;
  const Step& step = inputs_.step;
  const int64_t rows = step.projected.extent(0), heads = m.sizes.heads, width = heads * kValue;
  std::vector<BFloat16> out(size_t(step.batch * width));
  const View<const BFloat16, 2> gate = View<const BFloat16, 2>(step.projected.data() + m.sizes.gate_at(), rows, width)
                                           .with_pitch(step.projected.stride(0));
  run(backend_.value, ValueArgs{&m, View<const BFloat16, 3>(latent.data(), rows, heads, kLatent), m.w_uv(), gate,
                                View<BFloat16, 2>(out.data(), rows, width)});
  for (int64_t b = 0; b < rows; ++b) {
    if (step.seq_lens(b / step.q) == 0) std::fill_n(out.begin() + b * width, width, BFloat16{});
  }
  return out;
}

}  // namespace dsacore
