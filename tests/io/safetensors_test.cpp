// The reader of safetensors files: what it takes, and one test for every way in which a file can be wrong.
#include "io/safetensors.h"

#include <gtest/gtest.h>

#include "io/io_support.h"

namespace dsacore::test {
namespace {

constexpr const char* kTwo = R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                             R"("b":{"dtype":"U8","shape":[2,2],"data_offsets":[8,12]}})";
constexpr std::string_view kTwoData("\0\0\x80\x3F\0\0\0\x40wxyz", 12);

/// Parses bytes in memory.
SafetensorsFile parse(std::string& bytes) {
  return SafetensorsFile::parse(std::as_writable_bytes(std::span(bytes)), "f");
}

TEST(Safetensors, ReadsTensorsAndMetadata) {
  std::string bytes = file_bytes(kTwo, kTwoData);
  SafetensorsFile file = parse(bytes);
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.metadata().at("k"), "v");
  EXPECT_EQ(file.find("c"), nullptr);
  const SafetensorsTensor* a = file.find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->type, ElementType::kF32);
  const auto view = file.view<float, 1>(*a);
  EXPECT_EQ(view.extent(0), 2);
  EXPECT_EQ(view(0), 1.0f);
  EXPECT_EQ(view(1), 2.0f);
  const auto b = file.view<uint8_t, 2>(*file.find("b"));
  EXPECT_EQ(b(1, 0), 'y');
}

TEST(Safetensors, TakesTensorsInAnyOrderAndSpacesAroundTheHeader) {
  std::string bytes = file_bytes(R"(  {"b":{"data_offsets":[1,3],"shape":[2],"dtype":"U8"},
      "none":{"dtype":"F32","shape":[0,7],"data_offsets":[1,1]},
      "scalar":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}   )",
                                 "xyz");
  SafetensorsFile file = parse(bytes);
  EXPECT_EQ((file.view<char, 1>(*file.find("b")))(0), 'y');
  EXPECT_EQ(file.find("scalar")->shape.size(), 0u);
}

TEST(Safetensors, KeepsTensorsOfUnknownTypes) {
  std::string bytes = file_bytes(R"({"x":{"dtype":"F4_NEW","shape":[9],"data_offsets":[0,3]},)"
                                 R"("y":{"dtype":"F64","shape":[1],"data_offsets":[3,11]}})",
                                 "abc12345678");
  SafetensorsFile file = parse(bytes);
  EXPECT_FALSE(file.find("x")->type.has_value());
  EXPECT_EQ(file.find("x")->dtype, "F4_NEW");
  EXPECT_FALSE(file.find("y")->type.has_value());
}

TEST(Safetensors, CopiesATensorThatTheFileDoesNotAlign) {
  const char* header =
      R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"y":{"dtype":"I64","shape":[2],"data_offsets":[1,17]}})";
  std::string data = "x";
  for (const int64_t value : {int64_t(-3), int64_t(1) << 40})
    data.append(reinterpret_cast<const char*>(&value), sizeof(value));
  std::string bytes = file_bytes(header, data);
  SafetensorsFile file = parse(bytes);
  const auto y = file.view<int64_t, 1>(*file.find("y"));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(y.data()) % alignof(int64_t), 0u);
  EXPECT_EQ(y(0), -3);
  EXPECT_EQ(y(1), int64_t(1) << 40);
  const SafetensorsFile moved = std::move(file);
  EXPECT_EQ(y(0), -3) << "views must outlive a move";
}

TEST(Safetensors, WritingToAMappedTensorLeavesTheFileAlone) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  const std::string before = file_bytes(kTwo, kTwoData);
  write_bytes(path, before);
  SafetensorsFile file = SafetensorsFile::open(path);
  const auto b = file.view<uint8_t, 2>(*file.find("b"));
  b(0, 0) = '!';
  EXPECT_EQ(b(0, 0), '!');
  EXPECT_TRUE(same_bytes(read_bytes(path), before));
}

TEST(Safetensors, NamesFilesThatCannotBeOpened) {
  const TempFolder folder;
  const Error missing = thrown_by([&] { SafetensorsFile::open(folder.file("none")); });
  EXPECT_EQ(missing.code, ErrorCode::kIo);
  EXPECT_EQ(missing.argument, folder.file("none"));
  EXPECT_EQ(missing.value, "No such file or directory");
  const Error directory = thrown_by([&] { SafetensorsFile::open(folder.file("")); });
  EXPECT_EQ(directory.code, ErrorCode::kIo);
  EXPECT_EQ(directory.value, "not a regular file");
}

