// The whole layer on a GPU through the public interface: against the CPU backends, in graphs of several layers under
// every overlap mode with everything between the stages poisoned, with permuted pages and padded requests.
//
// DSACORE_REPLAYS: replays of each graph (default 40).
#include "support/layer.h"

#include <cuda_runtime.h>

#include <array>
#include <barrier>
#include <cstdlib>
#include <memory>
#include <thread>

#include "backends/cuda/launch.h"
#include "cuda/chain_kernels.h"
#include "driver/compare.h"
#include "driver/placed_inputs.h"
#include "driver/run_case.h"
#include "layer/context.h"

namespace dsacore {
namespace {

constexpr const char* kModes[] = {"serial", "wait", "fork", "front", "late", "late_front"};

CaseOptions small() {
  CaseOptions o;
  o.seed = 5;
  o.heads = 6;
  o.batch = 4;
  o.context = "30,700,2100,4000";
  o.q_lora = 512;
  o.index_heads = 16;
  o.topk = 512;
  return o;
}

Memory& memory_of(Context& context) { return context.impl().memory(); }
Device& device_of(Context& context) { return *context.impl().device; }

std::vector<uint16_t> bits_of(const std::vector<BFloat16>& values) {
  std::vector<uint16_t> bits;
  for (BFloat16 value : values) bits.push_back(value.bits);
  return bits;
}

// ---- against the backends of the host ----

struct Shape {
  std::string name;
  CaseOptions options;
};
void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

std::vector<Shape> shapes() {
  std::vector<Shape> list;
  for (KvFormat kv : {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
    for (IndexFormat index : {IndexFormat::kFp8, IndexFormat::kMxfp4}) {
      for (int heads : {6, 12, 48, 96}) {
        CaseOptions o = small();
        o.kv_format = kv;
        o.index_format = index;
        o.heads = heads;
        if (heads == 12) o.q_lora = 1536, o.index_heads = 32, o.topk = 2048, o.context = "1,2048,2300,9000";
        list.push_back({std::string(name_of(kv)) + "_" + std::string(name_of(index)) + "_" + std::to_string(heads), o});
      }
    }
  }
  CaseOptions o = small();
  o.q = 2;
  o.batch = 12;
  o.pad_requests = 1;
  o.page = 128;
  o.stride_rows = 384;
  o.pitch_pad = 24;
  list.push_back({"paged", o});
  o = small();
  o.batch = 35;
  o.q = 7;
  o.index_table = true;
  o.slots = SlotsKind::kMixed;
  o.k_norm_bf16 = true;
  o.no_k_bias = true;
  list.push_back({"mixed", o});
  o = small();
  o.topk = 2048;
  o.heads = 17;
  o.index_heads = 9;
  o.q_lora = 128;
  list.push_back({"odd", o});
  o = small();
  o.topk = 1;
  o.heads = 1;
  o.index_heads = 64;
  o.q_lora = 2048;
  o.batch = 1;
  list.push_back({"single", o});
  o = small();
  o.batch = 130;
  o.context = "1-900";
  o.heads = 3;
  list.push_back({"many_rows", o});
  return list;
}

/// Each stage alone, with the host waiting: what goes wrong on the device is named.
void run_stage_by_stage(const Case& c) {
  Context context({.backend = BackendKind::kCuda});
  const PlacedInputs placed(inputs_of(c), memory_of(context));
  const Inputs& in = placed.inputs();
  PreparedLayer layer(context, in.config, in.weights, test::options_for(c));
  layer.prepare_cache(in.kv, in.index);
  for (std::string_view stage : layer.stage_names(c.step.batch, c.step.q)) {
    try {
      layer.run_stage(in.step, stage).or_throw();
      device_of(context).wait({});
    } catch (const Exception& e) {
      throw Exception({e.error().code, std::string(stage) + " of " + layer.choices()[0] + ": " + e.error().argument,
                       e.error().value, e.error().allowed});
    }
  }
}

class CudaShapes : public ::testing::TestWithParam<Shape> {};

/// A run on the device agrees with one on the host, stage by stage.
void expect_agreement(const CaseOptions& o, BackendKind host) {
  const Case before = make_case(o), first = make_case(o), second = make_case(o);
  RunOptions options;
  options.dump = true;
  options.backend = host;
  const RunResult expected = run_case(inputs_of(first), options);
  options.backend = BackendKind::kCuda;
  const RunResult got = run_case(inputs_of(second), options);
  const Backend& judge = host == BackendKind::kReference ? reference_backend() : *cpu_backend(expected.report.target);
  CompareOptions compare_options;
  compare_options.topk_tolerance = kCudaTopkTolerance;
  compare_options.threads = expected.report.threads;
  for (const AgreementLine& line : compare(inputs_of(before), judge, expected.outputs, got.outputs, compare_options)) {
    EXPECT_TRUE(line.ok) << line.tensor << ": " << line.figure << ", allowed " << line.bound;
  }
}

TEST_P(CudaShapes, AgreesWithTheCpuStageByStage) {
  const Case c = make_case(GetParam().options);
  ASSERT_NO_THROW(run_stage_by_stage(c));
  expect_agreement(GetParam().options, BackendKind::kCpu);
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaShapes, ::testing::ValuesIn(shapes()),
                         [](const auto& shape) { return shape.param.name; });

TEST(CudaLayer, AgreesWithTheReference) { expect_agreement(small(), BackendKind::kReference); }

TEST(CudaLayer, TheOutputHasTheSameBitsWithAndWithoutADump) {
  const Case first = make_case(small()), second = make_case(small());
  RunOptions options;
  options.backend = BackendKind::kCuda;
  const RunResult plain = run_case(inputs_of(first), options);
  options.dump = true;
  const RunResult dumped = run_case(inputs_of(second), options);
  EXPECT_TRUE(test::same_bits(bits_of(plain.outputs.out), bits_of(dumped.outputs.out), "out"));
}

// ---- graphs ----

constexpr int kLayers = 4;
constexpr int kVariants = 3;
constexpr int64_t kLongest = 4096;  ///< context of every chain, so that its layers have plans in common

int replays() {
  const char* text = std::getenv("DSACORE_REPLAYS");
  return text != nullptr ? std::atoi(text) : 40;
}

/// What a step's tensors hold; variants of one case differ in contents and lengths and have the same shapes.
struct Contents {
  std::vector<std::byte> projected, seq_lens;
};

template <class T, int Rank>
std::vector<std::byte> bytes_of(View<const T, Rank> view) {
  const auto* data = reinterpret_cast<const std::byte*>(view.data());
  const int64_t row = view.size() / view.extent(0);
  return {data, data + ((view.extent(0) - 1) * view.stride(0) + row) * int64_t(sizeof(T))};
}

template <class T, int Rank>
void write(Memory& memory, View<const T, Rank> view, const std::vector<std::byte>& bytes) {
  memory.copy_in(reinterpret_cast<std::byte*>(const_cast<T*>(view.data())), bytes.data(), int64_t(bytes.size()));
}

/// One of the layers that a graph runs.
struct ChainLayer {
  ChainLayer(Context& context, const CaseOptions& options, const char* mode, const std::string& kernels,
             std::vector<int> plan_rows = {})
      : made(make_case(options)), host(inputs_of(made)), placed(host, memory_of(context)), memory(memory_of(context)) {
    PrepareOptions prepare = test::options_for(made);
    prepare.overlap = mode;
    prepare.kernels = kernels;
    prepare.max_context = kLongest;
    prepare.plan_rows = std::move(plan_rows);
    const Inputs& in = placed.inputs();
    layer = std::make_unique<PreparedLayer>(context, in.config, in.weights, prepare);
    layer->prepare_cache(in.kv, in.index);
    for (int v = 0; v < kVariants; ++v) {
      CaseOptions other = options;
      other.seed += uint64_t(1000 * v);
      const Case c = make_case(other);
      // Lengths that shrink by a few tokens keep within the case's pages and slots.
      std::vector<int32_t> lengths;
      for (int64_t r = 0; r < made.step.seq_lens.extent(0); ++r) {
        lengths.push_back(std::max(options.q, made.step.seq_lens(r) - 3 * v));
      }
      Contents contents;
      contents.projected = bytes_of(c.step.projected);
      contents.seq_lens = bytes_of(View<const int32_t, 1>(lengths.data(), int64_t(lengths.size())));
      variants.push_back(std::move(contents));
    }
  }

  /// Puts a variant in and the caches back.
  void reset(int variant) {
    const Contents& c = variants[size_t(variant)];
    const Step& step = placed.inputs().step;
    write(memory, step.projected, c.projected);
    write(memory, step.seq_lens, c.seq_lens);
    memory.copy_in(placed.inputs().kv.data, host.kv.data, cache_bytes(host.kv));
    memory.copy_in(placed.inputs().index.data, host.index.data, cache_bytes(host.index));
  }

  std::vector<uint16_t> out() const { return bits_of(placed.fetch_out()); }
  std::vector<std::byte> kv() const {
    std::vector<std::byte> bytes(size_t(cache_bytes(host.kv)));
    memory.copy_out(bytes.data(), placed.inputs().kv.data, int64_t(bytes.size()));
    return bytes;
  }

  /// Spoils everything between the stages, and the output.
  void poison(Queue queue) const {
    const StageViews v = layer->stages();
    const auto all = [](auto view) {
      using Element = std::remove_cvref_t<decltype(*view.data())>;
      const auto* data = reinterpret_cast<const std::byte*>(view.data());
      return test::Spoiled{const_cast<std::byte*>(data), view.size() * int64_t(sizeof(Element))};
    };
    const std::array<test::Spoiled, 10> tensors = {
        all(v.q_c),       all(v.query), all(v.index_query), all(v.head_weights), all(v.topk_tokens),
        all(v.topk_rows), all(v.valid), all(v.latent),      all(v.lse),          all(placed.inputs().step.out)};
    test::enqueue_poison(tensors, queue);
  }

  Case made;
  Inputs host;
  PlacedInputs placed;
  Memory& memory;
  std::unique_ptr<PreparedLayer> layer;
  std::vector<Contents> variants;
};

/// A kernel of the index projection that reads `q_c`, for the modes that run a norm; empty: there is none.
std::string plain_index_projection(const CaseOptions& o) {
  const ShapeKey key{{o.q_lora, o.heads, o.index_heads}, o.kv_format, o.index_format, o.topk, o.batch, o.q, 1, 4096};
  for (const Kernel<IndexProjectionArgs>& kernel : cuda_backend().index_projection) {
    if (!kernel.front && kernel.accepts(key).ok) return "index_projection=" + std::string(kernel.name);
  }
  return {};
}

/// Layers run one by one with the host waiting after each, then all in one graph with poison between them: the same
/// bits.
void expect_graph_gives_the_same_bits(const CaseOptions& options, const char* mode, const std::string& kernels,
                                      const Backend* backend, int count) {
  Context context({.backend = BackendKind::kCuda});
  if (backend != nullptr) context.impl().backend = backend;
  std::vector<std::unique_ptr<ChainLayer>> layers;
  for (int i = 0; i < kLayers; ++i) {
    CaseOptions o = options;
    o.seed += uint64_t(i);
    layers.push_back(std::make_unique<ChainLayer>(context, o, mode, kernels));
  }
  SCOPED_TRACE(std::string(mode) + ": " + layers[0]->layer->choices()[0]);
  Device& device = device_of(context);
  const Queue queue = device.own_queue();
  std::vector<std::vector<uint16_t>> outs(static_cast<size_t>(kVariants * kLayers));
  std::vector<std::vector<std::byte>> caches(static_cast<size_t>(kVariants));
  for (int v = 0; v < kVariants; ++v) {
    for (int i = 0; i < kLayers; ++i) {
      ChainLayer& l = *layers[size_t(i)];
      l.reset(v);
      l.layer->run(l.placed.inputs().step, queue).or_throw();
      device.wait(queue);
      outs[size_t(v * kLayers + i)] = l.out();
    }
    caches[size_t(v)] = layers[kLayers - 1]->kv();
  }
  const std::unique_ptr<Recording> graph = device.record([&](Queue recorded) {
    for (const auto& l : layers) {
      l->poison(recorded);
      l->layer->run(l->placed.inputs().step, recorded).or_throw();
    }
  });
  for (int replay = 0; replay < count; ++replay) {
    const int v = (replay * 7 + replay / kVariants) % kVariants;
    for (const auto& l : layers) l->reset(v);
    graph->replay();
    device.wait(queue);
    for (int i = 0; i < kLayers; ++i) {
      ASSERT_TRUE(test::same_bits(layers[size_t(i)]->out(), outs[size_t(v * kLayers + i)], "out"))
          << "replay " << replay << ", layer " << i << ", variant " << v;
    }
    if (replay % 16 == 0) {
      ASSERT_TRUE(test::same_bits(layers[kLayers - 1]->kv(), caches[size_t(v)], "kv_cache")) << "replay " << replay;
    }
  }
}

class CudaModes : public ::testing::TestWithParam<const char*> {};

TEST_P(CudaModes, APoisonedGraphGivesTheSameBits) {
  expect_graph_gives_the_same_bits(small(), GetParam(), {}, nullptr, replays());
  if (const std::string plain = plain_index_projection(small()); !plain.empty()) {
    expect_graph_gives_the_same_bits(small(), GetParam(), plain, nullptr, replays());
  }
}

TEST_P(CudaModes, APoisonedGraphOfManyHeadsGivesTheSameBits) {
  CaseOptions o = small();
  o.heads = 96;
  o.batch = 16;
  o.q = 2;
  expect_graph_gives_the_same_bits(o, GetParam(), {}, nullptr, replays() / 4 + 1);
}

TEST_P(CudaModes, AHeldSparseCoreReadsWhatItShould) {
  Backend backend = cuda_backend();
  backend.sparse_core = test::held_cores();
  expect_graph_gives_the_same_bits(small(), GetParam(), {}, &backend, replays());
}

/// Layers of several batches under one capacity, in one graph with poison between them, give the bits of layers that
/// have plans of their own.
TEST_P(CudaModes, BatchesUnderACapacityGiveTheBitsOfTheirOwnPlans) {
  Context own({.backend = BackendKind::kCuda}), shared({.backend = BackendKind::kCuda});
  std::vector<std::unique_ptr<ChainLayer>> layers;
  std::vector<std::vector<uint16_t>> outs;
  for (int batch : {1, 12, 16}) {
    CaseOptions o = small();
    o.seed += uint64_t(batch);
    o.batch = batch;
    o.context = "1-900";
    if (batch == 12) o.pad_requests = 2;
    ChainLayer alone(own, o, GetParam(), {});
    layers.push_back(std::make_unique<ChainLayer>(shared, o, GetParam(), "", std::vector{16}));
    for (int v = 0; v < kVariants; ++v) {
      alone.reset(v);
      alone.layer->run(alone.placed.inputs().step).or_throw();
      device_of(own).wait({});
      outs.push_back(alone.out());
    }
    layers.back()->layer->run(layers.back()->placed.inputs().step).or_throw();  // so that there is something to poison
  }
  EXPECT_EQ(shared.plans(), 1);
  EXPECT_EQ(own.plans(), 3);
  Device& device = device_of(shared);
  device.wait({});
  const std::unique_ptr<Recording> graph = device.record([&](Queue recorded) {
    for (const auto& l : layers) {
      l->poison(recorded);
      l->layer->run(l->placed.inputs().step, recorded).or_throw();
    }
  });
  for (int replay = 0; replay < replays() / 4 + 1; ++replay) {
    const int v = replay % kVariants;
    for (const auto& l : layers) l->reset(v);
    graph->replay();
    device.wait(device.own_queue());
    for (size_t i = 0; i < layers.size(); ++i) {
      ASSERT_TRUE(test::same_bits(layers[i]->out(), outs[i * kVariants + size_t(v)], "out"))
          << "replay " << replay << ", " << layers[i]->layer->choices()[0];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, CudaModes, ::testing::ValuesIn(kModes),
                         [](const auto& mode) { return std::string(mode.param); });

/// Modes place the same kernels elsewhere; where the same ones run, the bits are the same.
TEST(CudaLayer, TheModesGiveTheSameBits) {
  std::vector<uint16_t> want;
  for (const char* mode : kModes) {
    const Case c = make_case(small());
    RunOptions options;
    options.backend = BackendKind::kCuda;
    options.overlap = mode;
    const std::vector<uint16_t> got = bits_of(run_case(inputs_of(c), options).outputs.out);
    if (want.empty()) want = got;
    EXPECT_TRUE(test::same_bits(got, want, mode));
  }
}

// ---- plans and side streams ----

int64_t total_of(const std::vector<ReservedItem>& items) {
  int64_t bytes = 0;
  for (const ReservedItem& item : items) bytes += item.bytes;
  return bytes;
}

TEST(CudaLayer, LayersShareTheirPlansAndTheirScratch) {
  Context context({.backend = BackendKind::kCuda});
  const ChainLayer first(context, small(), "front", {});
  const int64_t bytes = total_of(context.reserved());
  EXPECT_EQ(context.plans(), 1);
  CaseOptions o = small();
  o.seed += 1;
  const ChainLayer second(context, o, "front", {}), third(context, o, "late_front", {});
  EXPECT_EQ(context.plans(), 2) << "another mode";
  EXPECT_EQ(total_of(context.reserved()), bytes);
}

TEST(CudaLayer, AContextTakesItsDevicesSideStream) {
  const auto side_of = [](Context& context) {
    device_of(context).open_side();
    return device_of(context).side().stream;
  };
  const auto context = [] { return std::make_unique<Context>(ContextOptions{.backend = BackendKind::kCuda}); };
  const auto lasting = context();
  const void* const first = side_of(*lasting);
  EXPECT_NE(first, nullptr);
  auto second = context();
  const void* const taken = side_of(*second);
  EXPECT_NE(taken, first) << "contexts that live at once";
  second.reset();
  auto third = context();
  EXPECT_EQ(side_of(*third), taken) << "one after the other";
}

/// A chain of one layer that forks, in a context of its own, and the bits that it gives.
struct Forking {
  explicit Forking(uint64_t seed) : layer(context, seeded(seed), "front", {}) {
    run(device().own_queue());
    device().wait(device().own_queue());
    want = layer.out();
  }
  static CaseOptions seeded(uint64_t seed) {
    CaseOptions o = small();
    o.seed = seed;
    return o;
  }
  Device& device() { return device_of(context); }
  void run(Queue queue) {
    layer.poison(queue);
    layer.layer->run(layer.placed.inputs().step, queue).or_throw();
  }
  void expect_bits(const char* what) { EXPECT_TRUE(test::same_bits(layer.out(), want, what)); }

  Context context{{.backend = BackendKind::kCuda}};
  ChainLayer layer;
  std::vector<uint16_t> want;
};

TEST(CudaLayer, TwoContextsAreCapturedAtOnce) {
  Forking first(21), second(22);
  ASSERT_EQ(first.layer.layer->overlap(4, 1), OverlapMode::kFront) << "it does not fork";
  std::barrier both(2);
  const auto capture_and_replay = [&](Forking& one) {
    const std::unique_ptr<Recording> graph = one.device().record([&](Queue queue) {
      for (int i = 0; i < 3; ++i) {
        both.arrive_and_wait();  // each is under capture, and its side stream from the second time on
        one.run(queue);
      }
      both.arrive_and_wait();
    });
    for (int i = 0; i < 20; ++i) graph->replay();
    one.device().wait(one.device().own_queue());
  };
  std::exception_ptr error;
  std::thread other([&] {
    try {
      capture_and_replay(second);
    } catch (...) {
      error = std::current_exception();
      both.arrive_and_drop();
    }
  });
  try {
    capture_and_replay(first);
  } catch (const Exception& e) {
    ADD_FAILURE() << e.what();
    both.arrive_and_drop();
  }
  other.join();
  if (error) std::rethrow_exception(error);
  first.expect_bits("first");
  second.expect_bits("second");
}

TEST(CudaLayer, AContextRunsWhileAnotherIsCaptured) {
  Forking captured(23), running(24);
  const std::unique_ptr<Recording> graph = captured.device().record([&](Queue queue) {
    captured.run(queue);
    running.run(running.device().own_queue());
    captured.run(queue);
  });
  running.device().wait(running.device().own_queue());
  running.expect_bits("running");
  graph->replay();
  captured.device().wait(captured.device().own_queue());
  captured.expect_bits("captured");
}

// ---- pages and padding ----

TEST(CudaLayer, WhereAPageLiesChangesNothing) {
  CaseOptions o = small();
  o.spare_pages = 40;
  const Case c = make_case(o);
  Case moved = make_case(o);
  // Page p of both caches goes to `pages - 1 - p`.
  const int64_t pages = moved.kv.pages;
  ASSERT_EQ(moved.index.pages, pages);
  const auto mirror = [&](std::byte* data, int64_t bytes) {
    std::vector<std::byte> old(data, data + pages * bytes);
    for (int64_t p = 0; p < pages; ++p) std::copy_n(old.begin() + (pages - 1 - p) * bytes, bytes, data + p * bytes);
  };
  mirror(moved.kv.data, int64_t(moved.kv.stride_rows) * moved.kv.row_bytes);
  mirror(moved.index.data, int64_t(kIndexPage) * moved.index.row_bytes);
  std::vector<int32_t> table(c.step.block_table.data(), c.step.block_table.data() + c.step.block_table.size());
  for (int32_t& page : table) page = int32_t(pages - 1) - page;
  std::vector<int64_t> slots, index_slots;
  const auto moved_slot = [&](int64_t slot) {
    return slot < 0 ? slot : (pages - 1 - slot / kIndexPage) * kIndexPage + slot % kIndexPage;
  };
  for (int64_t b = 0; b < c.step.slots.extent(0); ++b) {
    slots.push_back(moved_slot(c.step.slots(b)));
    index_slots.push_back(moved_slot(c.step.index_slots(b)));
  }
  Inputs inputs = inputs_of(moved);
  inputs.step.block_table =
      View<const int32_t, 2>(table.data(), c.step.block_table.extent(0), c.step.block_table.extent(1));
  inputs.step.slots = View<const int64_t, 1>(slots.data(), int64_t(slots.size()));
  inputs.step.index_slots = View<const int64_t, 1>(index_slots.data(), int64_t(index_slots.size()));
  RunOptions options;
  options.backend = BackendKind::kCuda;
  options.dump = true;
  const RunResult want = run_case(inputs_of(c), options), got = run_case(inputs, options);
  EXPECT_TRUE(test::same_bits(got.outputs.stages->topk_tokens, want.outputs.stages->topk_tokens, "topk_tokens"));
  EXPECT_TRUE(test::same_bits(bits_of(got.outputs.out), bits_of(want.outputs.out), "out"));
  EXPECT_TRUE(test::same_bits(got.outputs.stages->lse, want.outputs.stages->lse, "lse"));
}

TEST(CudaLayer, MissingRequestsAreEmptyOnes) {
  CaseOptions o = small();
  o.q = 2;
  o.batch = 8;
  const Case whole = make_case(o), part = make_case(o);
  RunOptions options;
  options.backend = BackendKind::kCuda;
  options.dump = true;
  const RunResult want = run_case(inputs_of(whole), options);
  for (int64_t requests : {0, 1, 3}) {
    Inputs inputs = inputs_of(part);
    inputs.step = test::first_requests(part, requests);
    const RunResult got = run_case(inputs, options);
    const int64_t rows = requests * o.q;
    const int64_t width = int64_t(o.heads) * kValue;
    for (int64_t i = 0; i < o.batch * width; ++i) {
      const uint16_t expected = i < rows * width ? want.outputs.out[size_t(i)].bits : uint16_t(0);
      ASSERT_EQ(got.outputs.out[size_t(i)].bits, expected) << requests << " requests, row " << i / width;
    }
    const StageDump& dump = *got.outputs.stages;
    for (int64_t b = rows; b < o.batch; ++b) {
      EXPECT_EQ(dump.valid[size_t(b)], 0);
      EXPECT_EQ(dump.topk_tokens[size_t(b * o.topk)], -1);
      EXPECT_EQ(dump.topk_rows[size_t((b + 1) * o.topk - 1)], -1);
      EXPECT_EQ(dump.latent[size_t(b * o.heads * kLatent)].bits, 0);
      EXPECT_TRUE(std::isinf(dump.lse[size_t(b * o.heads)])) << dump.lse[size_t(b * o.heads)];
    }
  }
}

TEST(CudaLayer, ANanHarmsItsOwnRowAlone) {
  CaseOptions o = small();
  o.context = "300,2500";
  const Case clean = make_case(o);
  RunOptions options;
  options.backend = BackendKind::kCuda;
  const std::vector<uint16_t> want = bits_of(run_case(inputs_of(clean), options).outputs.out);
  for (int64_t column : {int64_t(3), clean.sizes.kv_a_at() + 5, clean.sizes.kv_a_at() + 520, clean.sizes.gate_at() + 7,
                         clean.sizes.wk_at() + 9, clean.sizes.wv_at() + 1}) {
    for (uint16_t poison : {uint16_t(0x7FC0), uint16_t(0xFF80)}) {
      const Case c = make_case(o);
      const auto* bits = reinterpret_cast<const uint16_t*>(c.step.projected.row(2));
      const_cast<uint16_t*>(bits)[column] = poison;
      const std::vector<uint16_t> got = bits_of(run_case(inputs_of(c), options).outputs.out);
      const size_t width = want.size() / size_t(o.batch);
      for (size_t i = 0; i < want.size(); ++i) {
        if (i / width == 2) continue;
        ASSERT_EQ(got[i], want[i]) << "row " << i / width << " after a NaN in column " << column;
      }
    }
  }
}

// ---- refusals and devices ----

TEST(CudaLayer, RefusesWhatTheHostCanSee) {
  const Case c = make_case(small());
  const Inputs host = inputs_of(c);
  Context context({.backend = BackendKind::kCuda});
  const PlacedInputs placed(host, memory_of(context));
  const Inputs& in = placed.inputs();
  const PrepareOptions options = test::options_for(c);
  EXPECT_EQ(test::error_of([&] { PreparedLayer(context, in.config, host.weights, options); }).argument,
            "q_a_layernorm.weight")
      << "weights in host memory";
  PreparedLayer layer(context, in.config, in.weights, options);
  LayerWeights weights = in.weights;
  for (TensorRef LayerWeights::*tensor : {&LayerWeights::q_b_proj, &LayerWeights::wq_b}) {
    (weights.*tensor).data = static_cast<const std::byte*>((in.weights.*tensor).data) + 8;
    EXPECT_EQ(test::error_of([&] { PreparedLayer(context, in.config, weights, options); }).allowed,
              "must begin at a multiple of 16 bytes");
    weights = in.weights;
  }
  EXPECT_EQ(test::error_of([&] { layer.prepare_cache(host.kv, host.index); }).argument, "kv_cache");
  KvCache kv = in.kv;
  kv.data += 8;
  EXPECT_EQ(test::error_of([&] { layer.prepare_cache(kv, in.index); }).argument, "kv_cache");
  layer.prepare_cache(in.kv, in.index);
  const auto refused = [&](auto spoil) {
    Step step = in.step;
    spoil(step);
    const Status status = layer.run(step);
    EXPECT_FALSE(status.ok());
    return status.ok() ? std::string() : status.error().argument;
  };
  EXPECT_EQ(refused([](Step& s) { s.page = 128; }), "page");
  EXPECT_EQ(refused([](Step& s) { s.batch = 8; }), "batch, q");
  EXPECT_EQ(refused([](Step& s) { s.projected = s.projected.with_pitch(s.projected.stride(0) + 8); }),
            "projected pitch");
  EXPECT_EQ(refused([](Step& s) { s.slots = s.slots.first(1); }), "slots extent");
  EXPECT_EQ(refused([](Step& s) {
              const auto* data = reinterpret_cast<const std::byte*>(s.slots.data()) + 4;
              s.slots = View<const int64_t, 1>(reinterpret_cast<const int64_t*>(data), s.slots.extent(0));
            }),
            "slots");
  Step step = in.step;
  step.page = kIndexPage;
  EXPECT_TRUE(layer.run(step).ok());
  device_of(context).wait({});
}

TEST(CudaLayer, ACheckedStepThatPointsOutsideWritesZerosAndIsReported) {
  const Case c = make_case(small());
  const Inputs host = inputs_of(c);
  Context context({.backend = BackendKind::kCuda});
  const PlacedInputs placed(host, memory_of(context));
  const Inputs& in = placed.inputs();
  PrepareOptions options = test::options_for(c);
  options.check_inputs = true;
  PreparedLayer layer(context, in.config, in.weights, options);
  layer.prepare_cache(in.kv, in.index);
  const auto out_after = [&](std::vector<int32_t> lengths) {
    memory_of(context).copy_in(reinterpret_cast<std::byte*>(const_cast<int32_t*>(in.step.seq_lens.data())),
                               lengths.data(), int64_t(lengths.size()) * 4);
    layer.run(in.step).or_throw();
    device_of(context).wait({});
    return bits_of(placed.fetch_out());
  };
  std::vector<int32_t> lengths(host.step.seq_lens.data(), host.step.seq_lens.data() + host.step.seq_lens.extent(0));
  const std::vector<uint16_t> want = out_after(lengths);
  EXPECT_TRUE(layer.inputs_status().ok());
  EXPECT_GT(std::count_if(want.begin(), want.end(), [](uint16_t bits) { return bits != 0; }), 0);
  std::vector<int32_t> wrong = lengths;
  wrong[1] = 2000000;
  const std::vector<uint16_t> zeros = out_after(wrong);
  EXPECT_EQ(std::count(zeros.begin(), zeros.end(), 0), std::ptrdiff_t(zeros.size()));
  const Status status = layer.inputs_status();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().argument, "seq_lens[1]");
  EXPECT_EQ(status.error().value, "2000000");
  EXPECT_TRUE(layer.inputs_status().ok()) << "asked once";
  EXPECT_TRUE(test::same_bits(out_after(lengths), want, "out"));
}

TEST(CudaLayer, LeavesTheCurrentDeviceAsItWas) {
  int count = 0;
  cuda::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (count < 2) GTEST_SKIP() << "needs two GPUs";
  std::vector<uint16_t> want;
  for (int current : {0, 1}) {
    cuda::check(cudaSetDevice(current), "cudaSetDevice");
    const Case c = make_case(small());
    RunOptions options;
    options.backend = BackendKind::kCuda;
    options.device = 1;
    const std::vector<uint16_t> got = bits_of(run_case(inputs_of(c), options).outputs.out);
    int now = -1;
    cuda::check(cudaGetDevice(&now), "cudaGetDevice");
    EXPECT_EQ(now, current);
    if (want.empty()) want = got;
    EXPECT_TRUE(test::same_bits(got, want, "out"));
  }
  cuda::check(cudaSetDevice(0), "cudaSetDevice");
}

TEST(CudaLayer, ItemisesWhatItReserves) {
  const Case c = make_case(small());
  Context context({.backend = BackendKind::kCuda});
  const PlacedInputs placed(inputs_of(c), memory_of(context));
  const PreparedLayer layer(context, placed.inputs().config, placed.inputs().weights, test::options_for(c));
  int scratch = 0;
  for (const ReservedItem& item : layer.reserved_bytes()) scratch += item.name.find(" scratch (") != std::string::npos;
  EXPECT_GE(scratch, 5) << "one of each stage";
}

}  // namespace
}  // namespace dsacore
