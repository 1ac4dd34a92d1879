#include "backends/cuda/tracer.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <string>

#include "backends/cuda/kernel_name.h"
#include "dsacore/status.h"

namespace dsacore::cuda {
namespace {

constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                         CUPTI_ACTIVITY_KIND_MEMSET};
constexpr CUpti_CallbackId kNodeEvents[] = {CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED,
                                            CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED};
constexpr size_t kBufferBytes = size_t(1) << 20;

/// Who gets the buffers, which CUPTI hands out without a pointer of their owner's.
std::atomic<CuptiTracer*> collector = nullptr;

}  // namespace

CuptiTracer::CuptiTracer(const Cupti& cupti, std::shared_ptr<const Announcement> announced)
    : cupti_(cupti), announced_(std::move(announced)) {}

CuptiTracer::~CuptiTracer() {
  if (subscriber_ == nullptr) return;
  for (CUpti_ActivityKind kind : kKinds) cupti_.activity_disable(kind);
  cupti_.activity_flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  cupti_.unsubscribe(subscriber_);
  collector = nullptr;
}

void CuptiTracer::start() {
  cupti_.check(cupti_.subscribe(&subscriber_, on_resource, this), "cuptiSubscribe");
  for (CUpti_CallbackId what : kNodeEvents) {
    cupti_.check(cupti_.enable_callback(1, subscriber_, CUPTI_CB_DOMAIN_RESOURCE, what), "cuptiEnableCallback");
  }
  collector = this;
  cupti_.check(cupti_.activity_register_callbacks(on_buffer_wanted, on_buffer_full), "cuptiActivityRegisterCallbacks");
  for (CUpti_ActivityKind kind : kKinds) cupti_.check(cupti_.activity_enable(kind), "cuptiActivityEnable");
}

void CuptiTracer::on_resource(void* tracer, CUpti_CallbackDomain, CUpti_CallbackId what, const void* data) {
  const auto* resource = static_cast<const CUpti_ResourceData*>(data);
  static_cast<CuptiTracer*>(tracer)->add_node(what == CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED,
                                              *static_cast<const CUpti_GraphData*>(resource->resourceDescriptor));
}

/// A copy is also announced as a node that is made, before or after: what it was copied from counts.
void CuptiTracer::add_node(bool cloned, const CUpti_GraphData& graph) {
  uint64_t node = 0, original = 0;
  if (cupti_.get_graph_node_id(graph.node, &node) != CUPTI_SUCCESS) return;
  if (!cloned) {
    labels_.try_emplace(node, Label{*announced_, layer_});
  } else if (cupti_.get_graph_node_id(graph.originalNode, &original) == CUPTI_SUCCESS) {
    if (const auto found = labels_.find(original); found != labels_.end()) labels_[node] = found->second;
  }
}

void CuptiTracer::on_buffer_wanted(uint8_t** buffer, size_t* bytes, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(std::malloc(kBufferBytes));
  *bytes = *buffer != nullptr ? kBufferBytes : 0;
  *most_records = 0;  // as many as fit
}

void CuptiTracer::on_buffer_full(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  if (CuptiTracer* tracer = collector; tracer != nullptr) tracer->add_records(buffer, valid);
  std::free(buffer);
}

template <class Activity>
void CuptiTracer::add(const Activity& activity, std::string name) {
  Record& record = records_.emplace_back();
  record.work.name = std::move(name);
  record.work.begin_ns = int64_t(activity.start);
  record.work.end_ns = int64_t(activity.end);
  record.node = activity.graphNodeId;
  record.launch = activity.correlationId;
}

void CuptiTracer::add_records(uint8_t* buffer, size_t valid) {
  const std::lock_guard lock(mutex_);
  CUpti_Activity* next = nullptr;
  while (cupti_.activity_get_next_record(buffer, valid, &next) == CUPTI_SUCCESS) {
    switch (next->kind) {
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
        const auto& kernel = *reinterpret_cast<const CUpti_ActivityKernel10*>(next);
        add(kernel, short_kernel_name(kernel.name));
        break;
      }
      case CUPTI_ACTIVITY_KIND_MEMCPY: add(*reinterpret_cast<const CUpti_ActivityMemcpy6*>(next), "copy"); break;
      case CUPTI_ACTIVITY_KIND_MEMSET: add(*reinterpret_cast<const CUpti_ActivityMemset4*>(next), "fill"); break;
      default: break;
    }
  }
}

void CuptiTracer::clear() {
  cupti_.check(cupti_.activity_flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
  const std::lock_guard lock(mutex_);
  records_.clear();
}

std::vector<DeviceWork> CuptiTracer::take() {
  cupti_.check(cupti_.activity_flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
  size_t lost = 0;
  cupti_.check(cupti_.activity_get_num_dropped_records(nullptr, 0, &lost), "cuptiActivityGetNumDroppedRecords");
  const std::lock_guard lock(mutex_);
  lost += size_t(std::count_if(records_.begin(), records_.end(), [](const Record& r) { return r.work.end_ns == 0; }));
  if (lost > 0) throw Exception({ErrorCode::kDevice, "CUPTI", std::to_string(lost) + " records", "were lost"});
  std::set<uint32_t> launches;
  for (const Record& record : records_) launches.insert(record.launch);
  std::vector<DeviceWork> works;
  for (Record& record : records_) {
    DeviceWork& work = works.emplace_back(std::move(record.work));
    work.replay = int(std::distance(launches.begin(), launches.find(record.launch)));
    if (const auto label = labels_.find(record.node); label != labels_.end()) {
      work.stage = label->second.announced.stage;
      work.side = label->second.announced.side;
      work.layer = label->second.layer;
    }
  }
  records_.clear();
  std::sort(works.begin(), works.end(),
            [](const DeviceWork& a, const DeviceWork& b) { return a.begin_ns < b.begin_ns; });
  return works;
}

}  // namespace dsacore::cuda
