#include "io/safetensors_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
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
    do {
      temporary_ = fmt::format("{}.{}.{}.tmp", target_, ::getpid(), counter++);
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
    text += fmt::format("{}:{}", json_string(key), json_string(value));
  }
  text += '}';
  int64_t at = 0;
  for (const NamedTensor* tensor : tensors) {
    const TensorView& view = tensor->view;
    const int64_t end = at + view.elements() * element_bytes(view.type);
    text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json_string(tensor->name),
                        name_of(view.type), fmt::join(view.shape, view.shape + view.rank, ","), at, end);
    at = end;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

/// Calls `sink` with the runs of neighbouring bytes of a tensor, in order.
template <class Sink>
void for_each_run(const TensorView& view, const Sink& sink) {
  if (view.elements() == 0) return;
  const int64_t size = element_bytes(view.type);
  // Three axes for every rank: the missing ones come first and have one element.
  int64_t shape[3] = {1, 1, 1};
  int64_t stride[3] = {0, 0, 1};
  std::copy_n(view.shape, view.rank, shape + 3 - view.rank);
  std::copy_n(view.stride, view.rank, stride + 3 - view.rank);
  // Axes that lie without gaps become part of a run, innermost first.
  int64_t run = shape[2];
  for (int axis = 1; axis >= 0 && (shape[axis] == 1 || stride[axis] == run); --axis) {
    run *= shape[axis];
    shape[axis] = 1;
  }
  for (int64_t i = 0; i < shape[0]; ++i) {
    for (int64_t j = 0; j < shape[1]; ++j) {
      sink(std::span(view.data + (i * stride[0] + j * stride[1]) * size, size_t(run * size)));
    }
  }
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
    for_each_run(tensor->view, [&](std::span<const std::byte> run) { buffer.write(run); });
  }
  buffer.flush();
  file.commit();
}

}  // namespace dsacore
