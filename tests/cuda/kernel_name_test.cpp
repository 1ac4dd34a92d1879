// Short names of kernels. Needs no GPU.
#include "backends/cuda/kernel_name.h"

#include <gtest/gtest.h>

namespace dsacore {
namespace {

TEST(KernelName, HasNeitherResultNorNamespacesNorParameters) {
  // void dsacore::cuda::(anonymous namespace)::value_fused<8, true>(dsacore::cuda::FusedParameters)
  EXPECT_EQ(cuda::short_kernel_name("_ZN7dsacore4cuda12_GLOBAL__N_111value_fusedILi8ELb1EEEvNS0_15FusedParametersE"),
            "value_fused<8, true>");
  // void dsacore::cuda::attend<dsacore::Layout, 16>(dsacore::Layout)
  EXPECT_EQ(cuda::short_kernel_name("_ZN7dsacore4cuda6attendINS_6LayoutELi16EEEvS2_"), "attend<Layout, 16>");
  EXPECT_EQ(cuda::short_kernel_name("_ZN7dsacore4cuda5plainEv"), "plain");
  EXPECT_EQ(cuda::short_kernel_name("memset_kernel"), "memset_kernel");
}

}  // namespace
}  // namespace dsacore
