// Sparse core cases on the device: the cases and the judgement of tests/cpu/sparse_core_case.h, a kernel by its name,
// and its time over rows that no cache holds.
#pragma once

#include <fmt/format.h>

#include "cpu/sparse_core_contents.h"
#include "cuda/device_stages.h"
#include "cuda/timing.h"

namespace dsacore::test {

template <class Args>
const Kernel<Args>& kernel_named(std::span<const Kernel<Args>> kernels, std::string_view name) {
  for (const Kernel<Args>& kernel : kernels) {
    if (kernel.name == name) return kernel;
  }
  throw Exception({ErrorCode::kInternal, "kernel", std::string(name), "is in no list"});
}

inline const Kernel<SparseCoreArgs>& core_kernel(std::string_view name) {
  return kernel_named(cuda::sparse_core_kernels(), name);
}

inline ShapeKey core_shape(const CoreCase& c) {
  return {.sizes = c.model.sizes,
          .kv_format = c.kv.format,
          .index_format = IndexFormat::kFp8,
          .topk = c.model.config.topk,
          .rows = c.rows(),
          .q = 1,
          .ranks = 1,
          .max_context = kMaxContext};
}

/// A case on the device, and scratch of one kernel: zeroed once, kept between runs.
class DeviceCore {
 public:
  /// `shift` is added to every physical row, and the cache's address moved back as far.
  DeviceCore(CoreCase& c, std::string_view name, int64_t shift = 0)
      : case_(c),
        kernel_(core_kernel(name)),
        cache_(cache_bytes(c)),
        query_(int64_t(c.rows()) * c.heads() * kQueryRow * c.query().element),
        topk_rows_(int64_t(c.topk_rows.size()) * 4),
        valid_(c.rows() * 4),
        latent_(int64_t(c.rows()) * c.heads() * kLatent * 2),
        lse_(int64_t(c.rows()) * c.heads() * 4),
        scratch_(kernel_.scratch_bytes(core_shape(c), 1)),
        shift_(shift) {
    cuda::check(cudaMemset(scratch_.data(), 0, size_t(scratch_.bytes())), "cudaMemset");
    if (kernel_.prepare != nullptr) kernel_.prepare(core_shape(c));
    upload();
  }

  /// Copies the case's contents again.
  void upload() {
    std::vector<int32_t> rows = case_.topk_rows;
    for (int32_t& row : rows) row = row < 0 ? row : int32_t(row + shift_);
    put(cache_, case_.kv.data);
    put(query_, case_.query().data);
    put(topk_rows_, rows.data());
    put(valid_, case_.valid.data());
  }

  /// What the kernel is given for the first `live` rows.
  SparseCoreArgs args(int live) const {
    KvCache kv = case_.kv;
    kv.data =
        reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(cache_.data()) - uintptr_t(shift_ * kv.row_bytes));
    return {.model = &case_.model,
            .query = {query_.data(), case_.heads(), case_.query().element},
            .topk_rows = View<const int32_t, 2>(as<const int32_t>(topk_rows_), live, case_.model.config.topk),
            .valid = View<const int32_t, 1>(as<const int32_t>(valid_), live),
            .kv = kv,
            .latent = View<BFloat16, 3>(as<BFloat16>(latent_), live, case_.heads(), kLatent),
            .lse = View<float, 2>(as<float>(lse_), live, case_.heads())};
  }

  /// Runs on the first `live` rows (-1: all) into poisoned memory.
  CoreResult run(int live = -1) {
    if (live < 0) live = case_.rows();
    latent_.poison();
    lse_.poison();
    kernel_.run(args(live), {scratch(), nullptr, nullptr, {}});
    return result(live);
  }

  /// The same by a core that leaves parts and the value kernel that merges them; `value` has no `core` yet.
  CoreResult run(const Kernel<ValueArgs>& merge, ValueArgs value) {
    const int live = int(value.out.extent(0));
    latent_.poison();
    lse_.poison();
    SparseCoreArgs core = args(live);
    core.leaves_parts = true;
    kernel_.run(core, {scratch(), nullptr, nullptr, {}});
    value.core = &core;
    value.parts = scratch_.data();
    merge.run(value, {{}, nullptr, nullptr, {}});
    return result(live);
  }

