#include "dsacore/version.h"

#include "commit.h"
#include "plan/registry.h"

namespace dsacore {
namespace {

std::string joined(std::span<const std::string_view> names) {
  std::string text;
  for (std::string_view name : names) text += (text.empty() ? "" : " ") + std::string(name);
  return text;
}

}  // namespace

const char* version() { return DSACORE_VERSION; }
const char* commit() { return DSACORE_COMMIT; }
std::string backends() {
#if defined(DSACORE_CUDA)
  return "reference cpu cuda";
#else
  return "reference cpu";
#endif
}
std::string runnable_cpu_targets() { return joined(cpu_targets()); }
std::string compiled_cpu_target_names() { return joined(compiled_cpu_targets()); }
const char* cuda_version() {
#if defined(DSACORE_CUDA)
  return cuda_toolkit_version();
#else
  return "none";
#endif
}

}  // namespace dsacore
