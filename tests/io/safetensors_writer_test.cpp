// The writer of safetensors files: the bytes it makes, and that a name never holds half a file.
#include "io/safetensors_writer.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <numeric>

#include "io/io_support.h"

namespace dsacore::test {
namespace {

template <class T>
TensorView dense(const std::vector<T>& values) {
  return tensor_view(View<const T, 1>(values.data(), values.size()));
}

TEST(SafetensorsWriter, OrdersByElementSizeThenName) {
  const TempFolder folder;
  const std::vector<uint8_t> u8 = {1, 2, 3};
  const std::vector<int64_t> i64 = {-1};
  const std::vector<float> f32 = {1.0f};
  write_safetensors(folder.file("f"),
                    {{"u", dense(u8)}, {"b", dense(f32)}, {"a", dense(f32)}, {"z", dense(i64)}, {"none", {}}},
                    {{"y", "2"}, {"x", "1"}});
  const std::string header =
      R"({"__metadata__":{"x":"1","y":"2"},"z":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]},)"
      R"("u":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  const std::string data = std::string(8, '\xFF') + std::string("\0\0\x80\x3F\0\0\x80\x3F\1\2\3", 11);
  EXPECT_TRUE(same_bytes(read_bytes(folder.file("f")), file_bytes(padded, data)));
  EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
}

TEST(SafetensorsWriter, EscapesNamesAsTheOracleDoes) {
  const TempFolder folder;
  write_safetensors(folder.file("f"), {}, {{"a\"\\\n\x7F", "\xC3\xA9 \xF0\x9F\x98\x80"}});
  const std::string bytes = read_bytes(folder.file("f"));
  EXPECT_EQ(bytes.substr(8, bytes.find_last_of('}') - 7),
            R"({"__metadata__":{"a\"\\\n\u007f":"\u00e9 \ud83d\ude00"}})");
  EXPECT_EQ(SafetensorsFile::open(folder.file("f")).metadata().at("a\"\\\n\x7F"), "\xC3\xA9 \xF0\x9F\x98\x80");
}

TEST(SafetensorsWriter, GathersStridedTensors) {
  const TempFolder folder;
  std::vector<int32_t> values(2 * 100 * 70);
  std::iota(values.begin(), values.end(), 0);
  // [2, 3, 5] out of rows of 70 and planes of 100 rows.
  TensorView view = tensor_view(View<const int32_t, 3>(values.data(), 2, 3, 5));
  view.stride[0] = 100 * 70;
  view.stride[1] = 70;
  const auto rows = View<const int32_t, 2>(values.data(), 100, 60).with_pitch(70);
  write_safetensors(folder.file("f"), {{"a", view}, {"b", tensor_view(rows)}}, {});
  SafetensorsFile file = SafetensorsFile::open(folder.file("f"));
  const auto a = file.view<int32_t, 3>(*file.find("a"));
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 3; ++j) {
      for (int k = 0; k < 5; ++k) EXPECT_EQ(a(i, j, k), i * 7000 + j * 70 + k);
    }
  }
  const auto b = file.view<int32_t, 2>(*file.find("b"));
  for (int i = 0; i < 100; ++i) {
    for (int k = 0; k < 60; ++k) ASSERT_EQ(b(i, k), i * 70 + k) << i << ", " << k;
  }
}

TEST(SafetensorsWriter, WritesBytesAsElementsOfAType) {
  const TempFolder folder;
  const std::vector<uint16_t> codes = {1, 2, 3, 4, 5, 6};
  const View<const std::byte, 3> bytes(reinterpret_cast<const std::byte*>(codes.data()), 1, 2, 6);
  write_safetensors(folder.file("f"), {{"q", tensor_view(bytes, ElementType::kBf16)}}, {});
  SafetensorsFile file = SafetensorsFile::open(folder.file("f"));
  EXPECT_EQ(shape_text(file.find("q")->shape), "[1, 2, 3]");
  EXPECT_EQ((file.view<uint16_t, 3>(*file.find("q")))(0, 1, 2), 6);
}

