// Output files (spec 8): what a step gave, and with a dump the tensors between its stages. PreparedLayer -> file ->
// comparison.
#pragma once

#include <string>
#include <vector>

#include "io/file_fields.h"
#include "io/safetensors.h"
#include "io/tensor_view.h"

namespace dsacore {

/// The tensors of an output file; those not dumped are absent. `tensor_view` makes them from views, `cache_tensor`
/// (step_file.h) from caches.
struct OutTensors {
  TensorView out;           ///< BF16 [B, heads * 128]; always there
  TensorView q_c;           ///< BF16 [B, q_lora]
  TensorView query;         ///< BF16 or U8 [B, heads, 576]
  TensorView index_query;   ///< U8 [B, index_heads, 128]
  TensorView head_weights;  ///< F32 [B, index_heads]
  TensorView topk_tokens;   ///< I32 [B, topk]
  TensorView topk_rows;     ///< I32 [B, topk]
  TensorView valid;         ///< I32 [B]
  TensorView latent;        ///< BF16 [B, heads, 512]
  TensorView lse;           ///< F32 [B, heads]
  TensorView kv_cache;      ///< U8, in the shape of the step file's
  TensorView index_cache;   ///< U8 [pages, 64, row]

  /// All of them, absent ones too, with their names in the file.
  std::vector<std::pair<std::string_view, const TensorView*>> named() const;
};

/// Throws `kIo`; `out` must be there.
void write_out_file(const std::string& path, const OutTensors& tensors);

/// An output file as read: dense tensors, borrowed from `file`, also after a move.
struct OutFile {
  OutTensors tensors;
  UnknownFields unknown;
  SafetensorsFile file;
};

/// Reads an output file of version 1. Throws `kIo`, `kMalformedFile` or `kRefused`, naming the file and the tensor.
OutFile read_out_file(const std::string& path);
OutFile parse_out_file(SafetensorsFile file);

}  // namespace dsacore