TEST(Safetensors, RefusesEveryTruncation) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  const std::string whole = file_bytes(kTwo, kTwoData);
  for (size_t size = 0; size < whole.size(); ++size) {
    write_bytes(path, whole.substr(0, size));
    const Error error = thrown_by([&] { SafetensorsFile::open(path); });
    EXPECT_EQ(error.code, ErrorCode::kMalformedFile) << size << " bytes: " << error.message();
    EXPECT_EQ(error.argument.rfind(path + ": ", 0), 0u) << error.message();
  }
}

// ---- one wrong thing each ----

struct Wrong {
  const char* name;
  std::string bytes;
  std::string argument;
  std::string value;
};

std::string one_tensor(const std::string& dtype, const std::string& shape, const std::string& offsets,
                       std::string_view data) {
  return file_bytes("{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}", data);
}

std::string with_length(uint64_t length, std::string_view rest) {
  std::string bytes = file_bytes("", rest);
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes;
}

std::string nested(const char* open, int depth) {
  std::string text = "{\"a\":";
  for (int i = 0; i < depth; ++i) text += open;
  return file_bytes(text);
}

std::vector<Wrong> wrong_files() {
  const std::string a = R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})";
  const std::string b_at_1 = R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]})";
  const std::string b_at_3 = R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]})";
  return {
      {"Empty", "", "f: size", "0 bytes"},
      {"SevenBytes", std::string(7, '\0'), "f: size", "7 bytes"},
      {"NoHeader", file_bytes(""), "f: header", "JSON that breaks off at its byte 1"},
      {"HeaderBeyondFile", with_length(3, "{}"), "f: header length", "3"},
      {"HeaderTooLong", with_length(100'000'001, "{}"), "f: header length", "100000001"},
      {"HeaderLengthAllOnes", with_length(~uint64_t(0), "{}"), "f: header length", "18446744073709551615"},
      {"NotJson", file_bytes("{]"), "f: header", "JSON that breaks off at its byte 2"},
      {"TextAfterJson", file_bytes("{}x"), "f: header", "JSON that breaks off at its byte 3"},
      {"TwoObjects", file_bytes("{}{}"), "f: header", "JSON that breaks off at its byte 3"},
      {"NotUtf8", file_bytes("{\"\xFF\":1}"), "f: header", "JSON that breaks off at its byte 3"},
      {"Array", file_bytes("[]"), "f: header", "an array"},
      {"Number", file_bytes("17"), "f: header", "17"},
      {"String", file_bytes("\"x\""), "f: header", "\"x\""},
      {"Null", file_bytes("null"), "f: header", "null"},
      {"ArrayBomb", nested("[", 1000000), "f: a", "an array"},
      {"ObjectBomb", nested("{\"a\":", 1000000), "f: a", "a"},
      {"TensorIsNumber", file_bytes(R"({"a":1})"), "f: a", "1"},
      {"TensorIsTrue", file_bytes(R"({"a":true})"), "f: a", "true"},
      {"NameTwice", file_bytes("{" + a + "," + a + "}", "xx"), "f: header", "a"},
      {"MetadataTwice", file_bytes(R"({"__metadata__":{},"__metadata__":{}})"), "f: header", "__metadata__"},
      {"NulInName", file_bytes(R"({"a\u0000b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "xx"), "f: header",
       "a\\x00b"},
      {"MetadataIsArray", file_bytes(R"({"__metadata__":[]})"), "f: __metadata__", "an array"},
      {"MetadataNumber", file_bytes(R"({"__metadata__":{"q":1}})"), "f: __metadata__.q", "1"},
      {"MetadataNull", file_bytes(R"({"__metadata__":{"q":null}})"), "f: __metadata__.q", "null"},
      {"MetadataObject", file_bytes(R"({"__metadata__":{"q":{}}})"), "f: __metadata__.q", "an object"},
      {"MetadataKeyTwice", file_bytes(R"({"__metadata__":{"q":"1","q":"2"}})"), "f: __metadata__", "q"},
      {"NoDtype", file_bytes(R"({"a":{"shape":[2],"data_offsets":[0,2]}})", "xx"), "f: a.dtype", "absent"},
      {"NoShape", file_bytes(R"({"a":{"dtype":"U8","data_offsets":[0,2]}})", "xx"), "f: a.shape", "absent"},
      {"NoOffsets", file_bytes(R"({"a":{"dtype":"U8","shape":[2]}})", "xx"), "f: a.data_offsets", "absent"},
      {"UnknownKey", file_bytes(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":1}})", "xx"), "f: a",
       "more"},
      {"ShapeTwice", file_bytes(R"({"a":{"dtype":"U8","shape":[2],"shape":[2],"data_offsets":[0,2]}})", "xx"), "f: a",
       "shape"},
      {"DtypeNumber", one_tensor("8", "[2]", "[0,2]", "xx"), "f: a.dtype", "8"},
      {"DtypeArray", one_tensor("[]", "[2]", "[0,2]", "xx"), "f: a.dtype", "an array"},
      {"ShapeString", one_tensor("\"U8\"", "\"2\"", "[0,2]", "xx"), "f: a.shape", "\"2\""},
      {"ShapeNegative", one_tensor("\"U8\"", "[-2]", "[0,2]", "xx"), "f: a.shape", "-2"},
      {"ShapeFraction", one_tensor("\"U8\"", "[2.0]", "[0,2]", "xx"), "f: a.shape", "2.0"},
      {"ShapeExponent", one_tensor("\"U8\"", "[2e0]", "[0,2]", "xx"), "f: a.shape", "2e0"},
      {"ShapeText", one_tensor("\"U8\"", "[\"2\"]", "[0,2]", "xx"), "f: a.shape", "\"2\""},
      {"ShapeNested", one_tensor("\"U8\"", "[[2]]", "[0,2]", "xx"), "f: a.shape", "an array"},
      {"ShapeAbove63Bits", one_tensor("\"U8\"", "[9223372036854775808]", "[0,2]", "xx"), "f: a.shape",
       "9223372036854775808"},
      {"ShapeAbove64Bits", one_tensor("\"U8\"", "[18446744073709551616]", "[0,2]", "xx"), "f: a.shape",
       "18446744073709551616"},
      {"ProductOverflows", one_tensor("\"U8\"", "[4294967296,4294967296]", "[0,0]", ""), "f: a.shape",
       "[4294967296, 4294967296]"},
      {"BytesOverflow", one_tensor("\"I64\"", "[2305843009213693952]", "[0,0]", ""), "f: a.shape",
       "[2305843009213693952]"},
      {"OffsetsReversed", one_tensor("\"U8\"", "[2]", "[2,0]", "xx"), "f: a.data_offsets", "[2, 0]"},
      {"OneOffset", one_tensor("\"U8\"", "[2]", "[0]", "xx"), "f: a.data_offsets", "[0]"},
      {"ThreeOffsets", one_tensor("\"U8\"", "[2]", "[0,2,2]", "xx"), "f: a.data_offsets", "[0, 2, 2]"},
      {"OffsetNegative", one_tensor("\"U8\"", "[2]", "[-1,1]", "xx"), "f: a.data_offsets", "-1"},
      {"OffsetsBeyondFile", one_tensor("\"U8\"", "[3]", "[0,3]", "xx"), "f: a.data_offsets", "[0, 3]"},
      {"OffsetsFarBeyondFile", one_tensor("\"U8\"", "[3]", "[9223372036854775804,9223372036854775807]", "xx"),
       "f: a.data_offsets", "[9223372036854775804, 9223372036854775807]"},
      {"WrongSize", one_tensor("\"BF16\"", "[2]", "[0,2]", "xx"), "f: a.data_offsets", "[0, 2]"},
      {"WrongSizeOfForeignType", one_tensor("\"F64\"", "[1]", "[0,2]", "xx"), "f: a.data_offsets", "[0, 2]"},
      {"Overlap", file_bytes("{" + a + "," + b_at_1 + "}", "xyz"), "f: b.data_offsets", "[1, 3]"},
      {"Hole", file_bytes("{" + a + "," + b_at_3 + "}", "xy.zw"), "f: b.data_offsets", "[3, 5]"},
      {"HoleAtBegin", file_bytes("{" + b_at_1 + "}", "xyz"), "f: b.data_offsets", "[1, 3]"},
      {"MoreData", file_bytes("{" + a + "}", "xyz"), "f: data", "3 bytes"},
  };
}

class WrongSafetensors : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongSafetensors, IsRefusedByName) {
  std::string bytes = GetParam().bytes;
  const Error error = thrown_by([&] { parse(bytes); });
  EXPECT_EQ(error.code, ErrorCode::kMalformedFile);
  EXPECT_EQ(error.argument, GetParam().argument) << error.message();
  EXPECT_EQ(error.value, GetParam().value) << error.message();
  EXPECT_FALSE(error.allowed.empty());
}

INSTANTIATE_TEST_SUITE_P(Each, WrongSafetensors, ::testing::ValuesIn(wrong_files()),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace dsacore::test