 private:
  std::span<std::byte> scratch() const { return {scratch_.data(), size_t(scratch_.bytes())}; }
  CoreResult result(int live) const {
    return {live, case_.heads(),
            fetch(View<const BFloat16, 1>(as<const BFloat16>(latent_), int64_t(live) * case_.heads() * kLatent)),
            fetch(View<const float, 1>(as<const float>(lse_), int64_t(live) * case_.heads()))};
  }
  static int64_t cache_bytes(const CoreCase& c) {
    return ((c.kv.pages - 1) * c.kv.stride_rows + c.kv.page) * c.kv.row_bytes;
  }
  template <class T>
  static T* as(const DeviceBuffer& buffer) {
    return reinterpret_cast<T*>(buffer.data());
  }
  static void put(const DeviceBuffer& to, const void* from) {
    cuda::check(cudaMemcpy(to.data(), from, size_t(to.bytes()), cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  CoreCase& case_;
  const Kernel<SparseCoreArgs>& kernel_;
  DeviceBuffer cache_, query_, topk_rows_, valid_, latent_, lse_, scratch_;
  int64_t shift_;
};

/// Runs the kernel and judges it by spec 9; returns e of the latents. Then runs it again: the same bits.
inline double expect_device_agrees(CoreCase& c, std::string_view kernel, const CoreResult& want, int64_t shift = 0) {
  DeviceCore device(c, kernel, shift);
  const CoreResult got = device.run();
  const double e = expect_agreement(got, want);
  expect_same_bits(device.run(), got, c.rows());
  return e;
}
inline double expect_device_agrees(CoreCase& c, std::string_view kernel) {
  return expect_device_agrees(c, kernel, run_reference(c));
}

/// The first rows of a case, as many as `live` says each time, agree with the reference.
inline void expect_live_rows_agree(CoreCase& c, std::string_view kernel) {
  const CoreResult want = run_reference(c);
  DeviceCore device(c, kernel);
  for (const int live : {1, 2, 3, 8, 13, 40}) {
    SCOPED_TRACE(live);
    CoreResult part = want;
    part.rows = live;
    part.latent.resize(size_t(live * c.heads() * kLatent));
    part.lse.resize(size_t(live * c.heads()));
    expect_agreement(device.run(live), part);
  }
}

/// A single key, so p = 1: the latent is the dequantized value itself, of either sign where it is 0.
inline void expect_one_key_exact(CoreCase& c, std::string_view kernel) {
  const CoreResult got = DeviceCore(c, kernel).run();
  for (int i = 0; i < kLatent; ++i) {
    const float want = with_layout(c.kv.format, [&](auto layout) { return layout.value(c.row(c.selected(0)[0]), i); });
    ASSERT_EQ(to_float(got.latent[size_t(i)]), to_float(to_bf16(want))) << i;
  }
}

/// Now and then a key of huge scale, all of it next to nothing but element 0, by which no head attends to it.
inline void hide_huge_keys(CoreCase& c) {
  for (int b = 0; b < c.rows(); ++b) {
    for (int head = 0; head < c.heads(); ++head) c.set_query(b, head, 0, -1);  // against code 0x7E below
  }
  int nth = 0;
  c.for_selected([&](std::byte* row) {
    if (nth++ % 53 != 17) return;
    row[0] = std::byte(0x7E);
    for (int i = 1; i < kLatent; ++i)
      row[i] = std::byte(uint8_t(row[i]) & 0x81);  // all but element 0 is next to nothing
    const float huge = 0x1p60f;
    for (int tile = 0; tile < KvFp8DsMla::kTiles; ++tile) {
      std::memcpy(row + KvFp8DsMla::kScalesAt + tile * int(sizeof(float)), &huge, sizeof(huge));
    }
  });
}

/// NaN and infinity harm what reads them, and nothing else.
inline void expect_broken_values_stay(CoreCase& c, std::string_view kernel) {
  const CoreResult clean = DeviceCore(c, kernel).run();
  break_values(c);
  expect_broken_values_stayed(c, DeviceCore(c, kernel).run(), clean);
}

/// Scales of `fp8_ds_mla` keys that are powers of two, any, and up to 2^100 apart.
inline void expect_powers_of_two_agree(int heads, std::string_view kernel) {
  for (const int exponent : {-110, -14, 0, 1, 20, 58, 100}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = heads, .valid = {1, 33, 700, 2048}, .query_magnitude = std::ldexp(0.01, -exponent)});
    set_scales(c, [&] { return std::ldexp(1.0f, exponent + int(c.random()() % 3)); });
    expect_device_agrees(c, kernel);
  }
}
inline void expect_one_key_exact_at_any_scale(int heads, std::string_view kernel) {
  for (const int exponent : {-117, -14, 0, 58, 118, 119, 120, 126}) {
    SCOPED_TRACE(exponent);
    CoreCase c({.heads = heads, .valid = {1}, .query_magnitude = 0});
    set_scales(c, [&] { return std::ldexp(1.0f, exponent); });
    const std::byte* row = c.row(c.selected(0)[0]);
    const CoreResult got = DeviceCore(c, kernel).run();
    for (int i = 0; i < kLatent; ++i) ASSERT_EQ(to_float(got.latent[size_t(i)]), KvFp8DsMla::value(row, i)) << i;
  }
}
inline void expect_any_scale_agrees(int heads, std::string_view kernel) {
  for (const float magnitude : {0x1p-14f, 1.0f, 0x1p40f, 0x1p118f}) {
    SCOPED_TRACE(magnitude);
    CoreCase c({.heads = heads, .valid = {1, 33, 255, 2048}, .query_magnitude = 1 / double(magnitude)});
    set_scales(c, [&] { return magnitude * (1.0f + float(c.random()() % 100000) / 100000.0f) / 448.0f; });
    expect_device_agrees(c, kernel);
  }
}
inline void expect_scales_far_apart_agree(int heads, std::string_view kernel) {
  for (const int spread : {6, 20, 50}) {
    SCOPED_TRACE(spread);
    CoreCase c({.heads = heads, .valid = {2, 300, 2048}, .query_magnitude = 0});  // p is the same for all keys
    set_scales(c, [&] { return std::ldexp(1.5f, int(c.random()() % uint64_t(2 * spread + 1)) - spread); });
    expect_device_agrees(c, kernel);
  }
  CoreCase c({.heads = heads, .valid = {300, 2048}});
  hide_huge_keys(c);
  expect_device_agrees(c, kernel);
}

/// Microseconds of one launch inside a graph of many, each over other rows of a cache of `kPoolBytes`.
class CoreTimer {
 public:
  CoreTimer() : pool_(kPoolBytes) { cuda::check(cudaMemset(pool_.data(), 0x38, size_t(kPoolBytes)), "cudaMemset"); }

