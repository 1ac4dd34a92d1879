# dsacore_test(NAME source...): a GoogleTest program that sees the library's sources; one CTest entry.
include(GoogleTest)
function(dsacore_test name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE dsacore dsacore_options GTest::gtest_main fmt::fmt)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 600)
endfunction()
