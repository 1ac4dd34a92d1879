// Looking into generated cases: a hash of all their bytes, rows by token, who owns what.
#pragma once

#include <set>
#include <utility>
#include <vector>

#include "format/layouts.h"
#include "format/paging.h"
#include "io/io_support.h"
#include "io/step_file.h"

namespace dsacore::test {

/// FNV-1a over everything that a case holds.
class Hash {
 public:
  void add(const void* data, int64_t bytes) {
    const auto* at = static_cast<const uint8_t*>(data);
    for (int64_t i = 0; i < bytes; ++i) value_ = (value_ ^ at[i]) * 0x100000001B3u;
  }
  void add(const TensorRef& t) {
    int64_t bytes = t.data == nullptr ? 0 : element_bytes(t.type);
    for (int i = 0; i < t.rank; ++i) bytes *= t.shape[i];
    add(t.data, bytes);
  }
  void add(const TensorView& t) { add(t.data, t.empty() ? 0 : t.elements() * element_bytes(t.type)); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xCBF29CE484222325u;
};

inline uint64_t hash_of(const Case& c) {
  Hash hash;
  for (const TensorRef& t : {c.weights.q_a_layernorm, c.weights.kv_a_layernorm, c.weights.q_b_proj, c.weights.kv_b_proj,
                             c.weights.wq_b, c.weights.k_norm_weight, c.weights.k_norm_bias}) {
    hash.add(t);
  }
  hash.add(&c.config.q_scale_inv, sizeof(float));
  hash.add(&c.config.k_scale_inv, sizeof(float));
  const View<const BFloat16, 2> whole(c.step.projected.data(), c.step.batch, c.step.projected.stride(0));
  hash.add(tensor_view(whole));
  hash.add(tensor_view(c.step.slots));
  hash.add(tensor_view(c.step.index_slots));
  hash.add(tensor_view(c.step.block_table));
  hash.add(tensor_view(c.step.index_block_table));
  hash.add(tensor_view(c.step.seq_lens));
  hash.add(cache_tensor(c.kv));
  hash.add(cache_tensor(c.index));
  return hash.value();
}

/// Requests of the case that are not padding.
inline int live_requests(const CaseOptions& options) { return options.batch / options.q - options.pad_requests; }

inline Place kv_place(const Case& c, int request, int64_t token) {
  return dsacore::kv_place(c.step.block_table.row(request), c.kv.page, LocalId(int32_t(token)));
}
inline Place index_place(const Case& c, int request, int64_t token) {
  const int32_t* table = c.step.index_block_table.empty() ? nullptr : c.step.index_block_table.row(request);
  return dsacore::index_place(c.step.block_table.row(request), table, c.kv.page, LocalId(int32_t(token)));
}

inline std::string_view kv_row(const Case& c, int64_t physical) {
  return {reinterpret_cast<const char*>(c.kv.data) + physical * c.kv.row_bytes, size_t(c.kv.row_bytes)};
}
inline std::string_view kv_row(const Case& c, int request, int64_t token) {
  return kv_row(c, physical_row(kv_place(c, request, token), c.kv.stride_rows).value());
}

/// Values and scale of an index row, one after the other.
inline std::string index_row(const Case& c, Place place) {
  return with_layout(c.index.format, [&](auto layout) {
    const auto* page = reinterpret_cast<const char*>(c.index.data) + int64_t(place.page.value()) * layout.kPageBytes;
    return std::string(page + layout.value_at(place.offset), layout.kValueBytes) +
           std::string(page + layout.scale_at(place.offset), layout.kScaleBytes);
  });
}

inline bool all_ff(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == '\xFF'; });
}

/// Element `i` of 576 of a packed row, as its layout decodes it.
inline float kv_value(const Case& c, std::string_view row, int i) {
  return with_layout(c.kv.format,
                     [&](auto layout) { return layout.value(reinterpret_cast<const std::byte*>(row.data()), i); });
}

/// Whether this step inserts the token.
inline bool is_inserted(const Case& c, int request, int64_t token) {
  const int64_t position = token - (c.step.seq_lens(request) - c.step.q);
  return position >= 0 && c.step.slots(request * c.step.q + position) >= 0;
}

}  // namespace dsacore::test
