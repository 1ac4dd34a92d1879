// Names of formats and choices.
#include <gtest/gtest.h>

#include "dsacore/formats.h"

namespace dsacore {
namespace {

/// `name_of(value)` is `name`, and `of` leads back.
template <class E, class Of>
void expect_name(E value, std::string_view name, Of of) {
  EXPECT_EQ(name_of(value), name);
  ASSERT_TRUE(of(name).has_value()) << name;
  EXPECT_EQ(*of(name), value) << name;
}

template <class Of>
void expect_unknown(Of of) {
  for (const std::string_view text : {"", "x", "FP8", "fp8 ", " fp8", "fp8_", "CPU", "Bf16", "late-front", "unknown"}) {
    EXPECT_FALSE(of(text).has_value()) << text;
  }
}

TEST(Names, KvFormat) {
  expect_name(KvFormat::kFp8DsMla, "fp8_ds_mla", kv_format_of);
  expect_name(KvFormat::kFp8, "fp8", kv_format_of);
  expect_name(KvFormat::kNvfp4DsMla, "nvfp4_ds_mla", kv_format_of);
  EXPECT_FALSE(kv_format_of("mxfp4").has_value());
  expect_unknown(kv_format_of);
}

TEST(Names, IndexFormat) {
  expect_name(IndexFormat::kFp8, "fp8", index_format_of);
  expect_name(IndexFormat::kMxfp4, "mxfp4", index_format_of);
  EXPECT_FALSE(index_format_of("fp8_ds_mla").has_value());
  expect_unknown(index_format_of);
}

TEST(Names, Backend) {
  expect_name(BackendKind::kReference, "reference", backend_of);
  expect_name(BackendKind::kCpu, "cpu", backend_of);
  expect_name(BackendKind::kCuda, "cuda", backend_of);
  expect_unknown(backend_of);
}

TEST(Names, PartialFormat) {
  expect_name(PartialFormat::kAuto, "auto", partial_format_of);
  expect_name(PartialFormat::kBf16, "bf16", partial_format_of);
  expect_name(PartialFormat::kProj, "proj", partial_format_of);
  expect_unknown(partial_format_of);
}

TEST(Names, OverlapMode) {
  expect_name(OverlapMode::kSerial, "serial", overlap_mode_of);
  expect_name(OverlapMode::kWait, "wait", overlap_mode_of);
  expect_name(OverlapMode::kFork, "fork", overlap_mode_of);
  expect_name(OverlapMode::kFront, "front", overlap_mode_of);
  expect_name(OverlapMode::kLate, "late", overlap_mode_of);
  expect_name(OverlapMode::kLateFront, "late_front", overlap_mode_of);
  expect_unknown(overlap_mode_of);
}

TEST(Names, ElementType) {
  const auto expect = [](ElementType type, std::string_view name, int bytes) {
    EXPECT_EQ(name_of(type), name);
    EXPECT_EQ(element_bytes(type), bytes) << name;
  };
  expect(ElementType::kBf16, "BF16", 2);
  expect(ElementType::kF32, "F32", 4);
  expect(ElementType::kU8, "U8", 1);
  expect(ElementType::kI32, "I32", 4);
  expect(ElementType::kI64, "I64", 8);
}

TEST(Formats, QueryType) {
  EXPECT_FALSE(has_fp8_query(KvFormat::kFp8DsMla));
  EXPECT_TRUE(has_fp8_query(KvFormat::kFp8));
  EXPECT_TRUE(has_fp8_query(KvFormat::kNvfp4DsMla));
}

}  // namespace
}  // namespace dsacore
