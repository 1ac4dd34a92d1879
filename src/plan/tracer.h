// Tracer: sees when a device runs the kernels, copies and fills of recordings, and on which queue. Backends that
// compute on the host need none: their stages are timed where they run.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dsacore {

/// A kernel, a copy or a fill that a device ran.
struct DeviceWork {
  std::string name;        ///< of the kernel, without namespaces and parameters; else "copy" or "fill"
  std::string_view stage;  ///< as announced when it was recorded; empty: it was not recorded
  int layer = 0;           ///< as set when it was recorded
  bool side = false;       ///< recorded on the side queue
  int replay = 0;          ///< which one since `clear`, from 0
  int64_t begin_ns = 0, end_ns = 0;
};

class Tracer {
 public:
  virtual ~Tracer() = default;

  /// Begins to see what is recorded and what the device runs. Throws `kDevice` where another tool is at it.
  virtual void start() = 0;
  /// What is recorded from now on belongs to this layer.
  virtual void set_layer(int layer) = 0;
  /// Forgets what the device has run so far. With nothing in flight, as `take`.
  virtual void clear() = 0;
  /// What the device has run since `clear`, by beginning. Throws `kDevice` where some of it got lost.
  virtual std::vector<DeviceWork> take() = 0;

 protected:
  Tracer() = default;
  Tracer(const Tracer&) = default;
  Tracer& operator=(const Tracer&) = default;
};

}  // namespace dsacore
