// PlacedInputs: a copy of inputs in the memory of a backend, and its output: what a run on a device needs of tensors
// that came from files or a generator. Views keep their pitches; caches that are only described (`data` null) are zero.
#pragma once

#include <vector>

#include "driver/inputs.h"
#include "memory/memory.h"

namespace dsacore {

class PlacedInputs {
 public:
  /// Throws `kNoMemory` before it copies anything where the memory is seen to be too small.
  PlacedInputs(const Inputs& host, Memory& memory);

  /// With `step.out` in the memory too.
  const Inputs& inputs() const { return placed_; }
  /// Copies the caches back to `host`, which has the same layout.
  void fetch_caches(const Inputs& host) const;
  std::vector<BFloat16> fetch_out() const;

 private:
  const std::byte* place(const void* data, int64_t bytes, const char* what);
  TensorRef place(const TensorRef& tensor, const char* what);
  template <class T, int Rank>
  View<const T, Rank> place(View<const T, Rank> view, const char* what);

  Memory& memory_;
  std::vector<MemoryBlock> blocks_;
  Inputs placed_;
};

/// Bytes that `PlacedInputs` takes.
int64_t placed_bytes(const Inputs& inputs);

/// A dense view in a backend's memory, copied to the host.
template <class T, int Rank>
std::vector<std::remove_const_t<T>> fetched(View<T, Rank> view, const Memory& memory) {
  std::vector<std::remove_const_t<T>> values;
  if (view.empty()) return values;
  values.resize(size_t(view.size()));
  memory.copy_out(values.data(), reinterpret_cast<const std::byte*>(view.data()), view.size() * int64_t(sizeof(T)));
  return values;
}

}  // namespace dsacore
