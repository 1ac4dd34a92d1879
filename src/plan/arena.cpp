#include "plan/arena.h"

#include <algorithm>

namespace dsacore {

const MemoryBlock* ScratchArena::book(const std::string& name, int64_t bytes) {
  std::unique_ptr<MemoryBlock>& buffer = buffers_[name];
  if (buffer == nullptr) buffer = std::make_unique<MemoryBlock>();
  if (buffer->size() < bytes) {
    *buffer = MemoryBlock();  // first give back: both would not fit where memory is short
    *buffer = MemoryBlock(memory_, bytes, name);
  }
  return buffer.get();
}

int64_t ScratchArena::missing(const std::string& name, int64_t bytes) const {
  const auto found = buffers_.find(name);
  return std::max<int64_t>(0, bytes - (found != buffers_.end() ? found->second->size() : 0));
}

std::vector<ReservedItem> ScratchArena::items() const {
  std::vector<ReservedItem> items;
  items.reserve(buffers_.size());
  for (const auto& [name, buffer] : buffers_) items.push_back({name, buffer->size()});
  return items;
}

}  // namespace dsacore
