// CUPTI, the CUDA toolkit's tracing library: loaded when a trace is asked for and never linked, so that one binary
// starts everywhere.
#pragma once

#include <cupti.h>

#include <string>
#include <vector>

namespace dsacore::cuda {

/// The functions that tracer.cpp calls.
struct Cupti {
  decltype(&cuptiGetVersion) get_version;
  decltype(&cuptiGetResultString) get_result_string;
  decltype(&cuptiSubscribe) subscribe;
  decltype(&cuptiUnsubscribe) unsubscribe;
  decltype(&cuptiEnableCallback) enable_callback;
  decltype(&cuptiGetGraphNodeId) get_graph_node_id;
  decltype(&cuptiActivityRegisterCallbacks) activity_register_callbacks;
  decltype(&cuptiActivityEnable) activity_enable;
  decltype(&cuptiActivityDisable) activity_disable;
  decltype(&cuptiActivityFlushAll) activity_flush_all;
  decltype(&cuptiActivityGetNextRecord) activity_get_next_record;
  decltype(&cuptiActivityGetNumDroppedRecords) activity_get_num_dropped_records;

  /// Throws `kDevice` naming the call where it failed.
  void check(CUptiResult result, const char* call) const;
};

/// Where the library is looked for, in this order: `file` alone where it is given; else what the dynamic linker finds
/// under its name, then the folders of `cuda_home` (null: not set) and of the toolkit's usual places.
std::vector<std::string> cupti_places(const std::string& file, const char* cuda_home);

/// Loads it from the first place that has it, for good: the driver keeps calling it. Throws `kDevice` with what each
/// place said where none has, or where it belongs to another major version of CUDA than this build.
Cupti load_cupti(const std::vector<std::string>& places);

}  // namespace dsacore::cuda
