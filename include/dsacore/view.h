// View: a borrowed strided array of fixed rank, for host and device code. Strides count elements; the last axis is
// dense.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dsacore/host_device.h"

namespace dsacore {

/// Borrows `data`; the owner outlives the view. Indices are not checked. A default view is empty (`data() == nullptr`).
template <class T, int Rank>
class View {
 public:
  static_assert(Rank >= 1 && Rank <= 4);
  constexpr View() = default;

  /// A dense row-major array.
  template <class... Extents>
  DSACORE_HD constexpr explicit View(T* data, Extents... extents) : data_(data), extent_{int64_t(extents)...} {
    static_assert(sizeof...(Extents) == Rank);
    stride_[Rank - 1] = 1;
    for (int i = Rank - 1; i > 0; --i) stride_[i - 1] = stride_[i] * extent_[i];
  }

  /// The same with `pitch` elements between the starts of neighbours along the first axis.
  DSACORE_HD constexpr View with_pitch(int64_t pitch_elems) const {
    View v = *this;
    v.stride_[0] = pitch_elems;
    return v;
  }

  /// View<T> converts to View<const T>.
  template <class U>
    requires(std::is_const_v<T> && std::is_same_v<U, std::remove_const_t<T>>)
  DSACORE_HD constexpr View(const View<U, Rank>& other) : data_(other.data_) {
    for (int i = 0; i < Rank; ++i) {
      extent_[i] = other.extent_[i];
      stride_[i] = other.stride_[i];
    }
  }

  template <class... Index>
  DSACORE_HD constexpr T& operator()(Index... index) const {
    static_assert(sizeof...(Index) == Rank);
    const int64_t at[] = {int64_t(index)...};
    int64_t offset = 0;
    for (int i = 0; i < Rank; ++i) offset += at[i] * stride_[i];
    return data_[offset];
  }

  /// Pointer to the first element of `[i, ...]` along the first axis.
  DSACORE_HD constexpr T* row(int64_t i) const { return data_ + i * stride_[0]; }
  /// Pointer to the first element of `[i, j, ...]`.
  DSACORE_HD constexpr T* row(int64_t i, int64_t j) const { return data_ + i * stride_[0] + j * stride_[1]; }
  /// The first `n` along the first axis.
  DSACORE_HD constexpr View first(int64_t n) const {
    View v = *this;
    v.extent_[0] = n;
    return v;
  }

  DSACORE_HD constexpr T* data() const { return data_; }
  DSACORE_HD constexpr int64_t extent(int axis) const { return extent_[axis]; }
  DSACORE_HD constexpr int64_t stride(int axis) const { return stride_[axis]; }
  DSACORE_HD constexpr bool empty() const { return data_ == nullptr; }
  DSACORE_HD constexpr int64_t size() const {
    int64_t n = 1;
    for (int i = 0; i < Rank; ++i) n *= extent_[i];
    return n;
  }

 private:
  template <class U, int R>
  friend class View;

  T* data_ = nullptr;
  int64_t extent_[Rank] = {};
  int64_t stride_[Rank] = {};
};

}  // namespace dsacore
