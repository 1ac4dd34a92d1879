#include "io/step_file.h"

#include <fmt/format.h>

#include <limits>
#include <utility>

#include "format/layouts.h"
#include "io/safetensors_writer.h"

namespace dsacore {
namespace {

constexpr std::string_view kFormat = "dsacore.step";
constexpr int64_t kMaxInt = std::numeric_limits<int>::max();

Exception refused(const SafetensorsFile& file, std::string_view what, std::string value, std::string allowed) {
  return file_error(ErrorCode::kRefused, file.name(), what, std::move(value), std::move(allowed));
}

/// B and q of the step.
void read_rows(StepFile& f, const SafetensorsTensor& projected) {
  const int64_t rows = projected.shape[0];
  if (rows < 1 || rows > kMaxInt)
    throw refused(f.file, projected.name, tensor_text(projected), "must have B rows, at least 1");
  const int64_t q = need_integer(f.file, "q");
  if (q < 1 || rows % q != 0) {
    throw refused(f.file, "q", std::to_string(q), fmt::format("must divide the {} rows of projected", rows));
  }
  f.step.batch = int(rows);
  f.step.q = int(q);
}

View<const int64_t, 1> read_slots(StepFile& f, std::string_view name) {
  const SafetensorsTensor& tensor = need_tensor(f.file, name, {ElementType::kI64}, 1);
  require_extent(f.file, tensor, 0, f.step.batch, fmt::format("must be the {} rows of projected", f.step.batch));
  return f.file.view<const int64_t, 1>(tensor);
}

View<const int32_t, 2> read_table(StepFile& f, std::string_view name, int64_t requests) {
  const SafetensorsTensor& tensor = need_tensor(f.file, name, {ElementType::kI32}, 2);
  require_extent(f.file, tensor, 0, requests, fmt::format("must be the {} requests", requests));
  return f.file.view<const int32_t, 2>(tensor);
}

int need_row_bytes(const SafetensorsFile& file, const SafetensorsTensor& tensor) {
  const int64_t row = tensor.shape.back();
  if (row < 1 || row > kMaxInt)
    throw refused(file, tensor.name, tensor_text(tensor), "the last axis must be the bytes of a row");
  return int(row);
}

int require_page(const SafetensorsFile& file, std::string_view what, int64_t page) {
  if (page >= kIndexPage && page % kIndexPage == 0 && page <= kMaxInt) return int(page);
  throw refused(file, what, std::to_string(page), "a page must have a multiple of 64 rows");
}

/// Physical rows are 32-bit numbers.
int64_t require_stride(const SafetensorsFile& file, int64_t stride_rows, int64_t page) {
  if (stride_rows >= page && stride_rows <= kMaxInt) return stride_rows;
  throw refused(file, "stride_rows", std::to_string(stride_rows),
                fmt::format("must be at least the page's {} rows and below 2^31", page));
}

/// [pages, P, row]: its pages lie side by side.
void read_paged_cache(StepFile& f, const SafetensorsTensor& tensor) {
  f.kv.pages = tensor.shape[0];
  f.kv.page = require_page(f.file, tensor.name, tensor.shape[1]);
  f.kv.stride_rows = f.kv.page;
  if (find_metadata(f.file, "stride_rows") != nullptr) {
    const int64_t stride_rows = require_stride(f.file, need_integer(f.file, "stride_rows"), f.kv.page);
    if (stride_rows > f.kv.page) {
      throw refused(f.file, "stride_rows", std::to_string(stride_rows),
                    fmt::format("a kv_cache of three axes has stride_rows equal to its page {}", f.kv.page));
    }
  }
  if (find_metadata(f.file, "page") != nullptr && need_integer(f.file, "page") != f.kv.page) {
    throw refused(f.file, "page", need_metadata(f.file, "page"),
                  fmt::format("kv_cache has pages of {} rows", f.kv.page));
  }
}

/// [(pages - 1) * stride_rows + P, row]: other layers' pages lie between.
void read_flat_cache(StepFile& f, const SafetensorsTensor& tensor) {
  f.flat = true;
  f.kv.page = require_page(f.file, "page", need_integer(f.file, "page"));
  f.kv.stride_rows = require_stride(f.file, need_integer(f.file, "stride_rows"), f.kv.page);
  const int64_t rows = tensor.shape[0];
  if (rows < f.kv.page || (rows - f.kv.page) % f.kv.stride_rows != 0) {
    throw refused(f.file, tensor.name, tensor_text(tensor),
                  fmt::format("rows must be (pages - 1) * stride_rows {} + page {}", f.kv.stride_rows, f.kv.page));
  }
  f.kv.pages = (rows - f.kv.page) / f.kv.stride_rows + 1;
}

void read_caches(StepFile& f) {
  const SafetensorsTensor* kv = f.file.find("kv_cache");
  const bool flat = kv != nullptr && kv->shape.size() == 2;
  kv = &need_tensor(f.file, "kv_cache", {ElementType::kU8}, flat ? 2 : 3);
  f.kv.row_bytes = need_row_bytes(f.file, *kv);
  flat ? read_flat_cache(f, *kv) : read_paged_cache(f, *kv);
  f.kv.data = f.file.data(*kv);

  const SafetensorsTensor& index = need_tensor(f.file, "index_cache", {ElementType::kU8}, 3);
  require_extent(f.file, index, 1, kIndexPage, "must be 64");
  f.index.pages = index.shape[0];
  f.index.row_bytes = need_row_bytes(f.file, index);
  f.index.data = f.file.data(index);
}

}  // namespace

StepFile parse_step_file(SafetensorsFile file) {
  require_format(file, kFormat);
  StepFile f{{}, {}, {}, false, {}, std::move(file)};
  const SafetensorsTensor& projected = need_tensor(f.file, "projected", {ElementType::kBf16}, 2);
  read_rows(f, projected);
  const int64_t requests = f.step.batch / f.step.q;
  f.step.projected = f.file.view<const BFloat16, 2>(projected);
  f.step.slots = read_slots(f, "slots");
  f.step.index_slots = read_slots(f, "index_slots");
  f.step.block_table = read_table(f, "block_table", requests);
  if (f.file.find("index_block_table") != nullptr)
    f.step.index_block_table = read_table(f, "index_block_table", requests);
  const SafetensorsTensor& seq_lens = need_tensor(f.file, "seq_lens", {ElementType::kI32}, 1);
  require_extent(f.file, seq_lens, 0, requests, fmt::format("must be the {} requests", requests));
  f.step.seq_lens = f.file.view<const int32_t, 1>(seq_lens);
  read_caches(f);
  f.unknown = unknown_fields(
      f.file,
      {"projected", "slots", "index_slots", "block_table", "index_block_table", "seq_lens", "kv_cache", "index_cache"},
      {"format", "version", "q", "stride_rows", "page"});
  return f;
}

StepFile read_step_file(const std::string& path) { return parse_step_file(SafetensorsFile::open(path)); }

void check_agreement(const LayerFile& layer, StepFile& f) {
  const int64_t width = layer.sizes.width();
  const int64_t pitch = f.step.projected.stride(0);
  if (pitch < width) {
    throw refused(f.file, "projected", fmt::format("pitch {}", pitch),
                  fmt::format("must be at least the {} elements of the layer's row", width));
  }
  const auto require_row = [&](const char* cache, int row, int wanted, std::string_view format) {
    if (row == wanted) return;
    throw refused(f.file, cache, fmt::format("rows of {} bytes", row),
                  fmt::format("{} rows have {} bytes", format, wanted));
  };
  const LayerConfig& config = layer.config;
  require_row("kv_cache", f.kv.row_bytes, row_bytes(config.kv_format), name_of(config.kv_format));
  require_row("index_cache", f.index.row_bytes, row_bytes(config.index_format), name_of(config.index_format));
  f.kv.format = config.kv_format;
  f.index.format = config.index_format;
  f.step.projected = View<const BFloat16, 2>(f.step.projected.data(), f.step.batch, width).with_pitch(pitch);
}

TensorView cache_tensor(const KvCache& kv, bool flat) {
  if (!flat) return tensor_view(View<const std::byte, 3>(kv.data, kv.pages, kv.page, kv.row_bytes));
  const int64_t rows = kv.pages == 0 ? 0 : (kv.pages - 1) * kv.stride_rows + kv.page;
  return tensor_view(View<const std::byte, 2>(kv.data, rows, kv.row_bytes));
}

TensorView cache_tensor(const KvCache& kv) { return cache_tensor(kv, kv.stride_rows > kv.page); }

TensorView cache_tensor(const IndexCache& index) {
  return tensor_view(View<const std::byte, 3>(index.data, index.pages, kIndexPage, index.row_bytes));
}

void write_step_file(const std::string& path, const Step& step, const KvCache& kv, const IndexCache& index) {
  FileMetadata metadata = {
      {"format", std::string(kFormat)}, {"version", std::string(kFileVersion)}, {"q", std::to_string(step.q)}};
  if (kv.stride_rows > kv.page) {
    metadata["stride_rows"] = std::to_string(kv.stride_rows);
    metadata["page"] = std::to_string(kv.page);
  }
  const View<const BFloat16, 2> projected(step.projected.data(), step.projected.extent(0), step.projected.stride(0));
  write_safetensors(path,
                    {{"projected", tensor_view(projected)},
                     {"slots", tensor_view(step.slots)},
                     {"index_slots", tensor_view(step.index_slots)},
                     {"block_table", tensor_view(step.block_table)},
                     {"index_block_table", tensor_view(step.index_block_table)},
                     {"seq_lens", tensor_view(step.seq_lens)},
                     {"kv_cache", cache_tensor(kv)},
                     {"index_cache", cache_tensor(index)}},
                    metadata);
}

}  // namespace dsacore
