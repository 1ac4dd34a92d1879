// A race on purpose, in two tasks run by Threads: the thread sanitizer must report it, or its silence about the rest
// means nothing. Built in the tsan preset alone; CTest passes it when the report appears.
#include <atomic>
#include <thread>

#include "threads/threads.h"

int main() {
  dsacore::Threads threads(2);
  long shared = 0;
  // Each task awaits the other, so two threads have one each however late one of them comes; relaxed, because an
  // ordered wait would put one task's increments after the other's.
  std::atomic<int> come{0};
  threads.for_each(2, [&](int64_t, int) {
    come.fetch_add(1, std::memory_order_relaxed);
    while (come.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) ++shared;
  });
  return shared == 0 ? 1 : 0;
}
