// Many steps over several layers on one box, with changing contents, lengths and batches, each against one rank (spec
// 7, 9); then a rank is lost in the middle of a step, and the box is made again.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "driver/inputs.h"
#include "driver/shard.h"
#include "dsacore/layer.h"
#include "format/numeric.h"
#include "io/generate.h"
#include "layer/box.h"
#include "layer/dcp_support.h"
#include "layer/ranks.h"
#include "support/targets.h"

namespace dsacore {
namespace {

using namespace std::chrono_literals;

constexpr int kLayers = 3, kHeads = 8, kTopk = 32, kPages = 64, kCap = 6;
constexpr int64_t kMaxLength = 200;

CaseOptions small_case(uint64_t seed, KvFormat format) {
  CaseOptions options;
  options.seed = seed;
  options.heads = kHeads;
  options.kv_format = format;
  options.topk = kTopk;
  options.index_heads = 8;
  options.q_lora = 128;
  options.context = "1-" + std::to_string(kMaxLength);
  return options;
}

/// One run of one layer: what goes in, and what one rank made of it.
struct Expected {
  Case made;
  int64_t requests;
  std::vector<int32_t> tokens, valid;
  std::vector<uint16_t> out;
};

Expected make_run(uint64_t seed, KvFormat format) {
  const int q = 1 + int(seed % 2);
  CaseOptions options = small_case(seed, format);
  options.batch = 2 * (1 + int(seed / 2 % 3));
  options.q = q;
  Expected run{make_case(options), 0, {}, {}, {}};
  run.requests = int64_t(seed * 7 / 3) % (options.batch / q + 1);  // the others are missing: 0 live rows too
  return run;
}

/// A layer whose caches stay where they are while their contents change.
class BoundLayer {
 public:
  BoundLayer(Context& context, const Inputs& layer, Box* box) : heads_(layer.sizes.heads) {
    PrepareOptions options;
    const int64_t pitch = layer.sizes.width();
    options.batches = {{2, pitch}, {4, pitch}, {6, pitch}};
    options.queries = {1, 2};
    options.max_context = kMaxLength;
    options.box = box;
    layer_ = std::make_unique<PreparedLayer>(context, layer.config, layer.weights, options);
    kv_ = layer.kv;
    index_ = layer.index;
    kv_.pages = index_.pages = kPages;
    kv_bytes_.resize(size_t(cache_bytes(kv_)));
    index_bytes_.resize(size_t(cache_bytes(index_)));
    kv_.data = kv_bytes_.data();
    index_.data = index_bytes_.data();
    layer_->prepare_cache(kv_, index_);
  }

  /// Runs the first `requests` requests of `step` over the caches of `from`; `out` is poisoned before.
  Status run(const Inputs& from, int64_t requests) {
    std::fill(kv_bytes_.begin(), kv_bytes_.end(), std::byte(0xFF));
    std::fill(index_bytes_.begin(), index_bytes_.end(), std::byte(0xFF));
    std::memcpy(kv_bytes_.data(), from.kv.data, size_t(cache_bytes(from.kv)));
    std::memcpy(index_bytes_.data(), from.index.data, size_t(cache_bytes(from.index)));
    Step step = from.step;
    const int64_t rows = requests * step.q;
    step.projected = step.projected.first(rows);
    step.slots = step.slots.first(rows);
    step.index_slots = step.index_slots.first(rows);
    step.block_table = step.block_table.first(requests);
    step.index_block_table = {};
    step.seq_lens = step.seq_lens.first(requests);
    out_.assign(size_t(step.batch * heads_ * kValue), 0xFFFF);
    step.out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out_.data()), step.batch, int64_t(heads_) * kValue);
    return layer_->run(step);
  }
  std::vector<int32_t> tokens() const { return copied(layer_->stages().topk_tokens); }
  std::vector<int32_t> valid() const { return copied(layer_->stages().valid); }
  const std::vector<uint16_t>& out() const { return out_; }

 private:
  template <class V>
  static std::vector<int32_t> copied(const V& view) {
    return std::vector<int32_t>(view.data(), view.data() + view.size());
  }

  int heads_;
  KvCache kv_;
  IndexCache index_;
  std::vector<std::byte> kv_bytes_, index_bytes_;
  std::vector<uint16_t> out_;
  std::unique_ptr<PreparedLayer> layer_;
};

