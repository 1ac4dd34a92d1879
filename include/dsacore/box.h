// A rank's end of the DCP mailboxes (spec 7, layer.md 5).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "dsacore/formats.h"

namespace dsacore {

class Transport;  // src/transport/transport.h

/// What every rank of a box must agree on.
struct BoxOptions {
  int cap = 64;   ///< rows of a mailbox; prepare refuses wider batches
  int heads = 0;  ///< H of one rank
  int topk = 0;   ///< of the layers that will use the box
  KvFormat kv_format = KvFormat::kFp8DsMla;
  PartialFormat partial = PartialFormat::kAuto;
  int interleave = 1;  ///< I
  /// How long a peer may be silent. It bounds silence, not work: a rank that computes moves a heartbeat word.
  std::chrono::milliseconds deadline{10000};
};

/// Mailboxes of one rank: queries, candidates, partial latents and their LSE, double buffered. All layers that use a
/// box run in the same order on every rank. After a lost peer the box is dead: make a new one (collectively).
class Box {
 public:
  /// Collective: returns when every rank of `transport` has made its end. Throws `kPeerLost` after the deadline.
  Box(std::shared_ptr<Transport> transport, const BoxOptions& options);
  ~Box();
  Box(const Box&) = delete;
  Box& operator=(const Box&) = delete;

  int rank() const;
  int size() const;
  const BoxOptions& options() const;
  int64_t bytes() const;  ///< reserved mailbox bytes of this rank

  class Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// `size` ends of a box for ranks that are threads of this process; hand end `i` to rank `i`'s thread.
std::vector<std::shared_ptr<Transport>> make_thread_transports(int size);

}  // namespace dsacore
