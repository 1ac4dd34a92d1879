// Any bytes as a layer file: an error that names what is wrong, or a layer whose weights lie inside the file.
#include "fuzz/fuzz_support.h"
#include "io/layer_file.h"
#include "layer/model.h"

namespace dsacore::fuzz {
namespace {

void touch_weight(const TensorRef& weight) {
  if (weight.data == nullptr) return;
  if (weight.rank == 1) {
    touch(weight.type == ElementType::kF32
              ? tensor_view(View<const float, 1>(static_cast<const float*>(weight.data), weight.shape[0]))
              : tensor_view(View<const BFloat16, 1>(static_cast<const BFloat16*>(weight.data), weight.shape[0])));
    return;
  }
  touch(tensor_view(
      View<const BFloat16, 2>(static_cast<const BFloat16*>(weight.data), weight.shape[0], weight.shape[1])));
}

void read(std::vector<std::byte>& bytes) {
  const LayerFile layer = parse_layer_file(SafetensorsFile::parse(bytes, "input"));
  const LayerWeights& w = layer.weights;
  for (const TensorRef& weight :
       {w.q_a_layernorm, w.kv_a_layernorm, w.q_b_proj, w.kv_b_proj, w.wq_b, w.k_norm_weight, w.k_norm_bias}) {
    touch_weight(weight);
  }
  const OwnedModel model = make_model(layer.config, w);
  require(model.model.sizes.width() == layer.sizes.width(), "prepare sees the sizes of the file");
}

}  // namespace
}  // namespace dsacore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes = dsacore::fuzz::file_of(data, size);
  try {
    dsacore::fuzz::read(bytes);
  } catch (const dsacore::Exception& e) {
    dsacore::fuzz::require_file_error(e);
  }
  return 0;
}
