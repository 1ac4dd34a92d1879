// Errors: one record, one exception that carries it (prepare, prepare_cache, files), one status (run).
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <utility>

namespace dsacore {

enum class ErrorCode {
  kRefused,        ///< an argument outside what spec 10 allows; nothing was written
  kUnsupported,    ///< this build, machine or backend cannot do it
  kMalformedFile,  ///< a file that cannot be read as what it claims to be
  kIo,             ///< the operating system refused to open, read, map or write
  kNoMemory,       ///< an allocation failed
  kDevice,         ///< the GPU or its driver refused a call
  kPeerLost,       ///< a DCP rank fell silent, or a peer gave up; the box must be made again
  kInternal,       ///< a bug of this library
};

/// What was wrong with which argument. Printed as "topk = 4096: allowed 1..2048".
struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string argument;  ///< the argument's name as the caller knows it, e.g. "slots[3]"
  std::string value;     ///< what it was
  std::string allowed;   ///< what it may be, or what to do

  std::string message() const { return argument + " = " + value + ": " + allowed; }
};

/// Thrown by everything that runs before a step: contexts, prepare, prepare_cache, files, boxes.
class Exception : public std::exception {
 public:
  explicit Exception(Error error) : error_(std::move(error)), text_(error_.message()) {}
  const char* what() const noexcept override { return text_.c_str(); }
  const Error& error() const noexcept { return error_; }

 private:
  Error error_;
  std::string text_;
};

/// The result of a step. Success carries nothing and costs no allocation.
class [[nodiscard]] Status {
 public:
  Status() = default;
  explicit Status(Error error) : error_(std::make_shared<const Error>(std::move(error))) {}

  bool ok() const noexcept { return error_ == nullptr; }
  /// Only where `!ok()`.
  const Error& error() const noexcept { return *error_; }
  /// Throws what went wrong, if anything did.
  void or_throw() const {
    if (error_) throw Exception(*error_);
  }

 private:
  std::shared_ptr<const Error> error_;
};

}  // namespace dsacore
