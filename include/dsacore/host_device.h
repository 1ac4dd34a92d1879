// The mark of functions that host and device code share; empty where no CUDA compiler is at work.
#pragma once

#if defined(__CUDACC__)
#define DSACORE_HD __host__ __device__
#else
#define DSACORE_HD
#endif
