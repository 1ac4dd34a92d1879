// Device: a device beside the host, as the layer and the driver see it: its memory, its queues and how they wait for
// each other. Backends that compute on the host have none.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dsacore/queue.h"
#include "memory/memory.h"
#include "plan/tracer.h"
#include "threads/threads.h"

namespace dsacore {

/// Enqueued work that was recorded once and can be replayed as it is, with what its tensors then hold.
class Recording {
 public:
  virtual ~Recording() = default;
  /// Replays it on the device's own queue and does not wait.
  virtual void replay() = 0;
  /// Seconds that each of `count` replays in a row took on the device, in order. Waits for them.
  virtual std::vector<double> time(int count) = 0;

 protected:
  Recording() = default;
  Recording(const Recording&) = default;
  Recording& operator=(const Recording&) = default;
};

class Device {
 public:
  virtual ~Device() = default;

  /// What it is and what drives it, e.g. "NVIDIA H200, driver 580.159.04".
  virtual std::string description() const = 0;
  virtual Memory& memory() = 0;
  /// Makes this device current for the calling thread and returns what was; `leave` brings that back.
  virtual int enter() = 0;
  virtual void leave(int previous) noexcept = 0;

  /// Takes a side queue where it has none yet: the device's, or one more where another context holds that. Not while
  /// work is recorded.
  virtual void open_side() = 0;
  virtual Queue side() const = 0;
  /// What is enqueued on `later` from now on starts after what `earlier` holds now. Both may be under recording.
  virtual void order(Queue earlier, Queue later) = 0;

  /// A queue of the device's own, for callers that bring none.
  virtual Queue own_queue() = 0;
  /// Returns when a queue is empty. Throws `kDevice` where what it held went wrong.
  virtual void wait(Queue queue) = 0;
  /// Records what `enqueue` puts on the queue it is given.
  virtual std::unique_ptr<Recording> record(FunctionRef<void(Queue)> enqueue) = 0;

  /// Says what is enqueued next, to the tracer where there is one; `stage` lives as long as the program.
  virtual void announce(Queue queue, std::string_view stage) noexcept = 0;
  /// The device's tracer, one at a time. `library`: the file of the library that it needs, empty: searched for. Throws
  /// `kDevice` naming what was looked for where it is not there.
  virtual std::unique_ptr<Tracer> make_tracer(const std::string& library) = 0;

 protected:
  Device() = default;
  Device(const Device&) = default;
  Device& operator=(const Device&) = default;
};

/// Makes a device current as long as it lives; null: nothing.
class DeviceScope {
 public:
  explicit DeviceScope(Device* device) : device_(device), previous_(device != nullptr ? device->enter() : 0) {}
  ~DeviceScope() {
    if (device_ != nullptr) device_->leave(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  Device* device_;
  int previous_;
};

}  // namespace dsacore
