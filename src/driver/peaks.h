// Measures what the machine can do, for the floors of `bench`: bytes read from memory, BF16 multiply-adds of an
// instruction set.
#pragma once

#include "driver/stage_work.h"
#include "plan/registry.h"
#include "threads/threads.h"

namespace dsacore {

/// Bytes a second of all threads that sweep over a buffer larger than most caches: what the middle one of its parts
/// gets.
double measure_read_bandwidth(Threads& threads);

/// What floors on an H200 are counted with, rather than with what one sweep or one product happens to reach: reads of
/// 4.0 TB/s, which gathered rows come near to and streams exceed by an eighth, and 780 TFLOP/s of dense BF16 sustained.
inline constexpr Peaks kH200Peaks = {4.0e12, 780e12};

/// FLOPs a second of all threads at BF16 matrix products that stay in the caches; 0 where the backend has no such
/// operation.
double measure_bf16_rate(const Backend& backend, Threads& threads);

}  // namespace dsacore
