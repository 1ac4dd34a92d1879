// A race on purpose, in a task body run by Threads: the thread sanitizer must report it, or its silence about the rest
// means nothing. Built in the tsan preset alone; CTest passes it when the report appears.
#include "threads/threads.h"

int main() {
  dsacore::Threads threads(2);
  long shared = 0;
  // Both threads come to the tasks in some of these calls.
  for (int i = 0; i < 1000; ++i) threads.for_each(1000, [&](int64_t, int) { ++shared; });
  return shared == 0 ? 1 : 0;
}
