#include "io/layer_file.h"

#include <fmt/format.h>

#include <limits>
#include <optional>
#include <utility>

#include "io/safetensors_writer.h"

namespace dsacore {
namespace {

constexpr std::string_view kFormat = "dsacore.layer";

constexpr std::string_view kQNorm = "q_a_layernorm.weight";
constexpr std::string_view kKvNorm = "kv_a_layernorm.weight";
constexpr std::string_view kQB = "q_b_proj.weight";
constexpr std::string_view kKvBName = "kv_b_proj.weight";
constexpr std::string_view kWqB = "indexer.wq_b.weight";
constexpr std::string_view kKNorm = "indexer.k_norm.weight";
constexpr std::string_view kKBias = "indexer.k_norm.bias";
constexpr std::string_view kQScale = "q_scale_inv";
constexpr std::string_view kKScale = "k_scale_inv";

/// Metadata that names a format.
template <class E>
E need_format_name(const SafetensorsFile& file, std::string_view key, std::optional<E> (*parse)(std::string_view),
                   const char* allowed) {
  const std::string& text = need_metadata(file, key);
  const std::optional<E> value = parse(text);
  if (!value) throw file_error(ErrorCode::kRefused, file.name(), key, printable(text), allowed);
  return *value;
}

float need_scale(SafetensorsFile& file, std::string_view name) {
  const SafetensorsTensor& tensor = need_tensor(file, name, {ElementType::kF32}, 1);
  require_extent(file, tensor, 0, 1, "must be 1");
  return file.view<const float, 1>(tensor)(0);
}

LayerConfig read_config(SafetensorsFile& file) {
  LayerConfig c;
  c.kv_format = need_format_name<KvFormat>(file, "kv_format", kv_format_of, "allowed: fp8_ds_mla, fp8, nvfp4_ds_mla");
  c.index_format = need_format_name<IndexFormat>(file, "index_format", index_format_of, "allowed: fp8, mxfp4");
  const int64_t topk = need_integer(file, "topk");
  if (topk < 1 || topk > kMaxTopk) {
    throw file_error(ErrorCode::kRefused, file.name(), "topk", std::to_string(topk),
                     fmt::format("allowed 1..{}", kMaxTopk));
  }
  c.topk = int(topk);
  c.eps = need_number(file, "eps");
  c.softmax_scale = need_number(file, "softmax_scale");
  c.index_softmax_scale = need_number(file, "index_softmax_scale");
  c.index_head_scale = need_number(file, "index_head_scale");
  if (has_fp8_query(c.kv_format)) c.q_scale_inv = need_scale(file, kQScale);
  if (c.kv_format == KvFormat::kFp8) c.k_scale_inv = need_scale(file, kKScale);
  return c;
}

/// A weight whose shape the caller has checked.
TensorRef borrow(SafetensorsFile& file, const SafetensorsTensor& tensor) {
  TensorRef ref{file.data(tensor), *tensor.type, int(tensor.shape.size()), {0, 0}};
  for (size_t i = 0; i < tensor.shape.size(); ++i) ref.shape[i] = tensor.shape[i];
  return ref;
}

/// Extent of axis 0 as a count of groups of `rows`.
int need_groups(const SafetensorsFile& file, const SafetensorsTensor& tensor, int rows, const char* group) {
  const int64_t extent = tensor.shape[0];
  if (extent > 0 && extent % rows == 0 && extent / rows <= std::numeric_limits<int>::max()) return int(extent / rows);
  throw file_error(ErrorCode::kRefused, file.name(), tensor.name, tensor_text(tensor),
                   fmt::format("rows must be {} * {}", group, rows));
}

void read_weights(LayerFile& layer) {
  SafetensorsFile& file = layer.file;
  constexpr ElementType kBf16 = ElementType::kBf16;
  const SafetensorsTensor& q_norm = need_tensor(file, kQNorm, {kBf16}, 1);
  const SafetensorsTensor& kv_norm = need_tensor(file, kKvNorm, {kBf16}, 1);
  const SafetensorsTensor& q_b = need_tensor(file, kQB, {kBf16}, 2);
  const SafetensorsTensor& kv_b = need_tensor(file, kKvBName, {kBf16}, 2);
  const SafetensorsTensor& wq_b = need_tensor(file, kWqB, {kBf16}, 2);
  const SafetensorsTensor& k_norm = need_tensor(file, kKNorm, {ElementType::kF32, kBf16}, 1);

  const int64_t q_lora = q_norm.shape[0];
  const std::string q_lora_text = fmt::format("must be q_lora {}", q_lora);
  if (q_lora < 1 || q_lora > std::numeric_limits<int>::max()) {
    throw file_error(ErrorCode::kRefused, file.name(), q_norm.name, tensor_text(q_norm), "must hold q_lora weights");
  }
  const int heads = need_groups(file, q_b, kHeadQuery, "heads");
  const int index_heads = need_groups(file, wq_b, kIndexDim, "index heads");
  require_extent(file, kv_norm, 0, kLatent, "must be 512");
  require_extent(file, q_b, 1, q_lora, q_lora_text);
  require_extent(file, kv_b, 0, int64_t(heads) * kKvB, fmt::format("must be {} heads * 256", heads));
  require_extent(file, kv_b, 1, kLatent, "must be 512");
  require_extent(file, wq_b, 1, q_lora, q_lora_text);
  require_extent(file, k_norm, 0, kIndexDim, "must be 128");
  layer.sizes = {int(q_lora), heads, index_heads};

  LayerWeights& w = layer.weights;
  w.q_a_layernorm = borrow(file, q_norm);
  w.kv_a_layernorm = borrow(file, kv_norm);
  w.q_b_proj = borrow(file, q_b);
  w.kv_b_proj = borrow(file, kv_b);
  w.wq_b = borrow(file, wq_b);
  w.k_norm_weight = borrow(file, k_norm);
  if (file.find(kKBias) == nullptr) return;
  const SafetensorsTensor& k_bias = need_tensor(file, kKBias, {ElementType::kF32, kBf16}, 1);
  require_extent(file, k_bias, 0, kIndexDim, "must be 128");
  w.k_norm_bias = borrow(file, k_bias);
}

TensorView view_of(const TensorRef& ref) {
  TensorView view;
  view.data = static_cast<const std::byte*>(ref.data);
  view.type = ref.type;
  view.rank = ref.rank;
  for (int i = 0; i < ref.rank; ++i) view.shape[i] = ref.shape[i];
  view.stride[0] = ref.rank == 2 ? ref.shape[1] : 1;
  view.stride[1] = 1;
  return view;
}

}  // namespace

LayerFile parse_layer_file(SafetensorsFile file) {
  require_format(file, kFormat);
  LayerFile layer{{}, {}, {}, {}, std::move(file)};
  layer.config = read_config(layer.file);
  read_weights(layer);
  layer.unknown = unknown_fields(layer.file, {kQNorm, kKvNorm, kQB, kKvBName, kWqB, kKNorm, kKBias, kQScale, kKScale},
                                 {"format", "version", "kv_format", "index_format", "topk", "eps", "softmax_scale",
                                  "index_softmax_scale", "index_head_scale"});
  return layer;
}

LayerFile read_layer_file(const std::string& path) { return parse_layer_file(SafetensorsFile::open(path)); }

void write_layer_file(const std::string& path, const LayerConfig& config, const LayerWeights& weights) {
  const FileMetadata metadata = {{"format", std::string(kFormat)},
                                 {"version", std::string(kFileVersion)},
                                 {"kv_format", std::string(name_of(config.kv_format))},
                                 {"index_format", std::string(name_of(config.index_format))},
                                 {"topk", std::to_string(config.topk)},
                                 {"eps", number_text(config.eps)},
                                 {"softmax_scale", number_text(config.softmax_scale)},
                                 {"index_softmax_scale", number_text(config.index_softmax_scale)},
                                 {"index_head_scale", number_text(config.index_head_scale)}};
  std::vector<NamedTensor> tensors;
  const auto add = [&](std::string_view name, const TensorView& view) { tensors.push_back({std::string(name), view}); };
  add(kQNorm, view_of(weights.q_a_layernorm));
  add(kKvNorm, view_of(weights.kv_a_layernorm));
  add(kQB, view_of(weights.q_b_proj));
  add(kKvBName, view_of(weights.kv_b_proj));
  add(kWqB, view_of(weights.wq_b));
  add(kKNorm, view_of(weights.k_norm_weight));
  add(kKBias, view_of(weights.k_norm_bias));
  if (has_fp8_query(config.kv_format)) add(kQScale, tensor_view(View<const float, 1>(&config.q_scale_inv, 1)));
  if (config.kv_format == KvFormat::kFp8) add(kKScale, tensor_view(View<const float, 1>(&config.k_scale_inv, 1)));
  write_safetensors(path, tensors, metadata);
}

}  // namespace dsacore
