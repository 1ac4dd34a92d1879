// The device's memory: pages spread over it are those that host memory gets.
#include <gtest/gtest.h>

#include <vector>

#include "layer/context.h"

namespace dsacore {
namespace {

constexpr int kPageBytes = 4352, kPoolPages = 7;
constexpr int64_t kPages = 1000;

std::vector<std::byte> spread_in(Memory& memory, const std::vector<std::byte>& pool) {
  const MemoryBlock from(memory, int64_t(pool.size()), "pool"), to(memory, kPages * kPageBytes, "pages");
  memory.fill(to.data(), std::byte(0xCD), to.size());
  memory.copy_in(from.data(), pool.data(), from.size());
  memory.spread_pages({to.data(), kPages, from.data(), kPoolPages, kPageBytes, 4096, 0x11, 42});
  std::vector<std::byte> pages(size_t(to.size()));
  memory.copy_out(pages.data(), to.data(), to.size());
  return pages;
}

TEST(DeviceMemory, SpreadsPagesAsTheHostDoes) {
  std::vector<std::byte> pool(size_t(kPoolPages) * kPageBytes);
  for (size_t i = 0; i < pool.size(); ++i) pool[i] = std::byte(i * 2654435761u >> 13);
  Context context({.backend = BackendKind::kCuda});
  EXPECT_EQ(spread_in(context.impl().memory(), pool), spread_in(host_memory(), pool));
}

TEST(DeviceMemory, SpreadsNoPages) {
  Context context({.backend = BackendKind::kCuda});
  EXPECT_NO_THROW(context.impl().memory().spread_pages({nullptr, 0, nullptr, 1, kPageBytes, 0, 0, 0}));
}

}  // namespace
}  // namespace dsacore
