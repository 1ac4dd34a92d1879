#include "io/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace dsacore {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian and mapped as they are");

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr size_t kLengthBytes = 8;

Exception io_error(const std::string& path, int error, std::string allowed) {
  return Exception({ErrorCode::kIo, path, std::generic_category().message(error), std::move(allowed)});
}

/// Closes a file descriptor.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

void UnmapFile::operator()(std::byte* mapped) const { ::munmap(mapped, bytes); }

SafetensorsFile::SafetensorsFile(std::span<std::byte> bytes, std::string name) : name_(std::move(name)), bytes_(bytes) {
  const auto malformed = [&](const char* what, std::string value, std::string allowed) {
    return file_error(ErrorCode::kMalformedFile, name_, what, std::move(value), std::move(allowed));
  };
  if (bytes.size() < kLengthBytes) throw malformed("size", fmt::format("{} bytes", bytes.size()), "must be at least 8");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  const uint64_t rest = bytes.size() - kLengthBytes;
  if (length > kMaxHeader) throw malformed("header length", std::to_string(length), "must be at most 100000000");
  if (length > rest) {
    throw malformed("header length", std::to_string(length),
                    fmt::format("must be at most the {} bytes that follow", rest));
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  header_ = parse_safetensors_header({text, size_t(length)}, int64_t(rest - length), name_);
  data_ = bytes.data() + kLengthBytes + length;
  aligned_.resize(header_.tensors.size());
}

SafetensorsFile SafetensorsFile::parse(std::span<std::byte> bytes, std::string name) {
  return SafetensorsFile(bytes, std::move(name));
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) throw io_error(path, errno, "must be a file that can be read");
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) throw io_error(path, errno, "must be a file that can be read");
  if (!S_ISREG(info.st_mode))
    throw Exception({ErrorCode::kIo, path, "not a regular file", "must be a file that can be mapped"});
  const auto size = static_cast<size_t>(info.st_size);
  if (size < kLengthBytes) return SafetensorsFile({static_cast<std::byte*>(nullptr), size}, path);  // throws

  void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.fd, 0);
  if (mapped == MAP_FAILED) throw io_error(path, errno, "must be a file that can be mapped");
  std::unique_ptr<std::byte, UnmapFile> mapping(static_cast<std::byte*>(mapped), UnmapFile{size});
  SafetensorsFile opened({mapping.get(), size}, path);
  opened.mapping_ = std::move(mapping);
  return opened;
}

const SafetensorsTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = header_.by_name.find(name);
  return found == header_.by_name.end() ? nullptr : &header_.tensors[found->second];
}

std::byte* SafetensorsFile::data(const SafetensorsTensor& tensor) {
  std::byte* mapped = data_ + tensor.begin;
  const auto alignment = static_cast<uintptr_t>(tensor.type ? element_bytes(*tensor.type) : 1);
  if (reinterpret_cast<uintptr_t>(mapped) % alignment == 0) return mapped;
  auto& copy = aligned_[size_t(&tensor - header_.tensors.data())];
  if (copy == nullptr) {
    const auto size = static_cast<size_t>(tensor.end - tensor.begin);
    copy = std::make_unique_for_overwrite<std::byte[]>(size);
    std::memcpy(copy.get(), mapped, size);
  }
  return copy.get();
}

}  // namespace dsacore
