// Output files: what is read back is what was written, with and without dumps.
#include "io/out_file.h"

#include <gtest/gtest.h>

#include <numeric>

#include "io/io_support.h"
#include "io/step_file.h"

namespace dsacore::test {
namespace {

/// Numbered elements and a dense view of them.
template <class T>
struct Numbers {
  template <class... Extents>
  explicit Numbers(Extents... extents) : values(size_t((int64_t(extents) * ...))) {
    for (size_t i = 0; i < values.size(); ++i) {
      if constexpr (std::is_same_v<T, BFloat16>)
        values[i] = {uint16_t(i)};
      else
        values[i] = T(i);
    }
    view = tensor_view(View<const T, int(sizeof...(Extents))>(values.data(), extents...));
  }
  std::vector<T> values;
  TensorView view;
};

TEST(OutFile, ReadsBackWhatWasWritten) {
  const TempFolder folder;
  constexpr int kB = 3, kHeads = 2, kIndexHeads = 8, kTopk = 5, kQLora = 128;
  const Numbers<BFloat16> out(kB, kHeads * kValue), q_c(kB, kQLora), latent(kB, kHeads, kLatent);
  const Numbers<uint8_t> query(kB, kHeads, kQueryRow), index_query(kB, kIndexHeads, kIndexDim), kv(4, 64, 352),
      index(4, 64, 68);
  const Numbers<float> head_weights(kB, kIndexHeads), lse(kB, kHeads);
  const Numbers<int32_t> tokens(kB, kTopk), rows(kB, kTopk), valid(kB);
  const OutTensors written{out.view,  q_c.view,   query.view,  index_query.view, head_weights.view, tokens.view,
                           rows.view, valid.view, latent.view, lse.view,         kv.view,           index.view};
  write_out_file(folder.file("out"), written);
  OutFile first = read_out_file(folder.file("out"));
  const OutFile read = std::move(first);
  EXPECT_TRUE(read.unknown.tensors.empty());
  const auto a = written.named();
  const auto b = read.tensors.named();
  for (size_t i = 0; i < a.size(); ++i) {
    const TensorView& x = *a[i].second;
    const TensorView& y = *b[i].second;
    ASSERT_EQ(x.type, y.type) << a[i].first;
    ASSERT_EQ(x.rank, y.rank) << a[i].first;
    for (int axis = 0; axis < x.rank; ++axis) {
      EXPECT_EQ(x.shape[axis], y.shape[axis]) << a[i].first;
      EXPECT_EQ(x.stride[axis], y.stride[axis]) << a[i].first;
    }
    EXPECT_TRUE(same_bytes(bytes_of(x), bytes_of(y))) << a[i].first;
  }
}

TEST(OutFile, OnlyOutNeedBeThere) {
  const TempFolder folder;
  const Numbers<BFloat16> out(2, 256);
  OutTensors written;
  written.out = out.view;
  write_out_file(folder.file("out"), written);
  const OutFile read = read_out_file(folder.file("out"));
  for (const auto& [name, view] : read.tensors.named()) EXPECT_EQ(view->empty(), name != "out") << name;
  EXPECT_EQ(read.tensors.out.as<BFloat16>()[257].bits, 257);
}

TEST(OutFile, NamesWhatIsWrong) {
  const TempFolder folder;
  const std::string path = folder.file("out");
  const Numbers<BFloat16> out(2, 256);
  const Numbers<int32_t> valid(3);
  const auto error_with = [&](OutTensors tensors) {
    write_out_file(path, tensors);
    return thrown_by([&] { read_out_file(path); });
  };
  Error error = error_with({});
  EXPECT_EQ(error.argument, path + ": out");
  EXPECT_EQ(error.value, "absent");
  OutTensors tensors;
  tensors.out = out.view;
  tensors.valid = valid.view;
  error = error_with(tensors);
  EXPECT_EQ(error.argument, path + ": valid");
  EXPECT_EQ(error.value, "I32 [3]");
  tensors.valid = out.view;
  error = error_with(tensors);
  EXPECT_EQ(error.value, "BF16 [2, 256]");

  const Case c = make_case(small_case());
  write_step_file(path, c.step, c.kv, c.index);
  error = thrown_by([&] { read_out_file(path); });
  EXPECT_EQ(error.code, ErrorCode::kRefused);
  EXPECT_EQ(error.argument, path + ": format");
  EXPECT_EQ(error.value, "dsacore.step");
}

}  // namespace
}  // namespace dsacore::test
