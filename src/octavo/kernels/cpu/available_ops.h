// Which levels this processor supports. Not in ops.h, which is compiled for every level: the linker keeps one copy of
// each standard-library template instantiated there, possibly with instructions that not every processor has.
#pragma once

#include <string>
#include <vector>

#include "ops.h"

namespace octavo {

// Best first.
std::vector<const Ops*> available_ops();
// Throws std::invalid_argument if this processor does not support that level.
const Ops& find_ops(const std::string& level);

}  // namespace octavo
