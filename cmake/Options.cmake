# Compiler options of every target: warnings as errors, IEEE arithmetic, sanitizers.

add_library(dsacore_options INTERFACE)
target_compile_options(dsacore_options INTERFACE
  # The specification fixes every rounding: no contraction of a * b + c unless the code asks for it.
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wnon-virtual-dtor;-Wold-style-cast;-Wcast-qual;-Werror;-ffp-contract=off>"
  # -Wrestrict: GCC 12 warns of "text" + std::string (its bug 105651).
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-psabi>
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
if(DSACORE_SANITIZE)
  target_compile_options(dsacore_options INTERFACE
    -fsanitize=${DSACORE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(dsacore_options INTERFACE -fsanitize=${DSACORE_SANITIZE})
endif()