TEST(SafetensorsWriter, LargeTensorsArriveWhole) {
  const TempFolder folder;
  std::vector<uint8_t> large(3'000'001);
  for (size_t i = 0; i < large.size(); ++i) large[i] = uint8_t(i * 2654435761u >> 13);
  const std::vector<uint8_t> small = {9, 8, 7};
  write_safetensors(folder.file("f"), {{"a", dense(small)}, {"b", dense(large)}, {"c", dense(small)}}, {});
  SafetensorsFile file = SafetensorsFile::open(folder.file("f"));
  EXPECT_EQ(std::memcmp(file.data(*file.find("b")), large.data(), large.size()), 0);
  EXPECT_EQ(std::memcmp(file.data(*file.find("c")), small.data(), small.size()), 0);
}

TEST(SafetensorsWriter, ReplacesAFileUnderItsReaders) {
  const TempFolder folder;
  const std::vector<uint8_t> before = {1};
  const std::vector<uint8_t> after = {2};
  write_safetensors(folder.file("f"), {{"a", dense(before)}}, {});
  SafetensorsFile old = SafetensorsFile::open(folder.file("f"));
  write_safetensors(folder.file("f"), {{"a", dense(after)}}, {});
  EXPECT_EQ(*old.data(*old.find("a")), std::byte(1)) << "an open mapping keeps the old file";
  SafetensorsFile now = SafetensorsFile::open(folder.file("f"));
  EXPECT_EQ(*now.data(*now.find("a")), std::byte(2));
}

TEST(SafetensorsWriter, WritesThroughASymbolicLink) {
  const TempFolder folder;
  write_bytes(folder.file("real"), "old");
  std::filesystem::create_symlink("real", folder.file("link"));
  write_safetensors(folder.file("link"), {}, {});
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
  EXPECT_EQ(read_bytes(folder.file("real")).size(), 8u + 24u);
}

TEST(SafetensorsWriter, NamesAFolderThatIsNotThere) {
  const TempFolder folder;
  const Error error = thrown_by([&] { write_safetensors(folder.file("no/f"), {}, {}); });
  EXPECT_EQ(error.code, ErrorCode::kIo);
  EXPECT_EQ(error.argument, folder.file("no/f"));
  EXPECT_EQ(error.value, "No such file or directory");
}

TEST(SafetensorsWriter, RefusesAFolder) {
  const TempFolder folder;
  const Error error = thrown_by([&] { write_safetensors(folder.file(""), {}, {}); });
  EXPECT_EQ(error.value, "Is a directory");
  EXPECT_TRUE(folder.names().empty());
}

TEST(SafetensorsWriter, NamesAFullDevice) {
  const std::vector<uint8_t> some(1000);
  const Error error = thrown_by([&] { write_safetensors("/dev/full", {{"a", dense(some)}}, {}); });
  EXPECT_EQ(error.code, ErrorCode::kIo);
  EXPECT_EQ(error.argument, "/dev/full");
  EXPECT_EQ(error.value, "No space left on device");
}

TEST(SafetensorsWriter, LeavesDevicesInPlace) {
  write_safetensors("/dev/null", {}, {});
  struct stat info {};
  ASSERT_EQ(::stat("/dev/null", &info), 0);
  EXPECT_TRUE(S_ISCHR(info.st_mode));
}

/// Lets no file of this process grow beyond `bytes`.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(SafetensorsWriter, AShortWriteLeavesTheOldFileAndNothingElse) {
  const TempFolder folder;
  write_bytes(folder.file("f"), "old");
  const std::vector<uint8_t> large(1'000'000);
  Error error;
  {
    const FileSizeLimit limit(300'000);
    error = thrown_by([&] { write_safetensors(folder.file("f"), {{"a", dense(large)}}, {}); });
  }
  EXPECT_EQ(error.code, ErrorCode::kIo);
  EXPECT_EQ(error.argument, folder.file("f"));
  EXPECT_EQ(error.value, "File too large");
  EXPECT_EQ(read_bytes(folder.file("f")), "old");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
}

}  // namespace
}  // namespace dsacore::test
