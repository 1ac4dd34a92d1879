// A check that markup is well formed: tags nest and close, attributes are quoted, entities are known. For HTML that is
// written as XML, and SVG.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace dsacore::test {

/// Names the first offence and where it is.
::testing::AssertionResult well_formed(const std::string& markup);

}  // namespace dsacore::test
