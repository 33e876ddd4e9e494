// Products of tiles in float32, with vectors as wide as registers. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A left tile is [16 rows][32 k] float32, the two right tiles of a k tile are [32 k][32 columns] elements, widened in
// registers if they are float16, a result tile is [16 rows][16 columns]. Each call sums its k one by one from zero and adds that to the sums of earlier calls: the same bits for any
// number of rows, as all products take kTilesOfK k tiles per call. This blocked summation also has less error than one
// long sum: a fifth less at K = 2048.

constexpr std::int64_t kTileElements = 512;    // of a left tile, and half of a panel's k tile
constexpr std::int64_t kResultElements = 256;  // of a result tile

using LeftElement = float;
constexpr bool kReadsWholeTiles = false;  // padding rows are never read

static inline void begin_tiles(std::int64_t) {}
static inline void end_tiles() {}

// Index of a weight element within the two right tiles of a k tile.
static inline std::int64_t right_index(std::int64_t tile, std::int64_t column, std::int64_t k) {
  return k * 32 + tile * 16 + column;
}

static inline void put_left(float* to, const Element* from) {
  store_f32(to, load_whole(from));
  store_f32(to + 16, load_whole(from + 16));
}

// Writes one row of inputs into the left tiles [num_k][16][32], padded with zeros.
static inline void pack_row(const Element* from, std::int64_t size, std::int64_t num_k, float* to) {
  const std::int64_t num_whole = size / 32;
  for (std::int64_t k = 0; k < num_whole; ++k) put_left(to + k * kTileElements, from + k * 32);
  if (num_whole == num_k) return;
  Element rest[32] = {};
  __builtin_memcpy(rest, from + num_whole * 32, static_cast<std::size_t>(size % 32) * sizeof(Element));
  put_left(to + num_whole * kTileElements, rest);
}

static inline Register load_lanes(const float* from) { return load<Register>(from); }
static inline Register load_lanes(const f16* from) { return widen_lanes(from); }

constexpr int kPanelVectors = 32 / kLanes;
constexpr int kRowsOfWholePanel = OCTAVO_ROWS_OF_WHOLE_PANEL;  // so many rows' sums of all columns fit registers
constexpr int kRowsTogether = OCTAVO_ROWS_TOGETHER;            // more rows: all columns at once, or half of them
constexpr int kPassesOfMany = kRowsTogether == kRowsOfWholePanel ? 1 : 2;  // over the columns

// Some rows of a left tile times kVectors vectors of columns, from the first of `right` on.
template <int kRows, int kVectors>
static void multiply_block(float* result, const float* left, const Element* right, std::int64_t num_k, bool accumulates,
                           Ahead ahead) {
  const auto place = [&](int row, int i) { return result + i * kLanes / 16 * kResultElements + row * 16 + i * kLanes % 16; };
  Register sums[kRows][kVectors], columns[kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) sums[row][i] = Register{};
  for (std::int64_t tile = 0; tile < num_k; ++tile, left += kTileElements) {
    for (std::int64_t pair = 0; pair < 16; ++pair) {
      ahead.fetch_share<16>(tile, pair);
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k, right += 32) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) columns[i] = load_lanes(right + i * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
          for (int i = 0; i < kVectors; ++i) sums[row][i] += left[row * 32 + pair * 2 + k] * columns[i];
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) store(place(row, i), accumulates ? load<Register>(place(row, i)) + sums[row][i] : sums[row][i]);
}

#include "row_blocks.inc.h"
#include "row_groups.inc.h"
