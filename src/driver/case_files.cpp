#include "driver/case_files.h"

#include <utility>

#include "io/out_file.h"

namespace dsacore {
namespace {

/// A dense tensor of a vector's elements; absent where the vector is empty.
template <class T, class... Extents>
TensorView dense(const std::vector<T>& values, Extents... extents) {
  if (values.empty()) return {};
  return tensor_view(View<const T, sizeof...(Extents)>(values.data(), extents...));
}

}  // namespace

CaseFiles open_case(const std::string& layer_path, const std::string& step_path) {
  CaseFiles files{read_layer_file(layer_path), read_step_file(step_path)};
  check_agreement(files.layer, files.step);
  return files;
}

Inputs inputs_of(CaseFiles& files) {
  return {files.layer.config, files.layer.sizes, files.layer.weights, files.step.step, files.step.kv, files.step.index};
}

void write_outputs(const std::string& path, const Inputs& inputs, const Outputs& outputs, bool flat) {
  const int64_t rows = inputs.step.batch, heads = inputs.sizes.heads, index_heads = inputs.sizes.index_heads;
  const int64_t topk = inputs.config.topk;
  OutTensors tensors;
  tensors.out = dense(outputs.out, rows, heads * kValue);
  if (outputs.stages) {
    const StageDump& dump = *outputs.stages;
    const bool fp8 = has_fp8_query(inputs.config.kv_format);
    tensors.q_c = dense(dump.q_c, rows, int64_t(inputs.sizes.q_lora));
    tensors.query = tensor_view(View<const std::byte, 3>(dump.query.data(), rows, heads, kQueryRow * (fp8 ? 1 : 2)),
                                fp8 ? ElementType::kU8 : ElementType::kBf16);
    tensors.index_query = dense(dump.index_query, rows, index_heads, kIndexDim);
    tensors.head_weights = dense(dump.head_weights, rows, index_heads);
    tensors.topk_tokens = dense(dump.topk_tokens, rows, topk);
    tensors.topk_rows = dense(dump.topk_rows, rows, topk);
    tensors.valid = dense(dump.valid, rows);
    tensors.latent = dense(dump.latent, rows, heads, kLatent);
    tensors.lse = dense(dump.lse, rows, heads);
    if (outputs.kv.data != nullptr) {
      tensors.kv_cache = cache_tensor(outputs.kv, flat);
      tensors.index_cache = cache_tensor(outputs.index);
    }
  }
  write_out_file(path, tensors);
}

}  // namespace dsacore
