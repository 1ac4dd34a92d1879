#include "cuda/device_stages.h"
TEST(Probe, Links) { dsacore::test::DeviceBuffer b(64); dsacore::test::sync(); EXPECT_NE(b.data(), nullptr); }
