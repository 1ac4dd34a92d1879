#include "plan/arena.h"

namespace dsacore {

const AlignedBytes* ScratchArena::book(const std::string& name, int64_t bytes) {
  std::unique_ptr<AlignedBytes>& buffer = buffers_[name];
  if (buffer == nullptr) buffer = std::make_unique<AlignedBytes>();
  if (buffer->size() < bytes) *buffer = AlignedBytes(bytes, name);
  return buffer.get();
}

std::vector<ReservedItem> ScratchArena::items() const {
  std::vector<ReservedItem> items;
  for (const auto& [name, buffer] : buffers_) items.push_back({name, buffer->size()});
  return items;
}

}  // namespace dsacore
