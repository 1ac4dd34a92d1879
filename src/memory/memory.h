// Memory: where a backend's tensors lie, host or device; MemoryBlock: a piece of it that its owner keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "memory/page_spread.h"

namespace dsacore {

class Memory {
 public:
  virtual ~Memory() = default;

  /// `bytes` above 0, zeroed, aligned to at least 64. Throws `kNoMemory` naming `what`.
  virtual std::byte* allocate(int64_t bytes, std::string_view what) = 0;
  virtual void free(std::byte* data, int64_t bytes) noexcept = 0;
  virtual void fill(std::byte* data, std::byte value, int64_t bytes) = 0;
  /// Both ends of the spread in this memory. Returns when the pages are there.
  virtual void spread_pages(const PageSpread& spread) = 0;
  /// From and to host memory. Both return when the bytes are there.
  virtual void copy_in(std::byte* to, const void* from_host, int64_t bytes) = 0;
  virtual void copy_out(void* to_host, const std::byte* from, int64_t bytes) const = 0;
  /// What can still be allocated, as far as that is known beforehand.
  virtual int64_t free_bytes() const = 0;
  /// Throws `kNoMemory` naming `what` where fewer than `bytes` are free.
  void require_free(int64_t bytes, std::string_view what) const;
  /// Throws `kRefused` naming `argument` where a pointer is seen to lie elsewhere.
  virtual void require_own(const void* data, std::string_view argument) const = 0;

 protected:
  Memory() = default;
  Memory(const Memory&) = default;
  Memory& operator=(const Memory&) = default;
};

/// The host's: pages on demand, large blocks in huge pages.
Memory& host_memory();

/// Owns bytes of a memory, which outlives it; zero until written.
class MemoryBlock {
 public:
  MemoryBlock() = default;
  /// Throws `kNoMemory` naming `what`; 0 bytes take nothing.
  MemoryBlock(Memory& memory, int64_t bytes, std::string_view what);
  MemoryBlock(MemoryBlock&& other) noexcept;
  MemoryBlock& operator=(MemoryBlock&& other) noexcept;
  ~MemoryBlock();

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  Memory* memory_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace dsacore
