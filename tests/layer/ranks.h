// on_ranks: one thread a rank, for tests of what ranks do together.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <thread>
#include <vector>

namespace dsacore {

/// Runs `body(rank)` on `size` threads and waits for all; an exception that leaves it fails the test.
template <class Body>
void on_ranks(int size, Body&& body) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&body, rank] {
      try {
        body(rank);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << rank << " threw: " << e.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace dsacore
