#include "memory/aligned_bytes.h"

#include <sys/mman.h>

#include <utility>

#include "dsacore/status.h"

namespace dsacore {
namespace {

constexpr int64_t kHugePage = int64_t(2) << 20;

}  // namespace

void advise_huge_pages(void* data, int64_t bytes) {
  const auto misaligned = int64_t(reinterpret_cast<uintptr_t>(data) % uintptr_t(kHugePage));
  const int64_t skipped = misaligned == 0 ? 0 : kHugePage - misaligned;
  const int64_t whole = (bytes - skipped) / kHugePage * kHugePage;
  if (whole > 0) madvise(static_cast<std::byte*>(data) + skipped, size_t(whole), MADV_HUGEPAGE);
}

AlignedBytes::AlignedBytes(int64_t bytes, std::string_view what) : size_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw Exception(
        {ErrorCode::kNoMemory, std::string(what), std::to_string(bytes) + " bytes", "the system refused them"});
  }
  advise_huge_pages(p, bytes);
  data_ = static_cast<std::byte*>(p);
}

AlignedBytes::AlignedBytes(AlignedBytes&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

AlignedBytes& AlignedBytes::operator=(AlignedBytes&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

AlignedBytes AlignedBytes::adopt(std::byte* data, int64_t bytes) {
  AlignedBytes block;
  block.data_ = data;
  block.size_ = bytes;
  return block;
}

std::byte* AlignedBytes::release() {
  size_ = 0;
  return std::exchange(data_, nullptr);
}

AlignedBytes::~AlignedBytes() {
  if (data_ != nullptr) munmap(data_, size_t(size_));
}

}  // namespace dsacore
