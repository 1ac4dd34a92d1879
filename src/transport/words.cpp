// Bulk stores and loads of window words, as relaxed and ordered atomics of 4 bytes.
#include <cstring>

#include "transport/transport.h"

namespace dsacore {

void store_words(uint32_t* to, std::span<const uint32_t> words) {
  if (words.empty()) return;
  const size_t last = words.size() - 1;
  for (size_t i = 0; i < last; ++i) std::atomic_ref<uint32_t>(to[i]).store(words[i], std::memory_order_relaxed);
  store_word(to[last], words[last]);
}

size_t take_words(uint32_t* from, size_t words, uint32_t armed, std::byte* out) {
  for (size_t i = 0; i < words; ++i) {
    const uint32_t word = load_word(from[i]);
    if (word == armed) return i;
    std::memcpy(out + i * sizeof(word), &word, sizeof(word));
    std::atomic_ref<uint32_t>(from[i]).store(armed, std::memory_order_relaxed);
  }
  return words;
}

}  // namespace dsacore
