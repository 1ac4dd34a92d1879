#include "io/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "dsacore/status.h"
#include "format/layouts.h"
#include "format/paging.h"
#include "io/case_keys.h"
#include "io/case_options.h"
#include "io/case_rows.h"
#include "memory/aligned_bytes.h"

namespace dsacore {
namespace {

constexpr BFloat16 kNanBits{0xFFFF};

/// Storage of the case for `n` elements, not initialised.
template <class T>
T* allocate(Case& made, int64_t n) {
  const int64_t bytes = std::max<int64_t>(n, 1) * int64_t(sizeof(T));
  try {
    made.storage.push_back(std::make_unique_for_overwrite<std::byte[]>(size_t(bytes)));
    advise_huge_pages(made.storage.back().get(), bytes);
  } catch (const std::bad_alloc&) {
    throw Exception(
        {ErrorCode::kNoMemory, "case", fmt::format("{} bytes", bytes), "must fit the memory; lower --context"});
  }
  return reinterpret_cast<T*>(made.storage.back().get());
}

void round_row(const float* x, BFloat16* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(x[i]);
}

// ---- the layer ----

/// [rows, fan_in], normal, with a few columns larger than the others.
TensorRef make_weight(Case& made, uint64_t seed, int64_t rows, int64_t fan_in, float gain) {
  BFloat16* out = allocate<BFloat16>(made, rows * fan_in);
  Noise noise(seed);
  Rng rng(~seed);
  std::vector<float> scale(size_t(fan_in), gain / std::sqrt(float(fan_in)));
  for (int64_t i = 0; i < std::max<int64_t>(1, fan_in / 256); ++i) scale[size_t(rng.below(fan_in))] *= 4;
  std::vector<float> row(scale.size());
  for (int64_t r = 0; r < rows; ++r) {
    noise.normal(row.data(), fan_in);
    for (int64_t i = 0; i < fan_in; ++i) row[size_t(i)] *= scale[size_t(i)];
    round_row(row.data(), out + r * fan_in, fan_in);
  }
  return {out, ElementType::kBf16, 2, {rows, fan_in}};
}

/// Norm weights around `centre`, a few of them three times as large.
std::vector<float> norm_values(uint64_t seed, int64_t n, float centre, float spread) {
  std::vector<float> values(static_cast<size_t>(n));
  Noise(seed).normal(values.data(), n);
  for (float& value : values) value = centre + spread * value;
  Rng rng(~seed);
  for (int64_t i = 0; centre != 0 && i < std::max<int64_t>(1, n / 128); ++i) values[size_t(rng.below(n))] *= 3;
  return values;
}

/// Stores a norm's weights and rounds `values` to what was stored.
TensorRef store_norm(Case& made, std::vector<float>& values, ElementType type) {
  const int64_t n = int64_t(values.size());
  if (type == ElementType::kF32) {
    float* out = allocate<float>(made, n);
    std::copy(values.begin(), values.end(), out);
    return {out, type, 1, {n, 0}};
  }
  BFloat16* out = allocate<BFloat16>(made, n);
  round_row(values.data(), out, n);
  std::transform(out, out + n, values.begin(), [](BFloat16 x) { return to_float(x); });
  return {out, type, 1, {n, 0}};
}

/// Fills the layer's part of the case and returns the source of its keys.
KeySource make_layer(Case& made, const CaseOptions& o, const CaseKinds& kinds) {
  const auto seed = [&](CasePart part, uint64_t which) { return part_seed(o.seed, part, which); };
  made.sizes = {o.q_lora, o.heads, o.index_heads};

  LayerWeights& w = made.weights;
  w.q_b_proj = make_weight(made, seed(CasePart::kWeights, 0), int64_t(o.heads) * kHeadQuery, o.q_lora, 1.5f);
  w.kv_b_proj = make_weight(made, seed(CasePart::kWeights, 1), int64_t(o.heads) * kKvB, kLatent, 1.0f);
  w.wq_b = make_weight(made, seed(CasePart::kWeights, 2), int64_t(o.index_heads) * kIndexDim, o.q_lora, 1.0f);
  std::vector<float> q_norm = norm_values(seed(CasePart::kNorms, 0), o.q_lora, 1.0f, 0.2f);
  std::vector<float> kv_norm = norm_values(seed(CasePart::kNorms, 1), kLatent, 1.0f, 0.2f);
  std::vector<float> k_norm = norm_values(seed(CasePart::kNorms, 2), kIndexDim, 1.0f, 0.2f);
  std::vector<float> k_bias = norm_values(seed(CasePart::kNorms, 3), kIndexDim, 0.0f, 0.1f);
  w.q_a_layernorm = store_norm(made, q_norm, ElementType::kBf16);
  w.kv_a_layernorm = store_norm(made, kv_norm, ElementType::kBf16);
  const ElementType k_type = o.k_norm_bf16 ? ElementType::kBf16 : ElementType::kF32;
  w.k_norm_weight = store_norm(made, k_norm, k_type);
  if (o.no_k_bias) {
    std::fill(k_bias.begin(), k_bias.end(), 0.0f);
  } else {
    w.k_norm_bias = store_norm(made, k_bias, k_type);
  }

  LayerConfig& c = made.config;
  c.kv_format = o.kv_format;
  c.index_format = o.index_format;
  c.topk = o.topk;
  c.softmax_scale = 1.0 / std::sqrt(double(kHeadQuery));
  c.index_softmax_scale = 1.0 / std::sqrt(double(kIndexDim));
  c.index_head_scale = 1.0 / std::sqrt(double(o.index_heads));
  Rng rng(seed(CasePart::kScales, 0));
  const float q_scale_inv = 4.0f + 8.0f * rng.unit();
  const float k_scale_inv = (2.0f + 6.0f * rng.unit()) * (kinds.magnitude ? 20.0f : 1.0f);  // 20: some latents saturate
  if (has_fp8_query(o.kv_format)) c.q_scale_inv = q_scale_inv;
  if (o.kv_format == KvFormat::kFp8) c.k_scale_inv = k_scale_inv;

  k_norm.insert(k_norm.end(), k_bias.begin(), k_bias.end());
  return KeySource(o.seed, kinds, float(c.eps), kv_norm.data(), k_norm.data());
}

// ---- tables, slots ----

struct BlockTable {
  View<int32_t, 2> ids;
  int64_t pages = 0;  ///< of the cache
};

/// A block table whose pages are shuffled over a cache with `spare_pages` that nobody owns. Entries past a request's
/// length name spare pages, or page 0 where there are none; padded requests' rows are zero.
BlockTable make_table(Case& made, const CaseOptions& o, const std::vector<int64_t>& lengths, int page, uint64_t which) {
  int64_t owned = 0;
  int64_t widest = 0;
  for (const int64_t length : lengths) {
    owned += pages_of(length, page);
    widest = std::max(widest, pages_of(length, page));
  }
  BlockTable table;
  table.pages = std::max<int64_t>(owned + o.spare_pages, 1);
  Rng rng(part_seed(o.seed, CasePart::kTables, which));
  std::vector<int32_t> ids(size_t(table.pages), 0);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t(i);
  for (size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[size_t(rng.below(int64_t(i)))]);

  const int64_t requests = int64_t(lengths.size());
  table.ids = View<int32_t, 2>(allocate<int32_t>(made, requests * (widest + 1)), requests, widest + 1);
  const int32_t* next = ids.data();
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t length = lengths[size_t(r)];
    const int64_t mine = pages_of(length, page);
    int32_t* row = table.ids.row(r);
    std::copy_n(next, mine, row);
    next += mine;
    for (int64_t i = mine; i <= widest; ++i) {
      const bool spare = length > 0 && o.spare_pages > 0;
      row[i] = spare ? ids[size_t(owned + rng.below(o.spare_pages))] : 0;
    }
  }
  return table;
}

/// Slots of the tokens that this step inserts: the last `q` of each request.
void make_slots(Case& made, const CaseOptions& o, const std::vector<int64_t>& lengths) {
  int64_t* slots = allocate<int64_t>(made, o.batch);
  int64_t* index_slots = allocate<int64_t>(made, o.batch);
  Rng rng(part_seed(o.seed, CasePart::kSlots));
  for (int b = 0; b < o.batch; ++b) {
    const int request = b / o.q;
    const int64_t token = lengths[size_t(request)] - o.q + b % o.q;
    const bool wanted = o.slots == SlotsKind::kOwned || (o.slots == SlotsKind::kMixed && rng.chance(0.5f));
    slots[b] = index_slots[b] = -1;
    if (!wanted || token < 0) continue;
    const LocalId id{int32_t(token)};
    const int32_t* table = made.step.block_table.row(request);
    const int32_t* index_table = o.index_table ? made.step.index_block_table.row(request) : nullptr;
    const Place kv = kv_place(table, o.page, id);
    const Place index = index_place(table, index_table, o.page, id);
    slots[b] = int64_t(kv.page.value()) * o.page + kv.offset;
    index_slots[b] = int64_t(index.page.value()) * kIndexPage + index.offset;
  }
  made.step.slots = View<const int64_t, 1>(slots, o.batch);
  made.step.index_slots = View<const int64_t, 1>(index_slots, o.batch);
}

// ---- caches ----

void describe_caches(Case& made, const CaseOptions& o, int64_t pages, int64_t index_pages) {
  KvCache& kv = made.kv;
  kv.format = o.kv_format;
  kv.pages = pages;
  kv.page = o.page;
  kv.stride_rows = o.stride_rows != 0 ? o.stride_rows : o.page;
  kv.row_bytes = row_bytes(o.kv_format);
  const int64_t rows = (pages - 1) * kv.stride_rows + kv.page;
  if (rows > std::numeric_limits<int32_t>::max()) {
    throw Exception({ErrorCode::kRefused, "--context", o.context,
                     fmt::format("the cache would have {} physical rows; allowed are 2147483647", rows)});
  }

  IndexCache& index = made.index;
  index.format = o.index_format;
  index.pages = index_pages;
  index.row_bytes = row_bytes(o.index_format);
}

/// Bytes of a cache that no token has.
std::byte* empty_cache(Case& made, int64_t bytes) {
  std::byte* data = allocate<std::byte>(made, bytes);
  std::memset(data, 0xFF, size_t(bytes));
  return data;
}

/// Writes the keys of all tokens of a request but those that the step inserts.
void fill_request(Case& made, const CaseOptions& o, const KeySource& source, int request, int64_t length) {
  const int32_t* table = made.step.block_table.row(request);
  const int32_t* index_table = o.index_table ? made.step.index_block_table.row(request) : nullptr;
  const int64_t index_page_bytes = int64_t(kIndexPage) * made.index.row_bytes;
  std::array<KeyRow, KeySource::kRun> keys;
  for (int64_t run = 0; run * KeySource::kRun < length; ++run) {
    source.old_keys(request, run, keys);
    for (int64_t i = 0; i < KeySource::kRun && run * KeySource::kRun + i < length; ++i) {
      const int64_t token = run * KeySource::kRun + i;
      const int64_t position = token - (length - o.q);  // among this step's tokens, where not negative
      if (position >= 0 && made.step.slots(request * o.q + position) >= 0) continue;
      const KeyRow& key = keys[size_t(i)];
      const LocalId id{int32_t(token)};
      std::byte* row = row_at(made.kv, physical_row(kv_place(table, o.page, id), made.kv.stride_rows));
      encode_kv(o.kv_format, key.c, key.pe, made.config.k_scale_inv, row);
      const Place place = index_place(table, index_table, o.page, id);
      encode_index(o.index_format, key.k, place.offset, made.index.data + place.page.value() * index_page_bytes);
    }
  }
}

// ---- projected rows ----

void make_projected(Case& made, const CaseOptions& o, const CaseKinds& kinds, const KeySource& source, int live) {
  const int64_t width = made.sizes.width();
  const int64_t pitch = width + o.pitch_pad;
  const CaseRows rows = make_rows(o, made.sizes, kinds, source, live);
  BFloat16* out = allocate<BFloat16>(made, o.batch * pitch);
  for (int64_t b = 0; b < o.batch; ++b) {
    round_row(rows.values.data() + b * width, out + b * pitch, width);
    std::fill_n(out + b * pitch + width, o.pitch_pad, kNanBits);
  }
  // Padded requests hold any bits, and a NaN for certain.
  Rng rng(part_seed(o.seed, CasePart::kGarbage));
  for (int64_t b = int64_t(live) * o.q; b < o.batch; ++b) {
    for (int64_t i = 0; i < width; ++i) out[b * pitch + i] = {uint16_t(rng.next() >> 48)};
    out[b * pitch + rng.below(width)] = kNanBits;
  }
  made.step.projected = View<const BFloat16, 2>(out, o.batch, width).with_pitch(pitch);
}

void make_caches(Case& made, const CaseOptions& o, const KeySource& source, const std::vector<int64_t>& lengths) {
  const int64_t rows = (made.kv.pages - 1) * made.kv.stride_rows + made.kv.page;
  made.kv.data = empty_cache(made, rows * made.kv.row_bytes);
  made.index.data = empty_cache(made, made.index.pages * kIndexPage * made.index.row_bytes);
  for (int r = 0; r < int(lengths.size()); ++r) fill_request(made, o, source, r, lengths[size_t(r)]);
}

enum class Caches { kMade, kDescribed };

Case make(const CaseOptions& options, Caches caches) {
  check_case_options(options);
  const CaseKinds kinds = case_kinds(options);
  Case made;
  const KeySource source = make_layer(made, options, kinds);

  const int requests = options.batch / options.q;
  const int live = requests - options.pad_requests;
  std::vector<int64_t> lengths = case_lengths(options, live);
  lengths.resize(size_t(requests), 0);

  Step& step = made.step;
  step.batch = options.batch;
  step.q = options.q;
  int32_t* seq_lens = allocate<int32_t>(made, requests);
  std::copy(lengths.begin(), lengths.end(), seq_lens);
  step.seq_lens = View<const int32_t, 1>(seq_lens, requests);
  const BlockTable table = make_table(made, options, lengths, options.page, 0);
  step.block_table = table.ids;
  int64_t index_pages = table.pages * (options.page / kIndexPage);
  if (options.index_table) {
    const BlockTable index_table = make_table(made, options, lengths, kIndexPage, 1);
    step.index_block_table = index_table.ids;
    index_pages = index_table.pages;
  }
  make_slots(made, options, lengths);
  describe_caches(made, options, table.pages, index_pages);
  if (caches == Caches::kMade) make_caches(made, options, source, lengths);
  make_projected(made, options, kinds, source, live);
  return made;
}

}  // namespace

Case make_case(const CaseOptions& options) { return make(options, Caches::kMade); }

Case make_case_without_caches(const CaseOptions& options) { return make(options, Caches::kDescribed); }

}  // namespace dsacore
