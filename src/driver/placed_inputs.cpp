#include "driver/placed_inputs.h"

namespace dsacore {
namespace {

int64_t bytes_of(const TensorRef& t) {
  if (t.data == nullptr) return 0;
  int64_t elements = 1;
  for (int axis = 0; axis < t.rank; ++axis) elements *= t.shape[axis];
  return elements * element_bytes(t.type);
}

/// From the first to the last element of a view whose rows may lie apart.
template <class T, int Rank>
int64_t bytes_of(View<const T, Rank> view) {
  if (view.empty() || view.size() == 0) return 0;
  const int64_t row = view.size() / view.extent(0);
  return ((view.extent(0) - 1) * view.stride(0) + row) * int64_t(sizeof(T));
}

int64_t out_bytes(const Inputs& inputs) {
  return int64_t(inputs.step.batch) * inputs.sizes.heads * kValue * int64_t(sizeof(BFloat16));
}

/// Calls `visit(tensor, name)` for every weight and tensor of a step but the caches and `out`.
template <class Visit>
void for_each_tensor(LayerWeights& w, Step& s, Visit visit) {
  visit(w.q_a_layernorm, "q_a_layernorm.weight");
  visit(w.kv_a_layernorm, "kv_a_layernorm.weight");
  visit(w.q_b_proj, "q_b_proj.weight");
  visit(w.kv_b_proj, "kv_b_proj.weight");
  visit(w.wq_b, "indexer.wq_b.weight");
  visit(w.k_norm_weight, "indexer.k_norm.weight");
  visit(w.k_norm_bias, "indexer.k_norm.bias");
  visit(s.projected, "projected");
  visit(s.slots, "slots");
  visit(s.index_slots, "index_slots");
  visit(s.block_table, "block_table");
  visit(s.index_block_table, "index_block_table");
  visit(s.seq_lens, "seq_lens");
}

}  // namespace

int64_t placed_bytes(const Inputs& inputs) {
  LayerWeights weights = inputs.weights;
  Step step = inputs.step;
  int64_t bytes = cache_bytes(inputs.kv) + cache_bytes(inputs.index) + out_bytes(inputs);
  for_each_tensor(weights, step, [&](const auto& tensor, const char*) { bytes += bytes_of(tensor); });
  return bytes;
}

PlacedInputs::PlacedInputs(const Inputs& host, Memory& memory) : memory_(memory), placed_(host) {
  memory.require_free(placed_bytes(host), "inputs");
  Step& s = placed_.step;
  for_each_tensor(placed_.weights, s, [&](auto& tensor, const char* what) { tensor = place(tensor, what); });
  placed_.kv.data = const_cast<std::byte*>(place(host.kv.data, cache_bytes(host.kv), "kv_cache"));
  placed_.index.data = const_cast<std::byte*>(place(host.index.data, cache_bytes(host.index), "index_cache"));
  blocks_.emplace_back(memory_, out_bytes(host), "out");
  s.out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(blocks_.back().data()), s.batch,
                            int64_t(host.sizes.heads) * kValue);
}

const std::byte* PlacedInputs::place(const void* data, int64_t bytes, const char* what) {
  if (bytes == 0) return nullptr;
  blocks_.emplace_back(memory_, bytes, what);
  if (data != nullptr) memory_.copy_in(blocks_.back().data(), data, bytes);
  return blocks_.back().data();
}

TensorRef PlacedInputs::place(const TensorRef& tensor, const char* what) {
  TensorRef placed = tensor;
  placed.data = place(tensor.data, bytes_of(tensor), what);
  return placed;
}

template <class T, int Rank>
View<const T, Rank> PlacedInputs::place(View<const T, Rank> view, const char* what) {
  const auto* data = reinterpret_cast<const T*>(place(view.data(), bytes_of(view), what));
  if (data == nullptr) return view;  // empty, or without rows: nothing is read
  if constexpr (Rank == 1) {
    return View<const T, 1>(data, view.extent(0));
  } else {
    return View<const T, 2>(data, view.extent(0), view.extent(1)).with_pitch(view.stride(0));
  }
}

void PlacedInputs::fetch_caches(const Inputs& host) const {
  memory_.copy_out(host.kv.data, placed_.kv.data, cache_bytes(host.kv));
  memory_.copy_out(host.index.data, placed_.index.data, cache_bytes(host.index));
}

std::vector<BFloat16> PlacedInputs::fetch_out() const { return fetched(placed_.step.out, memory_); }

}  // namespace dsacore
