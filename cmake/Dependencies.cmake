# Libraries from the distribution. A missing one is an error that names the Debian package.

function(dsacore_require name package)
  find_package(${name} CONFIG QUIET)
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "dsacore needs ${name}: install it with `apt-get install ${package}` "
                        "(scripts/install-deps.sh installs everything).")
  endif()
endfunction()

find_package(Threads REQUIRED)
dsacore_require(TBB libtbb-dev)
dsacore_require(hwy libhwy-dev)
dsacore_require(fmt libfmt-dev)
dsacore_require(nlohmann_json nlohmann-json3-dev)
dsacore_require(CLI11 libcli11-dev)
if(DSACORE_BUILD_TESTS)
  dsacore_require(GTest libgtest-dev)
endif()
if(DSACORE_BUILD_BENCHMARKS)
  dsacore_require(benchmark libbenchmark-dev)
endif()
