// Tables files as they are written: what is read back, and which entries of an earlier file stay.
#include "plan/tables_file.h"

#include <gtest/gtest.h>

namespace dsacore {
namespace {

constexpr const char* kOthers = R"({"version": 1, "tables": [
  {"backend": "cuda", "max_heads": 24, "overlap": "front"},
  {"backend": "cpu", "target": "avx2", "overlap": "fork"},
  {"backend": "cpu", "overlap": "late", "partial": "proj"}]})";

TablesEntry entry(const char* backend, const char* target, int max_heads, const char* query) {
  TablesEntry e;
  e.backend = backend;
  e.target = target;
  e.max_heads = max_heads;
  e.tables.kernels[static_cast<size_t>(StageId::kQuery)] = RowTable::parse("query", query);
  e.tables.overlap = RowTable::parse("overlap", "1-8:front,9-256:serial");
  e.tables.unfused_overlap = RowTable::parse("unfused_overlap", "fork");
  e.tables.partial = RowTable::parse("partial", "bf16");
  return e;
}

std::string_view query_of(const std::string& text, const char* backend, const char* target, int heads, int rows) {
  static Tables tables;
  tables = read_tables(text, "text", backend, target, heads);
  return tables.kernels[static_cast<size_t>(StageId::kQuery)].find(rows).value_or("");
}

TEST(TablesFile, ReadsBackWhatWasWritten) {
  TablesEntry few = entry("cuda", "", 12, "1-16:fused");
  few.tables.indexers[{IndexFormat::kMxfp4, 8}] = RowTable::parse("indexers", "16-256:stock");
  const std::string text =
      tables_text({few, entry("cuda", "", 0, "split")}, {"a \"device\"", "2026-01-02", "dsacore", "shapes"}, kOthers);
  EXPECT_EQ(query_of(text, "cuda", "sm_90a", 12, 16), "fused");
  EXPECT_EQ(query_of(text, "cuda", "sm_90a", 12, 17), "");
  EXPECT_EQ(query_of(text, "cuda", "sm_90a", 13, 16), "split");
  const Tables tables = read_tables(text, "text", "cuda", "sm_90a", 12);
  EXPECT_EQ(tables.overlap_of(8), OverlapMode::kFront);
  EXPECT_EQ(tables.overlap_of(9), OverlapMode::kSerial);
  EXPECT_EQ(tables.unfused_overlap_of(9), OverlapMode::kFork);
  EXPECT_EQ(tables.partial.find(1), "bf16");
  EXPECT_EQ(tables.kernel_of(StageId::kIndexer, IndexFormat::kMxfp4, 8, 16), "stock");
  EXPECT_EQ(tables.kernel_of(StageId::kIndexer, IndexFormat::kMxfp4, 8, 15), "auto");
  EXPECT_NE(text.find(R"("device":"a \"device\"")"), std::string::npos) << text;
}

TEST(TablesFile, KeepsTheEntriesOfOthers) {
  const std::string cuda = tables_text({entry("cuda", "", 0, "split")}, {}, kOthers);
  EXPECT_EQ(read_tables(cuda, "text", "cuda", "sm_90a", 12).overlap_of(9), OverlapMode::kSerial) << "replaced";
  EXPECT_EQ(read_tables(cuda, "text", "cpu", "avx2", 12).overlap_of(9), OverlapMode::kFork);

  const std::string cpu = tables_text({entry("cpu", "avx2", 0, "few")}, {}, kOthers);
  EXPECT_EQ(query_of(cpu, "cpu", "avx2", 12, 1), "few");
  EXPECT_EQ(read_tables(cpu, "text", "cpu", "sse4", 12).overlap_of(9), OverlapMode::kLate) << "of another target";
  EXPECT_EQ(cpu.find("fork\"}"), std::string::npos) << cpu;
}

}  // namespace
}  // namespace dsacore
