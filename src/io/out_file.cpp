#include "io/out_file.h"

#include <fmt/format.h>

#include <utility>

#include "io/safetensors_writer.h"

namespace dsacore {
namespace {

constexpr std::string_view kFormat = "dsacore.out";

/// A tensor of the file, dense.
TensorView view_of(SafetensorsFile& file, const SafetensorsTensor& tensor) {
  TensorView view;
  view.data = file.data(tensor);
  view.type = *tensor.type;
  view.rank = int(tensor.shape.size());
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[size_t(i)];
    view.stride[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

}  // namespace

std::vector<std::pair<std::string_view, const TensorView*>> OutTensors::named() const {
  return {{"out", &out},
          {"q_c", &q_c},
          {"query", &query},
          {"index_query", &index_query},
          {"head_weights", &head_weights},
          {"topk_tokens", &topk_tokens},
          {"topk_rows", &topk_rows},
          {"valid", &valid},
          {"latent", &latent},
          {"lse", &lse},
          {"kv_cache", &kv_cache},
          {"index_cache", &index_cache}};
}

void write_out_file(const std::string& path, const OutTensors& tensors) {
  std::vector<NamedTensor> named;
  for (const auto& [name, view] : tensors.named()) named.push_back({std::string(name), *view});
  write_safetensors(path, named, {{"format", std::string(kFormat)}, {"version", std::string(kFileVersion)}});
}

OutFile parse_out_file(SafetensorsFile file) {
  require_format(file, kFormat);
  OutFile read{{}, {}, std::move(file)};
  constexpr ElementType kBf16 = ElementType::kBf16, kF32 = ElementType::kF32, kU8 = ElementType::kU8,
                        kI32 = ElementType::kI32;
  const SafetensorsTensor& out = need_tensor(read.file, "out", {kBf16}, 2);
  read.tensors.out = view_of(read.file, out);

  const auto optional = [&](std::string_view name, std::initializer_list<ElementType> types, int rank,
                            bool has_rows = true) {
    if (read.file.find(name) == nullptr) return TensorView{};
    const SafetensorsTensor& tensor = need_tensor(read.file, name, types, rank);
    if (has_rows)
      require_extent(read.file, tensor, 0, out.shape[0], fmt::format("must be the {} rows of out", out.shape[0]));
    return view_of(read.file, tensor);
  };
  OutTensors& t = read.tensors;
  t.q_c = optional("q_c", {kBf16}, 2);
  t.query = optional("query", {kBf16, kU8}, 3);
  t.index_query = optional("index_query", {kU8}, 3);
  t.head_weights = optional("head_weights", {kF32}, 2);
  t.topk_tokens = optional("topk_tokens", {kI32}, 2);
  t.topk_rows = optional("topk_rows", {kI32}, 2);
  t.valid = optional("valid", {kI32}, 1);
  t.latent = optional("latent", {kBf16}, 3);
  t.lse = optional("lse", {kF32}, 2);
  const SafetensorsTensor* kv = read.file.find("kv_cache");
  t.kv_cache = optional("kv_cache", {kU8}, kv != nullptr && kv->shape.size() == 2 ? 2 : 3, false);
  t.index_cache = optional("index_cache", {kU8}, 3, false);
  read.unknown = unknown_fields(read.file,
                                {"out", "q_c", "query", "index_query", "head_weights", "topk_tokens", "topk_rows",
                                 "valid", "latent", "lse", "kv_cache", "index_cache"},
                                {"format", "version"});
  return read;
}

OutFile read_out_file(const std::string& path) { return parse_out_file(SafetensorsFile::open(path)); }

}  // namespace dsacore
