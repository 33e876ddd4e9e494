// Products of tiles with float32 vectors, from float32 left tiles: these are broadcast straight from memory, which
// costs the multipliers nothing. Included from tiles.inc.h.
//
// Right tiles stay bf16 and are widened in registers, overlapped with the multiplies of some rows. Sums run over k one
// by one, in order, in registers or resumed from memory: the same bits for any number of rows.

using LeftElement = float;
constexpr bool kReadsWholeTiles = false;

static inline void begin_tiles(std::int64_t) {}
static inline void end_tiles() {}

#if defined(OCTAVO_HAS_AVX512)
constexpr std::int64_t kRowsTogether = 8;  // by 32 columns: 16 sums, 4 weights, left values from memory
constexpr std::int64_t kRowsOfWholePanel = 8, kPassesOfMany = 1;  // all rows take all columns
#else
constexpr std::int64_t kRowsTogether = 6;  // by 16 columns: 12 sums, two weights, a mask, and a left value
constexpr std::int64_t kRowsOfWholePanel = 3, kPassesOfMany = 2;  // more rows take half of the columns, twice
#endif
constexpr int kTileVectors = 16 / kLanes, kPanelVectors = 2 * kTileVectors;  // the columns of one right tile, and of both

#include "add_k.inc.h"

static inline void put_left(float* to, const bf16* from) {
  store_f32(to, load_bf16(from));
  store_f32(to + 16, load_bf16(from + 16));
}

// Writes one row of inputs into the left tiles [num_k][16][32], padded with zeros.
static inline void pack_row(const bf16* from, std::int64_t size, std::int64_t num_k, float* to) {
  const std::int64_t num_whole = size / 32;
  for (std::int64_t k = 0; k < num_whole; ++k) put_left(to + k * kTileElements, from + k * 32);
  if (num_whole == num_k) return;
  bf16 rest[32] = {};
  __builtin_memcpy(rest, from + num_whole * 32, static_cast<std::size_t>(size % 32) * sizeof(bf16));
  put_left(to + num_whole * kTileElements, rest);
}

// Columns kLanes * vector ... of the even or the odd k of a pair.
template <bool kIsOdd>
static inline Register load_columns(const bf16* part, std::int64_t pair, std::int64_t vector) {
  const bf16* from = part + vector / kTileVectors * kTileElements + pair * 32 + vector % kTileVectors * kLanes * 2;
  const Words both = load<Words>(from);
  return (Register)(kIsOdd ? both & 0xffff0000u : both << 16);
}

// Some rows of a left tile times kVectors vectors of columns, from the first of a right tile on.
template <int kRows, int kVectors>
static void multiply_block(float* result, const float* left, const bf16* right, std::int64_t num_k, bool accumulates,
                           Ahead ahead) {
  const auto place = [&](int row, int i) {
    return result + i / kTileVectors * kResultElements + row * 16 + i % kTileVectors * kLanes;
  };
  Register sums[kRows][kVectors], columns[kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) sums[row][i] = accumulates ? load_sum(place(row, i)) : Register{};
  for (std::int64_t k = 0; k < num_k; ++k, left += kTileElements, right += 2 * kTileElements) {
    for (std::int64_t pair = 0; pair < 16; ++pair) {
      ahead.fetch_share<16>(k, pair);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) columns[i] = load_columns<false>(right, pair, i);
      add_k(sums, left + pair * 2, columns);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) columns[i] = load_columns<true>(right, pair, i);
      add_k(sums, left + pair * 2 + 1, columns);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) store(place(row, i), sums[row][i]);
}

#include "row_blocks.inc.h"
#include "row_groups.inc.h"
