// Guarded: memory for tests in which reading or writing past the end crashes, whatever instruction does it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

namespace dsacore {

/// An array that ends where memory ends: what reads or writes behind it crashes. Filled with 0xFF bytes.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count) : count_(count) {
    const auto page = size_t(sysconf(_SC_PAGESIZE));
    const size_t bytes = size_t(count) * sizeof(T);
    mapped_ = (bytes + page - 1) / page * page + page;
    map_ = static_cast<std::byte*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (map_ == MAP_FAILED || mprotect(map_ + mapped_ - page, page, PROT_NONE) != 0) throw std::bad_alloc();
    data_ = reinterpret_cast<T*>(map_ + mapped_ - page - bytes);
    poison();
  }
  ~Guarded() { munmap(map_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  void poison() const { std::memset(static_cast<void*>(data_), 0xFF, size_t(count_) * sizeof(T)); }
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return count_; }

 private:
  int64_t count_;
  size_t mapped_;
  std::byte* map_;
  T* data_;
};

}  // namespace dsacore
