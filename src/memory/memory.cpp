#include "memory/memory.h"

#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "dsacore/status.h"
#include "memory/aligned_bytes.h"

namespace dsacore {
namespace {

class HostMemory final : public Memory {
 public:
  std::byte* allocate(int64_t bytes, std::string_view what) override { return AlignedBytes(bytes, what).release(); }
  void free(std::byte* data, int64_t bytes) noexcept override { AlignedBytes::adopt(data, bytes); }
  void fill(std::byte* data, std::byte value, int64_t bytes) override { std::memset(data, int(value), size_t(bytes)); }
  void spread_pages(const PageSpread& s) override {
    for (int64_t page = 0; page < s.pages; ++page) {
      const std::byte* from = s.pool + pool_page_of(s, page) * s.page_bytes;
      std::byte* to = s.to + page * s.page_bytes;
      for (int i = 0; i < s.page_bytes / 8; ++i) {
        uint64_t word;
        std::memcpy(&word, from + i * 8, sizeof(word));
        word = spread_word(s, page, i, word);
        std::memcpy(to + i * 8, &word, sizeof(word));
      }
    }
  }
  void copy_in(std::byte* to, const void* from_host, int64_t bytes) override {
    std::memcpy(to, from_host, size_t(bytes));
  }
  void copy_out(void* to_host, const std::byte* from, int64_t bytes) const override {
    std::memcpy(to_host, from, size_t(bytes));
  }
  // Pages are taken as they are written: nothing is known beforehand.
  int64_t free_bytes() const override { return std::numeric_limits<int64_t>::max(); }
  void require_own(const void*, std::string_view) const override {}
};

}  // namespace

void Memory::require_free(int64_t bytes, std::string_view what) const {
  if (bytes <= free_bytes()) return;
  throw Exception({ErrorCode::kNoMemory, std::string(what), std::to_string(bytes) + " bytes",
                   std::to_string(free_bytes()) + " bytes of memory are free"});
}

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

MemoryBlock::MemoryBlock(Memory& memory, int64_t bytes, std::string_view what)
    : memory_(&memory), data_(bytes > 0 ? memory.allocate(bytes, what) : nullptr), size_(bytes) {}

MemoryBlock::MemoryBlock(MemoryBlock&& other) noexcept
    : memory_(other.memory_), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MemoryBlock& MemoryBlock::operator=(MemoryBlock&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MemoryBlock::~MemoryBlock() {
  if (data_ != nullptr) memory_->free(data_, size_);
}

}  // namespace dsacore
