// What the file tests share: a folder that goes away, raw bytes of files, files taken apart and put together again.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "dsacore/status.h"
#include "io/generate.h"
#include "io/safetensors.h"
#include "io/safetensors_writer.h"

namespace dsacore::test {

/// A new folder under the system's temporary one, removed at the end.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "dsacore-io-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }
  /// Names of all files in it, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_bytes(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}

/// A safetensors file: the header's length, the header, the data.
inline std::string file_bytes(std::string_view header, std::string_view data = {}) {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes.append(header).append(data);
}

/// The error that `f` throws; a test failure where it throws none.
template <class F>
Error thrown_by(F&& f) {
  try {
    f();
  } catch (const Exception& e) {
    return e.error();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

/// The first byte in which two texts differ, or nothing.
inline ::testing::AssertionResult same_bytes(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << a.size() << " and " << b.size() << " bytes";
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    return ::testing::AssertionFailure() << "byte " << i << " differs first: " << int(uint8_t(a[i])) << " and "
                                         << int(uint8_t(b[i]));
  }
  return ::testing::AssertionSuccess();
}

inline std::string_view bytes_of(const TensorView& view) {
  return {reinterpret_cast<const char*>(view.data), size_t(view.elements() * element_bytes(view.type))};
}

/// A file in parts, to be written again with one of them changed.
struct FileParts {
  explicit FileParts(const std::string& path) : file(SafetensorsFile::open(path)) {
    metadata = file.metadata();
    for (const SafetensorsTensor& tensor : file.tensors()) {
      TensorView view;
      view.data = file.data(tensor);
      view.type = *tensor.type;
      view.rank = int(tensor.shape.size());
      std::copy(tensor.shape.begin(), tensor.shape.end(), view.shape);
      set_dense(view);
      tensors.push_back({tensor.name, view});
    }
  }

  static void set_dense(TensorView& view) {
    int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.stride[i] = stride;
      stride *= view.shape[i];
    }
  }

  TensorView& at(std::string_view name) {
    for (NamedTensor& tensor : tensors) {
      if (tensor.name == name) return tensor.view;
    }
    throw std::runtime_error("no tensor " + std::string(name));
  }
  /// Another shape for the same bytes, of which some may be left out.
  void reshape(std::string_view name, const std::vector<int64_t>& shape) {
    TensorView& view = at(name);
    view.rank = int(shape.size());
    std::copy(shape.begin(), shape.end(), view.shape);
    set_dense(view);
  }
  /// Another type for the same shape, all bytes zero.
  void retype(std::string_view name, ElementType type) {
    TensorView& view = at(name);
    view.type = type;
    zeros.emplace_back(size_t(view.elements() * element_bytes(type)));
    view.data = zeros.back().data();
  }
  void write(const std::string& path) const { write_safetensors(path, tensors, metadata); }

  SafetensorsFile file;
  std::vector<NamedTensor> tensors;
  FileMetadata metadata;
  std::vector<std::vector<std::byte>> zeros;
};

/// A case small enough for every test.
inline CaseOptions small_case() {
  CaseOptions options;
  options.seed = 5;
  options.heads = 2;
  options.batch = 4;
  options.context = "70,3,64,130";
  options.topk = 32;
  options.index_heads = 8;
  options.q_lora = 128;
  return options;
}

}  // namespace dsacore::test