/// A step's tensors and caches with a layer's constants and weights.
Inputs joined(const Case& layer, const Case& step) {
  Inputs inputs = inputs_of(step);
  inputs.config = layer.config;
  inputs.weights = layer.weights;
  return inputs;
}

struct Rank {
  std::unique_ptr<Context> context;
  std::unique_ptr<Box> box;
  std::vector<std::unique_ptr<BoundLayer>> layers;
};

struct Many {
  BackendKind backend;
  int ranks;
  int interleave;
  PartialFormat partial;
  KvFormat kv_format;
  int steps;
};

class DcpSteps : public ::testing::TestWithParam<Many> {
 protected:
  RankShard shard_of(int rank) const { return {GetParam().ranks, rank, GetParam().interleave}; }

  ContextOptions context_options(int threads) const {
    ContextOptions options;
    options.backend = GetParam().backend;
    options.threads = threads;
    return options;
  }

  void make_layers() {
    for (int l = 0; l < kLayers; ++l)
      layers_.push_back(make_case(small_case(uint64_t(1000 + l), GetParam().kv_format)));
    one_context_ = std::make_unique<Context>(context_options(2));
    for (const Case& layer : layers_)
      one_.push_back(std::make_unique<BoundLayer>(*one_context_, inputs_of(layer), nullptr));
  }

  /// Every rank's box and layers, on fresh transports. Collective.
  void make_ranks(std::chrono::milliseconds deadline) {
    ranks_.clear();
    ranks_.resize(size_t(GetParam().ranks));
    ends_ = make_thread_transports(GetParam().ranks);
    on_ranks(GetParam().ranks, [&](int rank) {
      Rank& mine = ranks_[size_t(rank)];
      BoxOptions options;
      options.cap = kCap;
      options.heads = kHeads / GetParam().ranks;
      options.topk = kTopk;
      options.kv_format = GetParam().kv_format;
      options.partial = GetParam().partial;
      options.interleave = GetParam().interleave;
      options.deadline = deadline;
      mine.context = std::make_unique<Context>(context_options(1 + rank % 2));
      mine.box = std::make_unique<Box>(ends_[size_t(rank)], options);
      for (const Case& layer : layers_) {
        const Shard shard_of_layer = shard(inputs_of(layer), shard_of(rank));
        mine.layers.push_back(std::make_unique<BoundLayer>(*mine.context, shard_of_layer.inputs, mine.box.get()));
      }
    });
  }

  /// Runs of `steps` steps over all layers, and what one rank makes of them.
  std::vector<Expected> expect(int first, int steps) {
    std::vector<Expected> runs;
    for (int i = 0; i < steps * kLayers; ++i) {
      Expected run = make_run(uint64_t(first * kLayers + i), GetParam().kv_format);
      BoundLayer& layer = *one_[size_t(i % kLayers)];
      layer.run(joined(layers_[size_t(i % kLayers)], run.made), run.requests).or_throw();
      run.tokens = layer.tokens();
      run.valid = layer.valid();
      run.out = layer.out();
      runs.push_back(std::move(run));
    }
    return runs;
  }

  Status run_on(int rank, size_t i, const Expected& run) {
    const size_t l = i % kLayers;
    const Shard mine = shard(joined(layers_[l], run.made), shard_of(rank));
    return ranks_[size_t(rank)].layers[l]->run(mine.inputs, run.requests);
  }

  /// The output of this rank's heads among those of all.
  std::vector<uint16_t> part_of(const std::vector<uint16_t>& out, int rank) const {
    const size_t width = size_t(kHeads / GetParam().ranks) * kValue, whole = size_t(kHeads) * kValue;
    std::vector<uint16_t> part;
    for (size_t at = size_t(rank) * width; at < out.size(); at += whole) {
      part.insert(part.end(), out.begin() + ptrdiff_t(at), out.begin() + ptrdiff_t(at + width));
    }
    return part;
  }

