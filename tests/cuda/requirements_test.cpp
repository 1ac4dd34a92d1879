// What the cuda backend says of machines that it cannot run on. Needs no GPU.
#include "backends/cuda/requirements.h"

#include "support/layer.h"

namespace dsacore {
namespace {

cuda::Found good() {
  cuda::Found found;
  found.toolkit = 13010;
  found.driver = 13000;
  found.devices = 2;
  found.ordinal = 1;
  found.name = "NVIDIA H200";
  found.major = 9;
  found.minor = 0;
  return found;
}

Error refusal(void (*spoil)(cuda::Found&)) {
  return test::error_of([&] {
    cuda::Found found = good();
    spoil(found);
    cuda::require(found);
  });
}

TEST(CudaRequirements, TakesADriverOfTheSameMajorVersionAndAHopper) { cuda::require(good()); }

TEST(CudaRequirements, NameWhatWasFoundAndWhatIsNeeded) {
  EXPECT_EQ(refusal([](cuda::Found& f) { f.driver = 0; }).message(),
            "CUDA driver = none: the cuda backend needs an NVIDIA driver for CUDA 13.0 or later");
  EXPECT_EQ(refusal([](cuda::Found& f) { f.driver = 12080; }).message(),
            "CUDA driver = for CUDA 12.8: this build (CUDA 13.1) needs a driver for CUDA 13.0 or later");
  EXPECT_EQ(refusal([](cuda::Found& f) { f.devices = 0; }).message(),
            "CUDA devices = 0: the cuda backend needs one of compute capability 9.0 (H100, H200)");
  EXPECT_EQ(refusal([](cuda::Found& f) { f.ordinal = 2; }).message(),
            "device = 2: allowed 0..1, the CUDA devices of this machine");
  EXPECT_EQ(refusal([](cuda::Found& f) { f.ordinal = -1; }).code, ErrorCode::kRefused);
  EXPECT_EQ(
      refusal([](cuda::Found& f) { f.name = "NVIDIA B200", f.major = 10; }).message(),
      "device 1 = NVIDIA B200, compute capability 10.0: the cuda backend needs compute capability 9.0 (H100, H200)");
  EXPECT_EQ(refusal([](cuda::Found& f) { f.major = 8; }).code, ErrorCode::kUnsupported);
}

TEST(CudaRequirements, VersionsAreText) {
  EXPECT_EQ(cuda::version_text(13000), "13.0");
  EXPECT_EQ(cuda::version_text(12080), "12.8");
}

}  // namespace
}  // namespace dsacore