  /// With step 12 behind it where `value` names a kernel: `merge` for a core that leaves parts. W_UV is another each
  /// time.
  double microseconds(std::string_view name, KvFormat format, int heads, int rows, int topk = kMaxTopk,
                      std::string_view value = {}) {
    const int sets = rows * topk >= 32 * kMaxTopk ? 8 : 32;
    LayerModel model;
    model.sizes = {.q_lora = 1536, .heads = heads, .index_heads = 32};
    model.config.kv_format = format;
    model.config.topk = topk;
    model.config.softmax_scale = 1 / std::sqrt(192.0);
    const int64_t cache_rows = kPoolBytes / row_bytes(format);
    std::vector<int32_t> ids(size_t(sets) * size_t(rows) * size_t(topk));
    std::mt19937_64 random(7);
    for (int32_t& id : ids) id = int32_t(random() % uint64_t(cache_rows));
    for (size_t i = 0; i < ids.size(); i += size_t(topk))
      std::sort(ids.begin() + int64_t(i), ids.begin() + int64_t(i) + topk);
    const std::vector<int32_t> all(size_t(rows), topk);
    DeviceBuffer device_ids(int64_t(ids.size()) * 4), valid(rows * 4), query(int64_t(rows) * heads * kQueryRow * 2);
    DeviceBuffer latent(int64_t(rows) * heads * kLatent * 2), lse(int64_t(rows) * heads * 4);
    cuda::check(cudaMemcpy(device_ids.data(), ids.data(), ids.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    cuda::check(cudaMemcpy(valid.data(), all.data(), all.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    cuda::check(cudaMemset(query.data(), 0x3C, size_t(query.bytes())), "cudaMemset");
    const Kernel<SparseCoreArgs>& kernel = core_kernel(name);
    const ShapeKey shape{model.sizes, format, IndexFormat::kFp8, topk, rows, 1, 1, kMaxContext};
    DeviceBuffer scratch(kernel.scratch_bytes(shape, 1));
    cuda::check(cudaMemset(scratch.data(), 0, size_t(scratch.bytes())), "cudaMemset");
    if (kernel.prepare != nullptr) kernel.prepare(shape);
    const KvCache kv{pool_.data(), format, cache_rows / 64, 64, 64, row_bytes(format)};
    const int64_t width = int64_t(heads) * kValue;
    DeviceBuffer gate(rows * width * 2), out(rows * width * 2);
    cuda::check(cudaMemset(gate.data(), 0, size_t(gate.bytes())), "cudaMemset");
    return graph_us(sets, [&](int set, Queue queue) {
      const auto* set_ids = reinterpret_cast<const int32_t*>(device_ids.data()) + int64_t(set) * rows * topk;
      const SparseCoreArgs core = {
          .model = &model,
          .query = {query.data(), heads, has_fp8_query(format) ? 1 : 2},
          .topk_rows = View<const int32_t, 2>(set_ids, rows, topk),
          .valid = View<const int32_t, 1>(reinterpret_cast<const int32_t*>(valid.data()), rows),
          .kv = kv,
          .latent = View<BFloat16, 3>(reinterpret_cast<BFloat16*>(latent.data()), rows, heads, kLatent),
          .lse = View<float, 2>(reinterpret_cast<float*>(lse.data()), rows, heads),
          .leaves_parts = value == "merge"};
      kernel.run(core, {{scratch.data(), size_t(scratch.bytes())}, nullptr, nullptr, queue});
      if (value.empty()) return;
      const auto* w_uv = reinterpret_cast<const BFloat16*>(pool_.data()) + set * width * kLatent;
      kernel_named(cuda::value_kernels(), value)
          .run({.model = &model,
                .latent = core.latent,
                .w_uv = View<const BFloat16, 3>(w_uv, heads, kValue, kLatent),
                .gate = View<const BFloat16, 2>(reinterpret_cast<const BFloat16*>(gate.data()), rows, width),
                .out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), rows, width),
                .core = core.leaves_parts ? &core : nullptr,
                .parts = scratch.data()},
               {{}, nullptr, nullptr, queue});
    });
  }

  /// Prints the time, the floor (bytes at 4.0 TB/s, what gathered rows reach) and the share of it.
  void report(std::string_view name, KvFormat format, int heads, int rows, int topk = kMaxTopk) {
    const double us = microseconds(name, format, heads, rows, topk);
    const double floor = double(rows) * topk * row_bytes(format) / 4.0e6;
    fmt::print("time {} {:12} H={:<3} B={:<3} topk={:<4} {:7.2f} us, floor {:6.2f} us, share {:3.0f} %\n", name,
               name_of(format), heads, rows, topk, us, floor, 100 * floor / us);
  }

 private:
  static constexpr int64_t kPoolBytes = int64_t(8) << 30;

  DeviceBuffer pool_;
};

}  // namespace dsacore::test
