// The cache layouts by format: sizes for checks, and one switch from a format to its struct.
#pragma once

#include <cstddef>

#include "format/index_fp8.h"
#include "format/index_mxfp4.h"
#include "format/kv_fp8.h"
#include "format/kv_fp8_ds_mla.h"
#include "format/kv_nvfp4_ds_mla.h"

namespace dsacore {

/// Calls `f` with a value of the format's layout struct and returns what it returns.
template <class F>
constexpr auto with_layout(KvFormat format, F&& f) {
  switch (format) {
    case KvFormat::kFp8DsMla: return f(KvFp8DsMla{});
    case KvFormat::kFp8: return f(KvFp8{});
    case KvFormat::kNvfp4DsMla: break;
  }
  return f(KvNvfp4DsMla{});
}
template <class F>
constexpr auto with_layout(IndexFormat format, F&& f) {
  return format == IndexFormat::kFp8 ? f(IndexFp8{}) : f(IndexMxfp4{});
}

constexpr int row_bytes(KvFormat format) {
  return with_layout(format, [](auto layout) { return layout.kRowBytes; });
}
constexpr int row_bytes(IndexFormat format) {
  return with_layout(format, [](auto layout) { return layout.kRowBytes; });
}

/// Packs one MLA cache row; `k_scale_inv` is read by `fp8` alone.
inline void encode_kv(KvFormat format, const float* c, const BFloat16* pe, float k_scale_inv, std::byte* row) {
  switch (format) {
    case KvFormat::kFp8DsMla: return KvFp8DsMla::encode(c, pe, row);
    case KvFormat::kFp8: return KvFp8::encode(c, pe, k_scale_inv, row);
    case KvFormat::kNvfp4DsMla: return KvNvfp4DsMla::encode(c, pe, row);
  }
}

/// Writes one index key as token `token` of a page.
inline void encode_index(IndexFormat format, const float* key, int token, std::byte* page) {
  format == IndexFormat::kFp8 ? IndexFp8::encode(key, token, page) : IndexMxfp4::encode(key, token, page);
}

}  // namespace dsacore
