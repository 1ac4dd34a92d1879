// Problems as text.
#include "driver/shape_text.h"

#include <gtest/gtest.h>

#include "support/layer.h"

namespace dsacore {
namespace {

TEST(ShapeText, ReadsKeysInAnyOrder) {
  const ProblemShape shape =
      parse_shape("len=65536,H=24,kv=nvfp4_ds_mla,q=2,B=16,index=mxfp4,dcp=4,I=64,topk=512,index_heads=64,q_lora=2048");
  EXPECT_EQ(shape.kv_format, KvFormat::kNvfp4DsMla);
  EXPECT_EQ(shape.index_format, IndexFormat::kMxfp4);
  EXPECT_EQ(shape.rows, 16);
  EXPECT_EQ(shape.q, 2);
  EXPECT_EQ(shape.heads, 24);
  EXPECT_EQ(shape.length, 65536);
  EXPECT_EQ(shape.ranks, 4);
  EXPECT_EQ(shape.interleave, 64);
  EXPECT_EQ(shape.topk, 512);
  EXPECT_EQ(shape.index_heads, 64);
  EXPECT_EQ(shape.q_lora, 2048);
}

TEST(ShapeText, PrintsWhatItReads) {
  for (const char* text : {"", "B=4,q=4", "kv=fp8,dcp=8,I=3"}) {
    const std::string printed = parse_shape(text).text();
    EXPECT_EQ(parse_shape(printed).text(), printed);
  }
}

TEST(ShapeText, RefusesWithKeyValueAndWhatIsAllowed) {
  const auto refused = [](const char* text) { return test::error_of([&] { parse_shape(text); }); };
  EXPECT_EQ(refused("B=0").message(), "B = 0: allowed 1..256");
  EXPECT_EQ(refused("B=x").argument, "B");
  EXPECT_EQ(refused("B=1e3").argument, "B");
  EXPECT_EQ(refused("q=9").allowed, "allowed 1..8");
  EXPECT_EQ(refused("kv=bf16").argument, "kv");
  EXPECT_EQ(refused("index=fp4").argument, "index");
  EXPECT_EQ(refused("q_lora=130").allowed, "allowed: multiples of 128");
  EXPECT_EQ(refused("len=2000000").allowed, "allowed 1..1048576");
  EXPECT_EQ(refused("heads=3").value, "heads");
  EXPECT_EQ(refused("B").allowed, "must be key=value");
  EXPECT_EQ(refused("B=1,B=2").allowed, "each key at most once");
  EXPECT_EQ(refused("B=3,q=2").allowed, "must be a multiple of q = 2");
}

}  // namespace
}  // namespace dsacore
