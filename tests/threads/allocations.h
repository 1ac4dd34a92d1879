// Counts the calls of `operator new` in this program (allocations.cpp replaces it).
#pragma once

#include <cstdint>

namespace dsacore {

int64_t allocations();

}  // namespace dsacore
