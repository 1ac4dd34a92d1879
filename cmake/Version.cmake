# dsacore/version.h with the version; the commit is looked up at build time, so that a rebuild never shows a stale one.
configure_file(${CMAKE_CURRENT_SOURCE_DIR}/cmake/version.h.in ${CMAKE_CURRENT_BINARY_DIR}/generated/dsacore/version.h @ONLY)

add_custom_target(dsacore_commit
  COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${CMAKE_CURRENT_SOURCE_DIR}
          -DOUTPUT=${CMAKE_CURRENT_BINARY_DIR}/generated/commit.h -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/WriteCommit.cmake
  BYPRODUCTS ${CMAKE_CURRENT_BINARY_DIR}/generated/commit.h)
