// AlignedBytes: owns a block of memory, page aligned, zero until written; large blocks ask for huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dsacore {

/// Asks the system to back a block with huge pages where it is large enough to hold one: random rows of a cache then
/// cost fewer page walks, and streams over it run on. Before it is first written; a refusal changes nothing but speed.
void advise_huge_pages(void* data, int64_t bytes);

class AlignedBytes {
 public:
  AlignedBytes() = default;
  /// Throws `kNoMemory` naming `what`.
  AlignedBytes(int64_t bytes, std::string_view what);
  AlignedBytes(AlignedBytes&& other) noexcept;
  AlignedBytes& operator=(AlignedBytes&& other) noexcept;
  ~AlignedBytes();

  /// Takes over what `release` gave.
  static AlignedBytes adopt(std::byte* data, int64_t bytes);
  /// Hands the block to the caller.
  std::byte* release();

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace dsacore
