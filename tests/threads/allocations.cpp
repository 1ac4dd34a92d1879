// The program's `operator new`, counted. In a file of its own: GCC warns of a mismatch where it inlines only one of the
// pair.
#include "threads/allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<int64_t> count{0};
}

int64_t dsacore::allocations() { return count.load(); }

void* operator new(size_t bytes) {
  count.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
