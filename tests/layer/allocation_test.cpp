// run allocates nothing: every malloc and operator new of the library is counted (oneTBB's own pools live in its shared
// library, whose C allocations are its own).
#include <atomic>
#include <cstdlib>
#include <new>

#include "support/layer.h"

namespace {

std::atomic<long> allocations{0};
std::atomic<bool> counting{false};

void count() {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}

void* allocate(std::size_t bytes) {
  count();
  void* p = std::malloc(bytes > 0 ? bytes : 1);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }

extern "C" {
void* __real_malloc(size_t bytes);
void* __real_calloc(size_t count, size_t bytes);
void* __real_realloc(void* p, size_t bytes);
void* __real_aligned_alloc(size_t alignment, size_t bytes);
int __real_posix_memalign(void** p, size_t alignment, size_t bytes);

void* __wrap_malloc(size_t bytes) {
  count();
  return __real_malloc(bytes);
}
void* __wrap_calloc(size_t n, size_t bytes) {
  count();
  return __real_calloc(n, bytes);
}
void* __wrap_realloc(void* p, size_t bytes) {
  count();
  return __real_realloc(p, bytes);
}
void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  count();
  return __real_aligned_alloc(alignment, bytes);
}
int __wrap_posix_memalign(void** p, size_t alignment, size_t bytes) {
  count();
  return __real_posix_memalign(p, alignment, bytes);
}
}

namespace dsacore {
namespace {

TEST(Allocation, TheCountingWorks) {
  counting = true;
  void* volatile p = std::malloc(10);
  int* volatile q = new int(3);
  counting = false;
  std::free(p);
  delete q;
  EXPECT_GE(allocations.exchange(0), 2);
}

TEST(Allocation, RunAllocatesNothing) {
  for (BackendKind backend : {BackendKind::kReference, BackendKind::kCpu}) {
    for (int q : {1, 2}) {
      CaseOptions o;
      o.heads = 3;
      o.batch = 4;
      o.q = q;
      o.context = "3-3000";
      o.q_lora = 256;
      o.index_heads = 8;
      o.topk = 128;
      const Case c = make_case(o);
      Context context({.backend = backend, .threads = 2});
      test::CaseCaches caches(c);
      PreparedLayer layer(context, c.config, c.weights, test::options_for(c));
      layer.prepare_cache(caches.kv, caches.index);
      std::vector<uint16_t> out(size_t(o.batch) * size_t(o.heads) * kValue, 0xFFFF);
      Step step = c.step;
      step.out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), o.batch, int64_t(o.heads) * kValue);
      ASSERT_TRUE(layer.run(step).ok());
      const int runs = backend == BackendKind::kCpu ? 100 : 10;
      counting = true;
      bool ok = true;
      for (int i = 0; i < runs; ++i) ok = layer.run(step).ok() && ok;
      counting = false;
      EXPECT_TRUE(ok);
      EXPECT_EQ(allocations.exchange(0), 0) << name_of(backend) << " q = " << q;
    }
  }
}

}  // namespace
}  // namespace dsacore
