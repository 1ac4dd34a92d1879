#include "backends/cuda/requirements.h"

#include "dsacore/status.h"

namespace dsacore::cuda {
namespace {

constexpr int kMajor = 9, kMinor = 0;  // sm_90a code runs on 9.0 and nowhere else

[[noreturn]] void refuse(ErrorCode code, std::string argument, std::string value, std::string allowed) {
  throw Exception({code, std::move(argument), std::move(value), std::move(allowed)});
}

}  // namespace

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void require(const Found& found) {
  const int needed = found.toolkit / 1000 * 1000;
  if (found.driver == 0) {
    refuse(ErrorCode::kUnsupported, "CUDA driver", "none",
           "the cuda backend needs an NVIDIA driver for CUDA " + version_text(needed) + " or later");
  }
  if (found.driver < needed) {
    refuse(ErrorCode::kUnsupported, "CUDA driver", "for CUDA " + version_text(found.driver),
           "this build (CUDA " + version_text(found.toolkit) + ") needs a driver for CUDA " + version_text(needed) +
               " or later");
  }
  if (found.devices == 0) {
    refuse(ErrorCode::kUnsupported, "CUDA devices", "0",
           "the cuda backend needs one of compute capability 9.0 (H100, H200)");
  }
  if (found.ordinal < 0 || found.ordinal >= found.devices) {
    refuse(ErrorCode::kRefused, "device", std::to_string(found.ordinal),
           "allowed 0.." + std::to_string(found.devices - 1) + ", the CUDA devices of this machine");
  }
  if (found.major != kMajor || found.minor != kMinor) {
    refuse(ErrorCode::kUnsupported, "device " + std::to_string(found.ordinal),
           found.name + ", compute capability " + std::to_string(found.major) + "." + std::to_string(found.minor),
           "the cuda backend needs compute capability 9.0 (H100, H200)");
  }
}

}  // namespace dsacore::cuda
