// What the fuzz targets share: a check that stays in every build, and inputs that stand for larger files than they are.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "dsacore/status.h"
#include "io/safetensors.h"

namespace dsacore::fuzz {

/// Ends the process, as a finding, where `held` is false.
inline void require(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "not held: %s\n", what);
  std::abort();
}

/// An input without its last four bytes, which say what stands for the rest of a file: the low 31 bits how many zero
/// bytes follow (up to 2 MiB: weights and caches are large and their contents do not matter), the highest bit that all
/// of the input is header, so that a change within it need not hit its length as well.
inline std::vector<std::byte> file_of(const uint8_t* data, size_t size) {
  uint32_t rest = 0;
  if (size >= sizeof(rest)) {
    size -= sizeof(rest);
    std::memcpy(&rest, data + size, sizeof(rest));
  }
  std::vector<std::byte> bytes(size + (rest & 0x7FFFFFFFu) % ((2u << 20) + 1));
  if (size > 0) std::memcpy(bytes.data(), data, size);
  const uint64_t header = size - sizeof(header);
  if (rest >> 31 != 0 && size > sizeof(header)) std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

/// What readers may throw at a file in memory.
inline void require_file_error(const Exception& e) {
  const Error& error = e.error();
  require(error.code == ErrorCode::kMalformedFile || error.code == ErrorCode::kRefused, "the code is one for files");
  require(!error.argument.empty() && !error.allowed.empty(), "the error names the argument and what is allowed");
}

/// Reads both ends of a tensor, for the address sanitizer to judge.
inline void touch(const TensorView& tensor) {
  if (tensor.empty() || tensor.elements() == 0) return;
  const int64_t bytes = tensor.elements() * element_bytes(tensor.type);
  const volatile std::byte* data = tensor.data;
  static_cast<void>(data[0]);
  static_cast<void>(data[bytes - 1]);
  require(reinterpret_cast<uintptr_t>(tensor.data) % uintptr_t(element_bytes(tensor.type)) == 0,
          "the tensor is aligned");
}

}  // namespace dsacore::fuzz
