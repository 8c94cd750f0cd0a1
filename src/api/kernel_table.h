// The joined kernel table: the only place that sees every backend.
#pragma once

#include <string_view>
#include <vector>

#include "core/kernel_row.h"

namespace dspattn::api {

// All rows of a pass in order of preference.
std::vector<const core::KernelRow*> table(Pass pass);

// The first row that serves the (valid) problem, or the forced one. Throws Error with all reasons.
const core::KernelRow& choose_row(const Problem& problem, Pass pass, std::string_view forced, core::Features needed);

// What a problem needs beyond the plain contract.
core::Features needed_by(const Problem& problem, Results results);

}  // namespace dspattn::api
