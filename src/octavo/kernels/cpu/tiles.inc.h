// Products of tiles, one implementation per level. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A left tile is [16 rows][32 k] bf16, a right tile [16 pairs of k][16 columns][2], 1 KiB each; both are contiguous
// along k. A result tile is [16 rows][16 columns] float32. Accumulation over k has one order for any number of rows: k
// tile by k tile, in registers.

constexpr std::int64_t kTileElements = 512;    // of a left or right tile
constexpr std::int64_t kResultElements = 256;  // of a result tile

// Index of a weight element within the two right tiles of a k tile.
static inline std::int64_t right_index(std::int64_t tile, std::int64_t column, std::int64_t k) {
  return tile * kTileElements + k / 2 * 32 + column * 2 + k % 2;
}

#if defined(OCTAVO_HAS_AMX)
#include "tiles_amx.inc.h"
#elif defined(OCTAVO_HAS_BF16)
#include "tiles_avx512.inc.h"
#elif defined(OCTAVO_WIDENS_BF16)
#include "tiles_widened.inc.h"
#else
#include "tiles_portable.inc.h"
#endif

#if !defined(OCTAVO_WIDENS_BF16)

static inline void put_left(bf16* to, const bf16* from) { __builtin_memcpy(to, from, 32 * sizeof *to); }

// Writes one row of inputs into the left tiles [num_k][16][32], padded with zeros.
static inline void pack_row(const bf16* from, std::int64_t size, std::int64_t num_k, bf16* to) {
  const std::int64_t num_whole = size / 32;
  for (std::int64_t k = 0; k < num_whole; ++k) __builtin_memcpy(to + k * kTileElements, from + k * 32, 64);
  for (std::int64_t k = num_whole; k < num_k; ++k) {
    __builtin_memset(to + k * kTileElements, 0, 64);
    __builtin_memcpy(to + k * kTileElements, from + k * 32, static_cast<std::size_t>(larger(0, size - k * 32)) * sizeof(bf16));
  }
}

#endif