  /// All ranks run freely, one ahead of the other as it comes.
  void run_all(const std::vector<Expected>& runs) {
    on_ranks(GetParam().ranks, [&](int rank) {
      for (size_t i = 0; i < runs.size(); ++i) {
        const Expected& run = runs[i];
        const std::string where = "rank " + std::to_string(rank) + " run " + std::to_string(i);
        run_on(rank, i, run).or_throw();
        const BoundLayer& layer = *ranks_[size_t(rank)].layers[i % kLayers];
        EXPECT_TRUE(test::same_bits(layer.tokens(), run.tokens, "topk_tokens")) << where;
        EXPECT_TRUE(test::same_bits(layer.valid(), run.valid, "valid")) << where;
        expect_out(layer.out(), part_of(run.out, rank), size_t(run.made.step.batch), where);
        if (HasFailure()) return;
      }
    });
  }

  std::vector<Case> layers_;
  std::unique_ptr<Context> one_context_;
  std::vector<std::unique_ptr<BoundLayer>> one_;
  std::vector<std::shared_ptr<Transport>> ends_;
  std::vector<Rank> ranks_;
};

TEST_P(DcpSteps, EachEqualsOneRankThenTheBoxIsLostAndMadeAgain) {
  constexpr int kChunk = 20;
  make_layers();
  make_ranks(60s);
  for (int first = 0; first < GetParam().steps; first += kChunk) {
    run_all(expect(first, kChunk));
    if (HasFailure()) return;
  }
  for (const Rank& rank : ranks_) {
    EXPECT_EQ(rank.box->impl().run(), ranks_[0].box->impl().run());
    EXPECT_GE(rank.box->impl().run(), int64_t(GetParam().steps) * kLayers) << "with the runs that gathered W_UV";
  }

  // The last rank stops when the first of the others has half of its partials: the others' outputs are NaN, and their
  // errors name it.
  make_ranks(test::kSanitized ? 2000ms : 1000ms);
  const int lost = GetParam().ranks - 1;
  const int64_t last_run = ranks_[0].box->impl().run() + 4;
  ranks_[size_t(lost)].box->impl().stop_after = [&](Exchange exchange, int64_t run, int64_t words) {
    return run == last_run && exchange == Exchange::kPartials ? words / (2 * GetParam().ranks) : Box::Impl::kGoOn;
  };
  std::vector<Expected> runs = expect(0, 2);
  for (Expected& run : runs) run.requests = run.made.step.batch / run.made.step.q;
  std::vector<Status> errors(size_t(GetParam().ranks));
  on_ranks(GetParam().ranks, [&](int rank) {
    Status& error = errors[size_t(rank)];
    size_t i = 0;
    for (; i < runs.size() && error.ok(); ++i) error = run_on(rank, i, runs[i]);
    EXPECT_EQ(i, size_t(4)) << "rank " << rank << " failed in another run";
    for (const uint16_t bits : ranks_[size_t(rank)].layers[(i - 1) % kLayers]->out()) {
      ASSERT_TRUE(std::isnan(to_float(BFloat16{bits}))) << "rank " << rank << " left an output that looks valid";
    }
  });
  for (int rank = 0; rank < GetParam().ranks; ++rank) {
    ASSERT_FALSE(errors[size_t(rank)].ok()) << "rank " << rank;
    EXPECT_EQ(errors[size_t(rank)].error().code, ErrorCode::kPeerLost);
    EXPECT_EQ(errors[size_t(rank)].error().value, "rank " + std::to_string(lost))
        << errors[size_t(rank)].error().message();
  }

  make_ranks(60s);
  run_all(expect(0, kChunk));
}

INSTANTIATE_TEST_SUITE_P(
    Boxes, DcpSteps,
    ::testing::Values(Many{BackendKind::kCpu, 2, 3, PartialFormat::kProj, KvFormat::kFp8, 200},
                      Many{BackendKind::kCpu, 4, 1, PartialFormat::kBf16, KvFormat::kFp8DsMla, 200},
                      Many{BackendKind::kCpu, 8, 64, PartialFormat::kAuto, KvFormat::kNvfp4DsMla, 200},
                      Many{BackendKind::kReference, 4, 1, PartialFormat::kProj, KvFormat::kNvfp4DsMla, 40}),
    [](const ::testing::TestParamInfo<Many>& many) {
      return std::string(name_of(many.param.backend)) + "_D" + std::to_string(many.param.ranks) + "_I" +
             std::to_string(many.param.interleave) + "_" + std::string(name_of(many.param.partial)) + "_" +
             std::string(name_of(many.param.kv_format));
    });

}  // namespace
}  // namespace dsacore
