// The values of blocks of GGUF files.
#pragma once

#include <cstdint>

#include "blocks.h"

namespace octavo {

// Writes the values of `count` blocks, as in the file, to `to` [count * inputs of a block].
void decode_blocks(BlockType type, const std::uint8_t* blocks, std::int64_t count, float* to);

}  // namespace octavo
