// The kernel behind the device memory's `spread_pages`.
#pragma once

#include "memory/page_spread.h"

namespace dsacore::cuda {

/// Enqueues it on the current device's default stream.
void enqueue_page_spread(const PageSpread& spread);

}  // namespace dsacore::cuda
