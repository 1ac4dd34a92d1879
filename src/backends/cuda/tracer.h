// The tracer of a cuda device. CUPTI's records name a kernel's graph node but not who recorded it, and graphs run on
// streams of the driver's choice: so each node is labelled when it is made, with what the device announced last, and
// the label passes to its copy in the executable graph.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "backends/cuda/cupti.h"
#include "plan/tracer.h"

namespace dsacore::cuda {

/// What is enqueued next.
struct Announcement {
  std::string_view stage;
  bool side = false;
};

class CuptiTracer final : public Tracer {
 public:
  /// `announced`: the device's, which changes as it enqueues.
  CuptiTracer(const Cupti& cupti, std::shared_ptr<const Announcement> announced);
  ~CuptiTracer() override;

  void start() override;
  void set_layer(int layer) override { layer_ = layer; }
  void clear() override;
  std::vector<DeviceWork> take() override;

 private:
  struct Label {
    Announcement announced;
    int layer = 0;
  };
  struct Record {
    DeviceWork work;
    uint64_t node = 0;    ///< of the graph; 0: none
    uint32_t launch = 0;  ///< number of the graph's launch, growing
  };

  static void CUPTIAPI on_resource(void* tracer, CUpti_CallbackDomain domain, CUpti_CallbackId what, const void* data);
  static void CUPTIAPI on_buffer_wanted(uint8_t** buffer, size_t* bytes, size_t* most_records);
  static void CUPTIAPI on_buffer_full(CUcontext context, uint32_t stream, uint8_t* buffer, size_t bytes, size_t valid);

  void add_node(bool cloned, const CUpti_GraphData& graph);
  void add_records(uint8_t* buffer, size_t valid);
  template <class Activity>
  void add(const Activity& activity, std::string name);

  Cupti cupti_;
  std::shared_ptr<const Announcement> announced_;
  int layer_ = 0;
  CUpti_SubscriberHandle subscriber_ = nullptr;
  std::map<uint64_t, Label> labels_;  ///< by graph node
  std::mutex mutex_;                  ///< of `records_`: CUPTI may bring buffers from a thread of its own
  std::vector<Record> records_;
};

}  // namespace dsacore::cuda
