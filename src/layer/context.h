// Context::Impl: what the layers of a context share.
#pragma once

#include <memory>
#include <string>

#include "dsacore/layer.h"
#include "plan/arena.h"
#include "plan/device.h"
#include "plan/plan.h"
#include "plan/registry.h"
#include "threads/threads.h"

namespace dsacore {

class Context::Impl {
 public:
  explicit Impl(const ContextOptions& options);

  /// Where tensors, scratch and packed weights lie.
  Memory& memory() { return device != nullptr ? device->memory() : host_memory(); }

  std::unique_ptr<Device> device;  ///< null: the backend computes on the host
  const Backend* backend = nullptr;
  BackendKind kind = BackendKind::kCpu;
  Threads threads;
  ScratchArena arena;
  Plans plans;
  std::string tables_text;
  std::string tables_source;
  std::function<void(std::string_view)> on_choice;
};

}  // namespace dsacore
