# The CUDA toolkit, where DSACORE_CUDA asks for it: nvcc for sm_90a, the runtime linked statically, libcuda never.

enable_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" OR CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(FATAL_ERROR "The CUDA backend needs nvcc 13.0 or later; found ${CMAKE_CUDA_COMPILER_ID} ${CMAKE_CUDA_COMPILER_VERSION}.")
endif()
find_package(CUDAToolkit REQUIRED)
# Of CUPTI only the headers: its library is loaded when a trace is asked for.
find_path(DSACORE_CUPTI_INCLUDE_DIR cupti.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} ${CUDAToolkit_TARGET_DIR}/extras/CUPTI/include ${CUDAToolkit_LIBRARY_ROOT}/extras/CUPTI/include)
if(NOT DSACORE_CUPTI_INCLUDE_DIR)
  message(FATAL_ERROR "The CUDA backend needs the toolkit's cupti.h (package cuda-cupti-dev); looked in ${CUDAToolkit_INCLUDE_DIRS} "
                      "and extras/CUPTI/include.")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

# CMake 3.25 does not know how nvcc 13 is told C++20, nor the architecture-specific target.
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)

# Options of CUDA sources.
add_library(dsacore_cuda_options INTERFACE)
target_compile_options(dsacore_cuda_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a;--fmad=false;-lineinfo;-Werror=all-warnings;-Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off>")
