// Step files: what is read back is what was written, one test for every way in which a step file can be wrong, and the
// agreement of a step with its layer.
#include "io/step_file.h"

#include <gtest/gtest.h>

#include <functional>

#include "io/io_support.h"

namespace dsacore::test {
namespace {

template <class T, int Rank>
void expect_same(const View<T, Rank>& a, const View<T, Rank>& b, const char* what) {
  ASSERT_EQ(a.empty(), b.empty()) << what;
  for (int i = 0; i < Rank; ++i) ASSERT_EQ(a.extent(i), b.extent(i)) << what << " axis " << i;
  for (int64_t i = 0; i < a.extent(0); ++i) {
    const int64_t row = Rank == 1 ? 1 : a.extent(Rank - 1);
    ASSERT_EQ(std::memcmp(a.row(i), b.row(i), size_t(row) * sizeof(T)), 0) << what << " row " << i;
  }
}

void expect_same_step(const Case& c, const StepFile& f) {
  EXPECT_EQ(f.step.batch, c.step.batch);
  EXPECT_EQ(f.step.q, c.step.q);
  EXPECT_TRUE(f.step.out.empty());
  expect_same(f.step.projected, c.step.projected, "projected");
  EXPECT_EQ(f.step.projected.stride(0), c.step.projected.stride(0));
  expect_same(f.step.slots, c.step.slots, "slots");
  expect_same(f.step.index_slots, c.step.index_slots, "index_slots");
  expect_same(f.step.block_table, c.step.block_table, "block_table");
  expect_same(f.step.index_block_table, c.step.index_block_table, "index_block_table");
  expect_same(f.step.seq_lens, c.step.seq_lens, "seq_lens");
  EXPECT_EQ(f.kv.format, c.kv.format);
  EXPECT_EQ(f.kv.pages, c.kv.pages);
  EXPECT_EQ(f.kv.page, c.kv.page);
  EXPECT_EQ(f.kv.stride_rows, c.kv.stride_rows);
  EXPECT_EQ(f.kv.row_bytes, c.kv.row_bytes);
  EXPECT_TRUE(same_bytes(bytes_of(cache_tensor(f.kv)), bytes_of(cache_tensor(c.kv))));
  EXPECT_EQ(f.index.format, c.index.format);
  EXPECT_EQ(f.index.pages, c.index.pages);
  EXPECT_EQ(f.index.row_bytes, c.index.row_bytes);
  EXPECT_TRUE(same_bytes(bytes_of(cache_tensor(f.index)), bytes_of(cache_tensor(c.index))));
}

/// Writes a case and reads its step back, agreed with its layer.
StepFile round_trip(const Case& c, const TempFolder& folder) {
  write_layer_file(folder.file("layer"), c.config, c.weights);
  write_step_file(folder.file("step"), c.step, c.kv, c.index);
  const LayerFile layer = read_layer_file(folder.file("layer"));
  StepFile step = read_step_file(folder.file("step"));
  check_agreement(layer, step);
  return step;
}

TEST(StepFile, ReadsBackWhatWasWritten) {
  const TempFolder folder;
  const Case c = make_case(small_case());
  const StepFile step = round_trip(c, folder);
  expect_same_step(c, step);
  EXPECT_FALSE(step.flat);
  EXPECT_TRUE(step.unknown.tensors.empty());
  EXPECT_TRUE(step.unknown.metadata.empty());
}

TEST(StepFile, ReadsBackAFlatCacheAWidePitchAndAnIndexTable) {
  const TempFolder folder;
  CaseOptions options = small_case();
  options.kv_format = KvFormat::kNvfp4DsMla;
  options.index_format = IndexFormat::kMxfp4;
  options.q = 2;
  options.page = 128;
  options.stride_rows = 320;
  options.pitch_pad = 24;
  options.index_table = true;
  options.pad_requests = 1;
  const Case c = make_case(options);
  const StepFile step = round_trip(c, folder);
  expect_same_step(c, step);
  EXPECT_TRUE(step.flat);
  FileParts parts(folder.file("step"));
  EXPECT_EQ(parts.metadata.at("stride_rows"), "320");
  EXPECT_EQ(parts.metadata.at("page"), "128");
  EXPECT_EQ(parts.at("kv_cache").rank, 2);
  EXPECT_EQ(parts.at("kv_cache").shape[0], (c.kv.pages - 1) * 320 + 128);
}

TEST(StepFile, AFlatCacheMayHaveNothingBetweenItsPages) {
  const TempFolder folder;
  const Case c = make_case(small_case());
  write_step_file(folder.file("step"), c.step, c.kv, c.index);
  FileParts parts(folder.file("step"));
  parts.reshape("kv_cache", {c.kv.pages * 64, c.kv.row_bytes});
  parts.metadata["stride_rows"] = "64";
  parts.metadata["page"] = "64";
  parts.write(folder.file("flat"));
  const StepFile step = read_step_file(folder.file("flat"));
  EXPECT_TRUE(step.flat);
  EXPECT_EQ(step.kv.pages, c.kv.pages);
  EXPECT_EQ(step.kv.stride_rows, 64);
  EXPECT_EQ(cache_tensor(step.kv, step.flat).rank, 2);
}

TEST(StepFile, TheCachesCanBeWrittenTo) {
  const TempFolder folder;
  const Case c = make_case(small_case());
  write_step_file(folder.file("step"), c.step, c.kv, c.index);
  const std::string before = read_bytes(folder.file("step"));
  const StepFile step = read_step_file(folder.file("step"));
  step.kv.data[17] ^= std::byte(0xFF);
  step.index.data[3] ^= std::byte(0xFF);
  EXPECT_TRUE(same_bytes(read_bytes(folder.file("step")), before));
}

TEST(StepFile, IgnoresWhatItDoesNotKnowAndSaysSo) {
  const TempFolder folder;
  const Case c = make_case(small_case());
  write_step_file(folder.file("step"), c.step, c.kv, c.index);
  FileParts parts(folder.file("step"));
  parts.metadata["note"] = "x";
  parts.tensors.push_back({"positions", parts.at("slots")});
  parts.write(folder.file("more"));
  const StepFile step = read_step_file(folder.file("more"));
  EXPECT_EQ(step.unknown.tensors, std::vector<std::string>{"positions"});
  EXPECT_EQ(step.unknown.metadata, std::vector<std::string>{"note"});
}

// ---- one wrong thing each ----

struct Wrong {
  const char* name;
  std::function<void(FileParts&)> change;
  ErrorCode code;
  std::string argument;
  std::string value;
};

std::function<void(FileParts&)> set(std::string key, std::string value) {
  return [=](FileParts& parts) { parts.metadata[key] = value; };
}
std::function<void(FileParts&)> reshape(std::string name, std::vector<int64_t> shape) {
  return [=](FileParts& parts) { parts.reshape(name, shape); };
}
std::function<void(FileParts&)> retype(std::string name, ElementType type) {
  return [=](FileParts& parts) { parts.retype(name, type); };
}

/// A flat cache of `rows` rows with these metadata.
std::function<void(FileParts&)> flat(int64_t rows, std::string page, std::string stride_rows) {
  return [=](FileParts& parts) {
    parts.reshape("kv_cache", {rows, 656});
    parts.metadata["page"] = page;
    parts.metadata["stride_rows"] = stride_rows;
  };
}

/// The files are of 4 requests with lengths 70, 3, 64 and 130: 7 owned and 2 spare pages, a width of 4.
std::vector<Wrong> wrong_steps() {
  constexpr ErrorCode kMalformed = ErrorCode::kMalformedFile;
  constexpr ErrorCode kRefused = ErrorCode::kRefused;
  std::vector<Wrong> wrong = {
      {"Format", set("format", "dsacore.layer"), kRefused, "format", "dsacore.layer"},
      {"Version", set("version", "2"), kRefused, "version", "2"},
      {"QText", set("q", "one"), kMalformed, "q", "\"one\""},
      {"QZero", set("q", "0"), kRefused, "q", "0"},
      {"QNegative", set("q", "-1"), kRefused, "q", "-1"},
      {"QDoesNotDivide", set("q", "3"), kRefused, "q", "3"},
      {"QHuge", set("q", "4294967297"), kRefused, "q", "4294967297"},
      {"NoRows", reshape("projected", {0, 1352}), kRefused, "projected", "BF16 [0, 1352]"},
      {"ProjectedType", retype("projected", ElementType::kU8), kRefused, "projected", "U8 [4, 1096]"},
      {"ProjectedAxes", reshape("projected", {4 * 1096}), kRefused, "projected", "BF16 [4384]"},
      {"SlotsType", retype("slots", ElementType::kI32), kRefused, "slots", "I32 [4]"},
      {"SlotsShort", reshape("slots", {3}), kRefused, "slots", "I64 [3]"},
      {"IndexSlotsShort", reshape("index_slots", {3}), kRefused, "index_slots", "I64 [3]"},
      {"TableAxes", reshape("block_table", {16}), kRefused, "block_table", "I32 [16]"},
      {"TableRequests", reshape("block_table", {2, 8}), kRefused, "block_table", "I32 [2, 8]"},
      {"IndexTableRequests", reshape("index_block_table", {8, 2}), kRefused, "index_block_table", "I32 [8, 2]"},
      {"IndexTableType", retype("index_block_table", ElementType::kF32), kRefused, "index_block_table", "F32 [4, 4]"},
      {"LengthsShort", reshape("seq_lens", {2}), kRefused, "seq_lens", "I32 [2]"},
      {"LengthsForOtherQ", set("q", "2"), kRefused, "block_table", "I32 [4, 4]"},
      {"CacheType", retype("kv_cache", ElementType::kF32), kRefused, "kv_cache", "F32 [9, 64, 656]"},
      {"CacheAxes", reshape("kv_cache", {9 * 64 * 656}), kRefused, "kv_cache", "U8 [377856]"},
      {"CacheRowEmpty", reshape("kv_cache", {9, 64, 0}), kRefused, "kv_cache", "U8 [9, 64, 0]"},
      {"PageOdd", reshape("kv_cache", {9, 63, 656}), kRefused, "kv_cache", "63"},
      {"PageEmpty", reshape("kv_cache", {9, 0, 656}), kRefused, "kv_cache", "0"},
      {"StrideAbovePage", set("stride_rows", "128"), kRefused, "stride_rows", "128"},
      {"StrideBelowPage", set("stride_rows", "63"), kRefused, "stride_rows", "63"},
      {"StrideText", set("stride_rows", "64 "), kMalformed, "stride_rows", "\"64 \""},
      {"PageDisagrees", set("page", "128"), kRefused, "page", "128"},
      {"FlatNoPage", reshape("kv_cache", {9 * 64, 656}), kMalformed, "page", "absent"},
      {"FlatPageOdd", flat(9 * 64, "32", "64"), kRefused, "page", "32"},
      {"FlatPageHuge", flat(9 * 64, "4294967296", "4294967296"), kRefused, "page", "4294967296"},
      {"FlatStrideBelowPage", flat(9 * 64, "64", "32"), kRefused, "stride_rows", "32"},
      {"FlatStrideHuge", flat(64, "64", "2147483648"), kRefused, "stride_rows", "2147483648"},
      {"FlatRows", flat(9 * 64, "64", "100"), kRefused, "kv_cache", "U8 [576, 656]"},
      {"FlatTooShort", flat(63, "64", "64"), kRefused, "kv_cache", "U8 [63, 656]"},
      {"IndexAxes", reshape("index_cache", {9 * 64, 132}), kRefused, "index_cache", "U8 [576, 132]"},
      {"IndexPage", reshape("index_cache", {9, 32, 264}), kRefused, "index_cache", "U8 [9, 32, 264]"},
      {"IndexRowEmpty", reshape("index_cache", {9, 64, 0}), kRefused, "index_cache", "U8 [9, 64, 0]"},
      {"NoQ", [](FileParts& parts) { parts.metadata.erase("q"); }, kMalformed, "q", "absent"},
  };
  for (const char* name : {"projected", "slots", "index_slots", "block_table", "seq_lens", "kv_cache", "index_cache"}) {
    wrong.push_back({name, [=](FileParts& parts) { parts.at(name).data = nullptr; }, kMalformed, name, "absent"});
  }
  return wrong;
}

class WrongStep : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongStep, IsRefusedByName) {
  const TempFolder folder;
  CaseOptions options = small_case();
  options.index_table = true;
  const Case c = make_case(options);
  write_step_file(folder.file("step"), c.step, c.kv, c.index);
  FileParts parts(folder.file("step"));
  GetParam().change(parts);
  const std::string path = folder.file("wrong");
  parts.write(path);
  const Error error = thrown_by([&] { read_step_file(path); });
  EXPECT_EQ(error.code, GetParam().code) << error.message();
  EXPECT_EQ(error.argument, path + ": " + GetParam().argument);
  EXPECT_EQ(error.value, GetParam().value);
  EXPECT_FALSE(error.allowed.empty());
}

INSTANTIATE_TEST_SUITE_P(Each, WrongStep, ::testing::ValuesIn(wrong_steps()),
                         [](const auto& tested) { return std::string(tested.param.name); });

// ---- agreement with the layer ----

/// The error of agreeing the step of one case with the layer of another.
Error disagreement(const CaseOptions& of_layer, const CaseOptions& of_step, std::string& path) {
  const TempFolder folder;
  const Case a = make_case(of_layer);
  const Case b = make_case(of_step);
  path = folder.file("step");
  write_layer_file(folder.file("layer"), a.config, a.weights);
  write_step_file(path, b.step, b.kv, b.index);
  const LayerFile layer = read_layer_file(folder.file("layer"));
  StepFile step = read_step_file(path);
  return thrown_by([&] { check_agreement(layer, step); });
}

TEST(Agreement, RefusesAPitchNarrowerThanTheRow) {
  CaseOptions more_heads = small_case();
  more_heads.heads = 3;
  std::string path;
  const Error error = disagreement(more_heads, small_case(), path);
  EXPECT_EQ(error.code, ErrorCode::kRefused);
  EXPECT_EQ(error.argument, path + ": projected");
  EXPECT_EQ(error.value, "pitch 1096");
  EXPECT_EQ(error.allowed, "must be at least the 1224 elements of the layer's row");
}

TEST(Agreement, RefusesRowsThatDoNotFitTheFormats) {
  std::string path;
  CaseOptions other = small_case();
  other.kv_format = KvFormat::kFp8;
  const Error kv = disagreement(other, small_case(), path);
  EXPECT_EQ(kv.argument, path + ": kv_cache");
  EXPECT_EQ(kv.value, "rows of 656 bytes");
  EXPECT_EQ(kv.allowed, "fp8 rows have 576 bytes");
  other = small_case();
  other.index_format = IndexFormat::kMxfp4;
  const Error index = disagreement(other, small_case(), path);
  EXPECT_EQ(index.argument, path + ": index_cache");
  EXPECT_EQ(index.value, "rows of 132 bytes");
  EXPECT_EQ(index.allowed, "mxfp4 rows have 68 bytes");
}

}  // namespace
}  // namespace dsacore::test
