#include "io/safetensors_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "dsacore/status.h"

namespace dsacore {
namespace {

/// A file that appears under its name when it is whole.
class PendingFile {
 public:
  explicit PendingFile(const std::string& path) : path_(path), target_(path) {
    struct stat info {};
    if (::stat(path.c_str(), &info) == 0) {
      if (S_ISDIR(info.st_mode)) fail(EISDIR);
      if (!S_ISREG(info.st_mode)) {
        fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
        if (fd_ < 0) fail(errno);
        return;
      }
      // Replace the file that a symbolic link names, not the link.
      if (char* real = ::realpath(path.c_str(), nullptr)) {
        target_ = real;
        std::free(real);
      }
    }
    open_temporary();
  }
  ~PendingFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  void write(std::span<const std::byte> bytes) {
    constexpr size_t kMost = size_t(1) << 30;
    while (!bytes.empty()) {
      const ssize_t done = ::write(fd_, bytes.data(), std::min(bytes.size(), kMost));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail(done < 0 ? errno : ENOSPC);
      bytes = bytes.subspan(size_t(done));
    }
  }

  void commit() {
    const int closed = ::close(std::exchange(fd_, -1));  // some file systems report a full disk only here
    if (closed != 0) fail(errno);
    if (temporary_.empty()) return;
    if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
    temporary_.clear();
  }

 private:
  void open_temporary() {
    static std::atomic<unsigned> counter{0};
    const std::string stem = target_ + "." + std::to_string(::getpid()) + ".";
    do {
      temporary_ = stem + std::to_string(counter++) + ".tmp";
      fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (fd_ < 0 && errno == EEXIST);
    if (fd_ >= 0) return;
    const int error = errno;
    temporary_.clear();
    fail(error);
  }

  [[noreturn]] void fail(int error) const {
    throw Exception(
        {ErrorCode::kIo, path_, std::generic_category().message(error), "must be a file that can be written"});
  }

  std::string path_;  ///< as the caller spells it
  std::string target_;
  std::string temporary_;  ///< empty: nothing to rename or remove
  int fd_ = -1;
};

std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

std::string header_text(const std::vector<const NamedTensor*>& tensors, const FileMetadata& metadata) {
  std::string text = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    if (text.back() != '{') text += ',';
    text += json_string(key) + ":" + json_string(value);
  }
  text += '}';
  int64_t at = 0;
  for (const NamedTensor* tensor : tensors) {
    const TensorView& view = tensor->view;
    text += "," + json_string(tensor->name) + ":{\"dtype\":\"" + std::string(name_of(view.type)) + "\",\"shape\":[";
    for (int i = 0; i < view.rank; ++i) text += (i > 0 ? "," : "") + std::to_string(view.shape[i]);
    const int64_t end = at + view.elements() * element_bytes(view.type);
    text += "],\"data_offsets\":[" + std::to_string(at) + "," + std::to_string(end) + "]}";
    at = end;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

/// Calls `sink` with the runs of neighbouring bytes of axes `axis` and on, in order.
template <class Sink>
void for_each_run(const TensorView& view, int axis, const std::byte* at, const Sink& sink) {
  const int64_t size = element_bytes(view.type);
  int64_t dense = 1;
  bool is_dense = true;
  for (int i = view.rank - 1; i >= axis; --i) {
    is_dense = is_dense && (view.stride[i] == dense || view.shape[i] == 1);
    dense *= view.shape[i];
  }
  if (dense == 0) return;
  if (is_dense) return sink(std::span(at, size_t(dense * size)));
  for (int64_t i = 0; i < view.shape[axis]; ++i) for_each_run(view, axis + 1, at + i * view.stride[axis] * size, sink);
}

/// Gathers short runs, passes long ones through.
class Buffer {
 public:
  explicit Buffer(PendingFile& file) : file_(file), bytes_(std::make_unique_for_overwrite<std::byte[]>(kBytes)) {}

  void write(std::span<const std::byte> run) {
    if (used_ + run.size() > kBytes) flush();
    if (run.size() > kBytes / 2) {
      flush();
      return file_.write(run);
    }
    std::memcpy(bytes_.get() + used_, run.data(), run.size());
    used_ += run.size();
  }
  void flush() {
    file_.write({bytes_.get(), used_});
    used_ = 0;
  }

 private:
  static constexpr size_t kBytes = size_t(1) << 18;
  PendingFile& file_;
  std::unique_ptr<std::byte[]> bytes_;
  size_t used_ = 0;
};

}  // namespace

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const FileMetadata& metadata) {
  std::vector<const NamedTensor*> ordered;
  for (const NamedTensor& tensor : tensors) {
    if (!tensor.view.empty()) ordered.push_back(&tensor);
  }
  std::sort(ordered.begin(), ordered.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return std::pair(-element_bytes(a->view.type), std::string_view(a->name)) <
           std::pair(-element_bytes(b->view.type), std::string_view(b->name));
  });
  const std::string header = header_text(ordered, metadata);
  const uint64_t length = header.size();

  PendingFile file(path);
  Buffer buffer(file);
  buffer.write(std::as_bytes(std::span(&length, 1)));
  buffer.write(std::as_bytes(std::span(header)));
  for (const NamedTensor* tensor : ordered) {
    for_each_run(tensor->view, 0, tensor->view.data, [&](std::span<const std::byte> run) { buffer.write(run); });
  }
  buffer.flush();
  file.commit();
}

}  // namespace dsacore
