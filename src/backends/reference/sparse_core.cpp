// Step 11 of spec.md: query rows and the selected cache rows -> latent and lse of every head.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/reference/arithmetic.h"
#include "backends/reference/kernels.h"
#include "format/layouts.h"

namespace dsacore::reference {
namespace {

/// key_t: a cache row, dequantized (`fp8`: without k_scale, which is in the attention scale and at the latent's end).
void decode_row(KvFormat format, const std::byte* row, double* key) {
  for (int i = 0; i < kQueryRow; ++i) {
    switch (format) {
      case KvFormat::kFp8DsMla:
        // The product of a value and a scale that is no power of two is not exact in FP32.
        key[i] = i < kLatent ? kE4m3[uint8_t(row[KvFp8DsMla::kValuesAt + i])] *
                                   double(KvFp8DsMla::scale(row, i / KvFp8DsMla::kTile))
                             : double(KvFp8DsMla::value(row, i));
        break;
      case KvFormat::kFp8: key[i] = double(KvFp8::value(row, i)); break;
      case KvFormat::kNvfp4DsMla: key[i] = double(KvNvfp4DsMla::value(row, i)); break;
    }
  }
}

void decode_query(const SparseCoreArgs& args, int64_t row, int head, double* query) {
  for (int i = 0; i < kQueryRow; ++i) {
    query[i] = args.query.element == 1 ? kE4m3[args.query.e4m3(row, head)[i]] : value_of(args.query.bf16(row, head)[i]);
  }
}

/// One head over the decoded `keys` [valid, 576]; `p` [valid] is scratch.
void attend(const SparseCoreArgs& args, int64_t row, int head, const double* keys, int64_t valid, double* p) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const LayerModel& model = *args.model;
  double query[kQueryRow];
  decode_query(args, row, head, query);

  // p_t before its division: exp(scale * (query_h . key_t) - max).
  double max = -kInfinity;
  for (int64_t t = 0; t < valid; ++t) {
    p[t] = double(model.attention_scale()) * dot(query, keys + t * kQueryRow, kQueryRow);
    max = std::max(max, p[t]);
  }
  double sum = 0;
  double latent[kLatent] = {};
  for (int64_t t = 0; t < valid; ++t) {
    p[t] = std::exp(p[t] - max);
    sum += p[t];
    for (int i = 0; i < kLatent; ++i) latent[i] += p[t] * keys[t * kQueryRow + i];
  }

  // latent_h = (k_scale * sum_t p_t * value_t) ->bf16; with no valid row 0 and -inf.
  for (int i = 0; i < kLatent; ++i) {
    args.latent(row, head, i) = to_bf16(valid > 0 ? double(model.k_scale) * (latent[i] / sum) : 0.0);
  }
  args.lse(row, head) = float(valid > 0 ? max + std::log(sum) : -kInfinity);
}

/// One row's keys, and a row of probabilities for each thread.
int64_t scratch_bytes(const ShapeKey& shape, int threads) {
  return int64_t(shape.topk) * (kQueryRow + threads) * int64_t(sizeof(double));
}

void run(const SparseCoreArgs& args, const Workspace& workspace) {
  const int64_t topk = args.model->config.topk;
  double* keys = reinterpret_cast<double*>(workspace.scratch.data());
  double* probabilities = keys + topk * kQueryRow;
  for (int64_t row = 0; row < args.latent.extent(0); ++row) {
    const int64_t valid = args.valid(row);
    workspace.threads->for_each(valid, [&](int64_t t, int) {
      decode_row(args.kv.format, row_at(args.kv, PhysicalRow(args.topk_rows(row, t))), keys + t * kQueryRow);
    });
    workspace.threads->for_each(args.query.heads, [&](int64_t head, int worker) {
      attend(args, row, int(head), keys, valid, probabilities + worker * topk);
    });
  }
}

constexpr Kernel<SparseCoreArgs> kKernels[] = {{"reference", accept_all, scratch_bytes, run}};

}  // namespace

std::span<const Kernel<SparseCoreArgs>> sparse_core_kernels() { return kKernels; }

}  // namespace dsacore::reference
