#include "backends/cuda/cupti.h"

#include <dlfcn.h>

#include "dsacore/status.h"

namespace dsacore::cuda {
namespace {

constexpr int kMajor = CUPTI_API_VERSION / 10000;  // records have this version's layout

[[noreturn]] void refuse(std::string value, std::string allowed) {
  throw Exception({ErrorCode::kDevice, "CUPTI", std::move(value), std::move(allowed)});
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) refuse(std::string("without ") + name, "the library of CUDA " + std::to_string(kMajor));
}

Cupti functions_of(void* library) {
  Cupti c{};
  find(library, "cuptiGetVersion", c.get_version);
  uint32_t version = 0;
  c.get_version(&version);
  if (int(version) / 10000 != kMajor) {
    refuse("version " + std::to_string(version), "this build needs that of CUDA " + std::to_string(kMajor));
  }
  find(library, "cuptiGetResultString", c.get_result_string);
  find(library, "cuptiSubscribe", c.subscribe);
  find(library, "cuptiUnsubscribe", c.unsubscribe);
  find(library, "cuptiEnableCallback", c.enable_callback);
  find(library, "cuptiGetGraphNodeId", c.get_graph_node_id);
  find(library, "cuptiActivityRegisterCallbacks", c.activity_register_callbacks);
  find(library, "cuptiActivityEnable", c.activity_enable);
  find(library, "cuptiActivityDisable", c.activity_disable);
  find(library, "cuptiActivityFlushAll", c.activity_flush_all);
  find(library, "cuptiActivityGetNextRecord", c.activity_get_next_record);
  find(library, "cuptiActivityGetNumDroppedRecords", c.activity_get_num_dropped_records);
  return c;
}

}  // namespace

void Cupti::check(CUptiResult result, const char* call) const {
  if (result == CUPTI_SUCCESS) return;
  const char* text = "an unknown error";
  get_result_string(result, &text);
  throw Exception({ErrorCode::kDevice, call, text, "CUPTI refused; another tracing tool may be at work"});
}

std::vector<std::string> cupti_places(const std::string& file, const char* cuda_home) {
  if (!file.empty()) return {file};
  const std::string name = "libcupti.so." + std::to_string(kMajor);
  std::vector<std::string> places = {name};
  std::vector<std::string> homes;
  if (cuda_home != nullptr && *cuda_home != '\0') homes.emplace_back(cuda_home);
  homes.emplace_back("/usr/local/cuda");
  homes.push_back("/usr/local/cuda-" + std::to_string(kMajor));
  for (const std::string& home : homes) {
    for (const char* folder : {"/extras/CUPTI/lib64/", "/lib64/", "/lib/"}) places.push_back(home + folder + name);
  }
  return places;
}

Cupti load_cupti(const std::vector<std::string>& places) {
  std::string said;
  for (const std::string& place : places) {
    if (void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL); library != nullptr) return functions_of(library);
    const char* error = dlerror();
    if (!said.empty()) said += "; ";
    said += error != nullptr ? error : place.c_str();
  }
  refuse("not found", "a trace needs the CUDA toolkit's libcupti.so." + std::to_string(kMajor) +
                          ", which --cupti FILE names; tried: " + said);
}

}  // namespace dsacore::cuda
