// Runs stages of the cuda backend over a Case: what tests/support/stages.h does on the host, with every tensor in
// device memory. Outputs and scratch are poisoned with 0xFF when a runner is made; what a stage needs is put in from
// the host.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <vector>

#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"
#include "support/stages.h"

namespace dsacore::test {

/// Owned device memory.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t bytes) : bytes_(bytes > 0 ? bytes : 1) {
    cuda::check(cudaMalloc(&data_, size_t(bytes_)), "cudaMalloc");
    poison();
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void poison() { cuda::check(cudaMemset(data_, kPoison, size_t(bytes_)), "cudaMemset"); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

inline void sync() { cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

/// A Case's weights, inputs and caches on the device, and the tensors between the stages. Views hold device pointers.
class DeviceRunner {
 public:
  explicit DeviceRunner(const Case& source, int64_t live_rows = -1)
      : source_(source), owned_(make_model(source.config, source.weights)) {
    rows = live_rows < 0 ? source.step.projected.extent(0) : live_rows;
    const LayerModel& host = owned_.model;
    model_ = host;
    const LayerSizes& z = host.sizes;
    model_.q_norm = upload(host.q_norm);
    model_.kv_norm = upload(host.kv_norm);
    model_.w_qb = upload(host.w_qb);
    model_.kv_b = upload(host.kv_b);
    model_.w_iq = upload(host.w_iq);
    model_.k_norm_weight = upload(host.k_norm_weight);
    model_.k_norm_bias = upload(host.k_norm_bias);
    projected = upload_strided(source.step.projected).first(rows);
    slots = upload(source.step.slots).first(rows);
    index_slots = upload(source.step.index_slots).first(rows);
    block_table = upload_strided(source.step.block_table);
    if (!source.step.index_block_table.empty()) index_block_table = upload_strided(source.step.index_block_table);
    seq_lens = upload(source.step.seq_lens).first(rows / source.step.q);
    const int64_t kv_rows = (source.kv.pages - 1) * source.kv.stride_rows + source.kv.page;
    kv = source.kv;
    kv.data = upload_bytes(source.kv.data, kv_rows * source.kv.row_bytes);
    kv_bytes = kv_rows * source.kv.row_bytes;
    index = source.index;
    index_bytes = source.index.pages * kIndexPage * source.index.row_bytes;
    index.data = upload_bytes(source.index.data, index_bytes);
    const int64_t topk = host.config.topk;
    q_c = make<BFloat16>(rows, z.q_lora);
    const int element = has_fp8_query(host.config.kv_format) ? 1 : 2;
    query = {make<std::byte>(rows * z.heads * kQueryRow * element).data(), z.heads, element};
    index_query = make<uint8_t>(rows, z.index_heads, kIndexDim);
    head_weights = make<float>(rows, z.index_heads);
    topk_tokens = make<int32_t>(rows, topk);
    topk_rows = make<int32_t>(rows, topk);
    valid = make<int32_t>(rows);
    latent = make<BFloat16>(rows, z.heads, kLatent);
    lse = make<float>(rows, z.heads);
    out = make<BFloat16>(rows, int64_t(z.heads) * kValue);
  }

  const LayerModel& model() const { return model_; }
  const Step& host_step() const { return source_.step; }
  ShapeKey key() const { return StageRunner(source_, reference_backend(), 1).key(); }

  /// Enqueues the kernel of that name (or the first that accepts) on `queue` and does not wait. Scratch is one zeroed
  /// buffer a kernel name, kept between runs, as the layer keeps it.
  template <class Args>
  void run(std::span<const Kernel<Args>> kernels, const Args& args, std::string_view name = {}, Queue queue = {}) {
    const ShapeKey shape = key();
    for (const Kernel<Args>& kernel : kernels) {
      if (!name.empty() ? kernel.name != name : !kernel.accepts(shape).ok) continue;
      const Verdict verdict = kernel.accepts(shape);
      if (!verdict.ok) throw Exception({ErrorCode::kRefused, "kernel", std::string(kernel.name), verdict.reason});
      const int64_t bytes = kernel.scratch_bytes(shape, 1);
      auto& scratch = scratch_[std::string(kernel.name)];
      if (!scratch || scratch->bytes() < bytes) {
        scratch = std::make_unique<DeviceBuffer>(bytes);
        cuda::check(cudaMemset(scratch->data(), 0, size_t(scratch->bytes())), "cudaMemset");
        if (kernel.prepare != nullptr) kernel.prepare(shape);
      }
      kernel.run(args, {{scratch->data(), size_t(bytes)}, nullptr, nullptr, queue});
      return;
    }
    throw Exception({ErrorCode::kInternal, "kernel", std::string(name), "none accepts"});
  }

  QueryArgs query_args() { return {&model_, projected, slots, kv, q_c, query}; }
  IndexProjectionArgs index_projection_args() {
    return {&model_, projected, q_c, index_slots, index, index_query, head_weights};
  }
  IndexerArgs indexer_args() {
    return {&model_,   source_.step.q, {},    seq_lens,    block_table,  index_block_table,
            kv.page,   kv.stride_rows, index, index_query, head_weights, topk_tokens,
            topk_rows, valid,          {}};
  }
  SparseCoreArgs sparse_core_args() { return {&model_, query, topk_rows, valid, kv, latent, lse}; }
  ValueArgs value_args() {
    const LayerSizes& z = model_.sizes;
    const View<const BFloat16, 2> gate =
        View<const BFloat16, 2>(projected.data() + z.gate_at(), rows, int64_t(z.heads) * kValue)
            .with_pitch(projected.stride(0));
    return {&model_, latent, model_.w_uv(), gate, out, seq_lens, source_.step.q};
  }

  int64_t rows;
  int64_t kv_bytes, index_bytes;
  View<const BFloat16, 2> projected;
  View<const int64_t, 1> slots, index_slots;
  View<const int32_t, 2> block_table, index_block_table;
  View<const int32_t, 1> seq_lens;
  KvCache kv;
  IndexCache index;
  View<BFloat16, 2> q_c;
  QueryRows query;
  View<uint8_t, 3> index_query;
  View<float, 2> head_weights;
  View<int32_t, 2> topk_tokens, topk_rows;
  View<int32_t, 1> valid;
  View<BFloat16, 3> latent;
  View<float, 2> lse;
  View<BFloat16, 2> out;

  template <class T, class... Extents>
  View<T, sizeof...(Extents)> make(Extents... extents) {
    buffers_.push_back(std::make_unique<DeviceBuffer>((int64_t(extents) * ...) * int64_t(sizeof(T))));
    return View<T, sizeof...(Extents)>(reinterpret_cast<T*>(buffers_.back()->data()), extents...);
  }
  std::byte* upload_bytes(const void* from, int64_t bytes) {
    buffers_.push_back(std::make_unique<DeviceBuffer>(bytes));
    cuda::check(cudaMemcpy(buffers_.back()->data(), from, size_t(bytes), cudaMemcpyHostToDevice), "cudaMemcpy");
    return buffers_.back()->data();
  }

 private:
  /// A copy of a dense host view.
  template <class T, int Rank>
  View<const T, Rank> upload(const View<const T, Rank>& v) {
    return upload_strided(v);
  }
  /// A copy of a host view whose rows may lie apart; the pitch stays.
  template <class T, int Rank>
  View<const T, Rank> upload_strided(const View<const T, Rank>& v) {
    if (v.empty() || v.extent(0) == 0) return v;
    const int64_t row = v.size() / v.extent(0);
    const int64_t elements = (v.extent(0) - 1) * v.stride(0) + row;
    const auto* data = reinterpret_cast<const T*>(upload_bytes(v.data(), elements * int64_t(sizeof(T))));
    if constexpr (Rank == 1) return View<const T, 1>(data, v.extent(0));
    if constexpr (Rank == 2) return View<const T, 2>(data, v.extent(0), v.extent(1)).with_pitch(v.stride(0));
    if constexpr (Rank == 3)
      return View<const T, 3>(data, v.extent(0), v.extent(1), v.extent(2)).with_pitch(v.stride(0));
  }

  const Case& source_;
  OwnedModel owned_;
  LayerModel model_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  std::map<std::string, std::unique_ptr<DeviceBuffer>> scratch_;
};

/// Host copy of a dense device tensor; waits for the device first.
template <class T, int Rank>
std::vector<std::remove_const_t<T>> fetch(const View<T, Rank>& device) {
  sync();
  std::vector<std::remove_const_t<T>> host(size_t(device.size()));
  cuda::check(cudaMemcpy(host.data(), device.data(), host.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}
inline std::vector<std::byte> fetch_bytes(const void* device, int64_t bytes) {
  return fetch(View<const std::byte, 1>(static_cast<const std::byte*>(device), bytes));
}

/// Copies a dense host tensor into a device tensor of the same shape, e.g. `put(reference.q_c, device.q_c)`.
template <class T, class U, int Rank>
void put(const View<T, Rank>& host, const View<U, Rank>& device) {
  cuda::check(cudaMemcpy(device.data(), host.data(), size_t(host.size()) * sizeof(T), cudaMemcpyHostToDevice),
              "cudaMemcpy");
}

}  // namespace dsacore::test
