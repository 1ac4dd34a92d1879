// Context and PreparedLayer: prepare once, bind the caches, run every step (layer.md 1).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dsacore/box.h"
#include "dsacore/formats.h"
#include "dsacore/problem.h"
#include "dsacore/queue.h"
#include "dsacore/status.h"
#include "dsacore/view.h"

namespace dsacore {

/// Where and how the layers of a context run. Empty fields fall back to the environment (DSACORE_THREADS,
/// DSACORE_CPU_TARGET, DSACORE_TABLES), read here and nowhere else, then to what the machine offers.
struct ContextOptions {
  BackendKind backend = BackendKind::kCpu;
  int device = 0;             ///< CUDA device ordinal
  int threads = 0;            ///< 0: DSACORE_THREADS, else every core
  std::string cpu_target{};   ///< e.g. "avx2"; empty: the best that the machine runs
  std::string tables_file{};  ///< kernel and overlap tables instead of the compiled-in ones
  /// Called during prepare with each choice made, one line of text. The library itself prints nothing.
  std::function<void(std::string_view)> on_choice{};
};

/// One item of `reserved_bytes()`.
struct ReservedItem {
  std::string name;
  int64_t bytes = 0;
};

/// Threads, scratch, plans and tables of layers that run in one order, from one thread at a time. On the cuda backend
/// that order is a stream's: for streams that run at once, make a context each. Each then has a side stream of its own,
/// which it takes from its device's: one is all that a device has as long as its contexts do not live at once. All
/// objects work while another device is current, and leave the current device as it was.
class Context {
 public:
  /// Throws `kUnsupported` where the backend or target cannot run here, naming what can. The cuda backend needs a
  /// device of compute capability 9.0 and a driver of its toolkit's major version.
  explicit Context(const ContextOptions& options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  BackendKind backend() const;
  int threads() const;
  /// The instruction set in use; "scalar" for the reference backend, "sm_90a" for the cuda backend.
  std::string_view cpu_target() const;
  /// Scratch shared by all layers prepared so far.
  std::vector<ReservedItem> reserved() const;
  /// Plans of all layers prepared so far: kernels, overlap mode and launches for a number of rows and a q. Layers of
  /// equal sizes, formats, topk, max_context and tables share them; what is a layer's own is its weights (packed, where
  /// the backend packs them) and its caches.
  int plans() const;

  class Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// A batch size to prepare.
struct PreparedBatch {
  int rows = 0;             ///< B, 1..256
  int64_t pitch_elems = 0;  ///< row pitch of `projected`, >= width
};

struct PrepareOptions {
  std::vector<PreparedBatch> batches{};
  std::vector<int> queries = {1};  ///< every (B, q) with B % q == 0 is prepared; q 1..8
  int64_t max_context = 0;         ///< longest `seq_len`, 1..1048576
  int64_t cache_pages =
      0;                  ///< pages of 64 tokens in the index cache; 0: unknown. Bounds the context and so the scratch
  std::string overlap{};  ///< "rows:mode,..." or a mode; empty: the table's
  /// "stage=rows:name,...;...": the kernels that each stage may choose from, `auto` (all), a name, or several `a|b`;
  /// empty: the table's.
  std::string kernels{};
  /// Row capacities, each 1..256: the plan and the scratch of the smallest one that holds a batch serve it too, so that
  /// scratch is as large from the first layer on as any batch up to there needs. A batch for which other kernels or
  /// another mode would be chosen keeps a plan of its own: `out` has the same bits with and without.
  std::vector<int> plan_rows{};
  /// cuda: every run first checks slots, lengths and tables on the device, which the host cannot read, and a step that
  /// points outside its caches writes nothing but zeros: see `inputs_status`. The other backends always check.
  bool check_inputs = false;
  Box* box = nullptr;  ///< DCP (not on cuda): this rank's end, which outlives the layer; null: one rank
};

/// The tensors between the stages of the last run, in scratch that the context's layers share: read them before the
/// next run. Rows past the requests given hold unspecified bytes in the query-stage tensors. On the cuda backend the
/// views hold device pointers, and what they show is there when the run's queue has come past it.
struct StageViews {
  View<const BFloat16, 2> q_c;         ///< [B, q_lora]
  View<const std::byte, 3> query;      ///< [B, heads (of all ranks under DCP), 576 elements] BF16 or e4m3, as bytes
  View<const uint8_t, 3> index_query;  ///< [B, index_heads, 128] e4m3
  View<const float, 2> head_weights;   ///< [B, index_heads]
  View<const int32_t, 2> topk_tokens;  ///< [B, topk] global token ids ascending, then -1
  View<const int32_t, 2> topk_rows;    ///< [B, topk] physical rows of this rank, then -1
  View<const int32_t, 1> valid;        ///< [B] of `topk_tokens`
  View<const BFloat16, 3> latent;      ///< [B, heads, 512]; empty under DCP with `proj` partials
  View<const float, 2> lse;            ///< [B, heads] natural log
};

/// When the stages of one run began and the seconds that they took, in the order they ran.
struct StageTime {
  const char* stage;
  double seconds;
  std::chrono::steady_clock::time_point begin;
};

/// A DSA layer, prepared.
///
/// On the cuda backend every pointer of weights, caches and steps is one to memory of the context's device. Prepare and
/// prepare_cache wait for the device; prepare all layers of a context before the first graph is captured, since scratch
/// that grows moves.
class PreparedLayer {
 public:
  /// Checks everything, picks kernels for every (B, q), packs weights, reserves scratch. Throws `Exception` (spec 10)
  /// before it reserves or writes anything. `weights` are borrowed. With a box it is collective where `proj` partials
  /// gather W_UV.
  PreparedLayer(Context& context, const LayerConfig& config, const LayerWeights& weights,
                const PrepareOptions& options);
  ~PreparedLayer();
  PreparedLayer(PreparedLayer&&) noexcept;

  /// Binds the caches. Throws `kRefused` where a row or page size does not fit, or where other caches were bound
  /// before.
  void prepare_cache(const KvCache& kv, const IndexCache& index);

  /// Runs one step. Checks slots, pages, lengths (spec 10) before the first write. Allocates nothing on success.
  ///
  /// cuda: enqueues the step on the queue's stream and returns; it neither waits nor reads what tensors hold, so it may
  /// be captured in a graph and replayed with other contents. It checks what the host can know: shapes, pitches, batch,
  /// page. The step's tensors must stay until the stream has come past it.
  Status run(const Step& step, Queue queue = {}) noexcept;

  /// With `check_inputs`: what was wrong with the first step that was refused since this was last asked. Waits for the
  /// device; call it when the queue has come past those steps.
  Status inputs_status();

  /// Runs (cuda: enqueues) one stage of a step alone, on what the stages before it left behind: to measure it. Of one
  /// rank; `stage` is one of `stage_names`.
  Status run_stage(const Step& step, std::string_view stage, Queue queue = {}) noexcept;
  /// The overlap mode of a prepared (B, q); backends that compute on the host run each as serial.
  OverlapMode overlap(int rows, int q) const;
  /// The stages of a prepared (B, q), in the order in which they run or are enqueued.
  std::vector<std::string_view> stage_names(int rows, int q) const;

  const LayerSizes& sizes() const;
  StageViews stages() const;               ///< of the last run
  View<const std::byte, 3> query() const;  ///< `stages().query`
  /// Packed weights of this layer and the context's shared scratch, itemised.
  std::vector<ReservedItem> reserved_bytes() const;
  /// One line a (B, q): the kernel of each stage, the overlap mode, and `plan_rows` where the plan is one for more
  /// rows.
  std::vector<std::string> choices() const;
  /// From now on `run` appends a time per stage to `*times` (null: stop). The vector must have capacity to spare. The
  /// cuda backend, which does not wait, appends nothing.
  void record_times(std::vector<StageTime>* times);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dsacore
