// Reader of safetensors files: a mapping of the file, its header checked (safetensors_header.h), and typed views into
// it. file -> SafetensorsFile -> layer_file, step_file, out_file.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dsacore/view.h"
#include "io/safetensors_header.h"
#include "io/tensor_view.h"

namespace dsacore {

/// Deleter of a mapping.
struct UnmapFile {
  size_t bytes = 0;
  void operator()(std::byte* mapped) const;
};

/// A file in memory. Data can be written to (a step inserts into its caches): the mapping is private, so the file does
/// not change and only pages that are touched cost memory. Views into it live as long as the object, also when it is
/// moved.
class SafetensorsFile {
 public:
  /// Maps a file. Throws `kIo` where it cannot be opened, `kMalformedFile` where it is not what it claims to be.
  static SafetensorsFile open(const std::string& path);
  /// The same for bytes that the caller keeps alive; `name` stands for the file in errors.
  static SafetensorsFile parse(std::span<std::byte> bytes, std::string name);

  const std::string& name() const { return name_; }
  int64_t bytes() const { return int64_t(bytes_.size()); }
  const std::vector<SafetensorsTensor>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string, std::less<>>& metadata() const { return header_.metadata; }
  /// Null where there is no such tensor.
  const SafetensorsTensor* find(std::string_view name) const;

  /// The tensor's bytes, aligned for its type: a tensor that the file does not align is copied once. `tensor` is one of
  /// ours.
  std::byte* data(const SafetensorsTensor& tensor);

  /// The tensor as a dense view. `T` and `Rank` must be its type and rank, which the caller has checked.
  template <class T, int Rank>
  View<T, Rank> view(const SafetensorsTensor& tensor) {
    T* data = reinterpret_cast<T*>(this->data(tensor));
    if constexpr (Rank == 1) return View<T, 1>(data, tensor.shape[0]);
    if constexpr (Rank == 2) return View<T, 2>(data, tensor.shape[0], tensor.shape[1]);
    if constexpr (Rank == 3) return View<T, 3>(data, tensor.shape[0], tensor.shape[1], tensor.shape[2]);
  }

 private:
  SafetensorsFile(std::span<std::byte> bytes, std::string name);

  std::string name_;
  std::unique_ptr<std::byte, UnmapFile> mapping_;
  std::span<std::byte> bytes_;
  std::byte* data_ = nullptr;  ///< behind the header
  SafetensorsHeader header_;
  std::vector<std::unique_ptr<std::byte[]>> aligned_;  ///< copies of tensors that the file does not align, by position
};

}  // namespace dsacore
