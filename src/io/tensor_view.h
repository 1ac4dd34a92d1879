// TensorView: a borrowed tensor on its way to or from a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "dsacore/formats.h"
#include "dsacore/view.h"

namespace dsacore {

/// Up to three axes of any strides but a dense last axis; null data: absent.
struct TensorView {
  const std::byte* data = nullptr;
  ElementType type = ElementType::kU8;
  int rank = 0;
  int64_t shape[3] = {0, 0, 0};
  int64_t stride[3] = {0, 0, 0};  ///< in elements; the last is 1

  bool empty() const { return data == nullptr; }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  /// The elements of a tensor that is dense, as those read from a file are. `T` must be the type's.
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data);
  }
};

template <class T>
constexpr ElementType element_type_of() {
  using U = std::remove_const_t<T>;
  if constexpr (std::is_same_v<U, BFloat16>) return ElementType::kBf16;
  if constexpr (std::is_same_v<U, float>) return ElementType::kF32;
  if constexpr (std::is_same_v<U, int32_t>) return ElementType::kI32;
  if constexpr (std::is_same_v<U, int64_t>) return ElementType::kI64;
  if constexpr (std::is_same_v<U, uint8_t> || std::is_same_v<U, std::byte>) return ElementType::kU8;
}

/// The tensor that a view shows; a null view is an absent tensor.
template <class T, int Rank>
TensorView tensor_view(const View<T, Rank>& view) {
  static_assert(Rank <= 3);
  TensorView tensor;
  tensor.data = reinterpret_cast<const std::byte*>(view.data());
  tensor.type = element_type_of<T>();
  tensor.rank = Rank;
  for (int i = 0; i < Rank; ++i) {
    tensor.shape[i] = view.extent(i);
    tensor.stride[i] = view.stride(i);
  }
  return tensor;
}

/// Bytes that hold elements of `type`, e.g. the query rows of StageViews: the last axis shrinks from bytes to elements.
template <int Rank>
TensorView tensor_view(const View<const std::byte, Rank>& bytes, ElementType type) {
  TensorView tensor = tensor_view(bytes);
  const int size = element_bytes(type);
  tensor.type = type;
  tensor.shape[Rank - 1] /= size;
  for (int i = 0; i + 1 < Rank; ++i) tensor.stride[i] /= size;
  return tensor;
}

}  // namespace dsacore
