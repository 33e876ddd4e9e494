// Which levels' ops this processor has. Not in ops.h, which is compiled for every level: of a template of the standard
// library that is instantiated there the linker keeps one copy for all, maybe with instructions that not all have.
#pragma once

#include <string>
#include <vector>

#include "ops.h"

namespace octavo {

// Best first.
std::vector<const Ops*> available_ops();
// Throws std::invalid_argument where this processor has no level of that name.
const Ops& find_ops(const std::string& level);

}  // namespace octavo
