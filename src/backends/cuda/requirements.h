// What a machine must have for the cuda backend, judged apart from the calls that find it out.
#pragma once

#include <string>

namespace dsacore::cuda {

/// What was found. CUDA versions are numbers as the runtime gives them: 13010 is 13.1.
struct Found {
  int toolkit = 0;           ///< that this build was made with
  int driver = 0;            ///< the newest CUDA that the driver runs; 0: no driver
  int devices = 0;           ///< that the driver shows
  int ordinal = 0;           ///< the one asked for
  std::string name;          ///< of that device
  int major = 0, minor = 0;  ///< its compute capability
};

/// "13.1".
std::string version_text(int version);

/// Throws `kUnsupported`, or `kRefused` for the ordinal, with what was found and what is needed. A driver must know the
/// toolkit's major version: later minor ones run on it too.
void require(const Found& found);

}  // namespace dsacore::cuda
