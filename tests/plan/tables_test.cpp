#include "plan/tables.h"

#include <gtest/gtest.h>

#include "dsacore/status.h"

namespace dsacore {
namespace {

constexpr const char* kText = R"({"version": 1, "tables": [
  {"backend": "cpu", "target": "avx2", "max_heads": 12, "kernels": {"query": "1-8:a,9-256:b"}, "overlap": "1-4:fork,5-256:serial",
   "partial": "proj"},
  {"backend": "cpu", "kernels": {"query": "c"}}]})";

std::string_view kernel(const Tables& tables, int rows) {
  return tables.kernels[static_cast<size_t>(StageId::kQuery)].find(rows).value_or("");
}

TEST(Tables, TakesTheFirstEntryThatFits) {
  const Tables exact = read_tables(kText, "text", "cpu", "avx2", 12);
  EXPECT_EQ(kernel(exact, 8), "a");
  EXPECT_EQ(kernel(exact, 9), "b");
  EXPECT_EQ(exact.overlap.find(4), "fork");
  EXPECT_EQ(exact.partial.find(1), "proj");
  EXPECT_EQ(kernel(read_tables(kText, "text", "cpu", "avx2", 13), 8), "c");
  EXPECT_EQ(kernel(read_tables(kText, "text", "cpu", "sse4", 12), 8), "c");
}

TEST(Tables, AnEntryMayBeMissing) {
  const Tables none = read_tables(kText, "text", "reference", "scalar", 12);
  EXPECT_EQ(kernel(none, 1), "");
  EXPECT_EQ(none.overlap.find(1), "serial");
  EXPECT_EQ(none.partial.find(1), "bf16");
}

TEST(Tables, TheBuiltInOnesCanBeRead) {
  for (const char* backend : {"reference", "cpu"}) {
    EXPECT_EQ(read_tables(builtin_tables(), "built-in", backend, "avx2", 12).overlap.find(1), "serial");
  }
}

TEST(Tables, TheBuiltInOnesOfTheCudaBackendCoverAllRows) {
  for (int heads : {6, 16, 24, 48, 96}) {
    const Tables tables = read_tables(builtin_tables(), "built-in", "cuda", "sm_90a", heads);
    for (int rows : {1, 8, 64, 256}) {
      EXPECT_TRUE(tables.overlap.find(rows).has_value()) << heads << " heads, " << rows << " rows";
      EXPECT_TRUE(tables.unfused_overlap.find(rows).has_value()) << heads << " heads, " << rows << " rows";
      const std::string_view core = tables.kernel_of(StageId::kSparseCore, IndexFormat::kFp8, 1, rows);
      const int few = heads <= 24 ? 23 : heads <= 48 ? 11 : 6;  // rows
      EXPECT_EQ(core, heads <= 16   ? "auto"
                      : rows <= few ? "few_heads"
                                    : "many_heads")
          << heads << " heads, " << rows << " rows";
    }
  }
}

TEST(Tables, TheUnfusedOverlapIsATableOfItsOwn) {
  constexpr const char* kUnfused =
      R"({"version": 1, "tables": [{"overlap": "late", "unfused_overlap": "1-8:fork,9-256:serial"}]})";
  const Tables tables = read_tables(kUnfused, "text", "cuda", "sm_90a", 12);
  EXPECT_EQ(tables.overlap_of(8), OverlapMode::kLate);
  EXPECT_EQ(tables.unfused_overlap_of(8), OverlapMode::kFork);
  EXPECT_EQ(tables.unfused_overlap_of(9), OverlapMode::kSerial);
  EXPECT_THROW(read_tables(R"({"version": 1, "tables": [{"unfused_overlap": "sideways"}]})", "text", "cuda", "", 12),
               Exception);
}

TEST(Tables, TheIndexerMayDependOnItsFormatAndQ) {
  constexpr const char* kIndexers =
      R"({"version": 1, "tables": [{"kernels": {"indexer": "1-8:a"}, "indexers": {"mxfp4": {"4": "5-256:stock"}}}]})";
  Tables tables = read_tables(kIndexers, "text", "cuda", "sm_90a", 12);
  const auto indexer = [&](IndexFormat format, int q, int rows) {
    return tables.kernel_of(StageId::kIndexer, format, q, rows);
  };
  EXPECT_EQ(indexer(IndexFormat::kMxfp4, 4, 8), "stock");
  EXPECT_EQ(indexer(IndexFormat::kMxfp4, 4, 4), "a");
  EXPECT_EQ(indexer(IndexFormat::kMxfp4, 2, 8), "a");
  EXPECT_EQ(indexer(IndexFormat::kFp8, 4, 8), "a");
  EXPECT_EQ(indexer(IndexFormat::kFp8, 4, 9), "auto");
  EXPECT_EQ(tables.kernel_of(StageId::kQuery, IndexFormat::kMxfp4, 4, 8), "auto");
  override_tables(tables, "indexer=fused", "");
  EXPECT_EQ(indexer(IndexFormat::kMxfp4, 4, 8), "fused") << "a list given at prepare holds for every format and q";
}

TEST(Tables, OptionsOverlayThem) {
  Tables tables = read_tables(kText, "text", "cpu", "avx2", 12);
  override_tables(tables, "query=1-256:z;indexer=y", "late");
  EXPECT_EQ(kernel(tables, 8), "z");
  EXPECT_EQ(tables.kernels[static_cast<size_t>(StageId::kIndexer)].find(1), "y");
  EXPECT_EQ(tables.overlap.find(200), "late");
}

TEST(Tables, RefusesMalformedText) {
  for (const char* text :
       {"", "{", "[]", R"({"version": 2, "tables": []})", R"({"version": 1})",
        R"({"version": 1, "tables": [{"kernels": {"nothing": "x"}}]})",
        R"({"version": 1, "tables": [{"overlap": "sideways"}]})", R"({"version": 1, "tables": [{"overlap": 3}]})",
        R"({"version": 1, "tables": [{"indexers": {"fp7": {"1": "stock"}}}]})",
        R"({"version": 1, "tables": [{"indexers": {"fp8": {"9": "stock"}}}]})",
        R"({"version": 1, "tables": [{"indexers": {"fp8": {"1": 3}}}]})",
        R"({"version": 1, "tables": [{"partial": "fp64"}]})"}) {
    EXPECT_THROW(read_tables(text, "text", "cpu", "avx2", 12), Exception) << text;
  }
  Tables tables;
  EXPECT_THROW(override_tables(tables, "nothing=x", ""), Exception);
  EXPECT_THROW(override_tables(tables, "query", ""), Exception);
  EXPECT_THROW(override_tables(tables, "", "sideways"), Exception);
}

}  // namespace
}  // namespace dsacore
