// Where CUPTI is looked for, and what is said where it is not there. Needs no GPU.
#include "backends/cuda/cupti.h"

#include <algorithm>
#include <cstdlib>

#include "support/layer.h"

namespace dsacore {
namespace {

const std::string kName = "libcupti.so." + std::to_string(CUPTI_API_VERSION / 10000);

TEST(Cupti, AGivenFileIsTheOnlyPlace) {
  EXPECT_EQ(cuda::cupti_places("some/file.so", "/opt/cuda"), std::vector<std::string>{"some/file.so"});
}

TEST(Cupti, IsLookedForByNameThenInTheToolkitsFolders) {
  const std::vector<std::string> places = cuda::cupti_places("", "/opt/cuda");
  ASSERT_GE(places.size(), 3u);
  EXPECT_EQ(places[0], kName);
  EXPECT_EQ(places[1], "/opt/cuda/extras/CUPTI/lib64/" + kName);
  EXPECT_NE(std::find(places.begin(), places.end(), "/usr/local/cuda/extras/CUPTI/lib64/" + kName), places.end());
  for (const char* home : {static_cast<const char*>(nullptr), ""}) {
    for (const std::string& place : cuda::cupti_places("", home)) {
      EXPECT_TRUE(place == kName || place.starts_with("/usr/local/cuda")) << place;
    }
  }
}

TEST(Cupti, SaysWhatWasTried) {
  const Error error = test::error_of([] { cuda::load_cupti({"/none/libcupti.so.13", "/nor/here.so"}); });
  EXPECT_EQ(error.code, ErrorCode::kDevice) << "exit status 1";
  for (const char* part : {"CUPTI", "not found", "--cupti", "/none/libcupti.so.13", "/nor/here.so"}) {
    EXPECT_NE(error.message().find(part), std::string::npos) << part << " is not in: " << error.message();
  }
}

TEST(Cupti, OfTheToolkitHasEveryFunction) {
  try {
    const cuda::Cupti cupti = cuda::load_cupti(cuda::cupti_places("", std::getenv("CUDA_HOME")));
    uint32_t version = 0;
    EXPECT_EQ(cupti.get_version(&version), CUPTI_SUCCESS);
    EXPECT_EQ(version / 10000, uint32_t(CUPTI_API_VERSION / 10000));
    EXPECT_NE(cupti.activity_get_num_dropped_records, nullptr) << "the last of them";
  } catch (const Exception& e) {
    GTEST_SKIP() << e.what();
  }
}

TEST(Cupti, AnotherLibraryIsRefused) {
  const Error error = test::error_of([] { cuda::load_cupti({"libm.so.6"}); });
  EXPECT_NE(error.message().find("cuptiGetVersion"), std::string::npos) << error.message();
}

}  // namespace
}  // namespace dsacore
