// Products of tiles, each level in its own way. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A left tile is [16 rows][32 k] bf16, a right tile [16 pairs of k][16 columns][2], 1 KiB each; both follow one another
// along k. A result tile is [16 rows][16 columns] float32. One order of accumulation over k, whatever the number of
// rows: k tile by k tile, in registers.

constexpr std::int64_t kTileElements = 512;    // of a left or right tile
constexpr std::int64_t kResultElements = 256;  // of a result tile

// What a product asks memory for while it computes: `lines` cache lines for each k tile.
struct Ahead {
  const void* from = nullptr;
  std::int64_t lines = 0;

  const char* line(std::int64_t index) const { return static_cast<const char*>(from) + index * 64; }
  void fetch(std::int64_t k) const {
    for (std::int64_t i = 0; i < lines; ++i) __builtin_prefetch(line(k * lines + i));
  }
};

// What a product does beside its own work, for each k tile: here, nothing.
struct Nothing {
  void beside(std::int64_t) {}
};

#if defined(OCTAVO_HAS_AMX)

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles 0 to 3: results, 4 and 5: left, 6 and 7: right. Fewer rows on the left make a product cheaper.
// Not on the stack: GCC 12 drops stores to a configuration there before it is loaded.
struct TileConfigs {
  TileConfig by_rows[17];
  constexpr TileConfigs() : by_rows() {
    for (int rows = 1; rows <= 16; ++rows)
      for (int tile = 0; tile < 6; ++tile) by_rows[rows].rows[tile] = static_cast<std::uint8_t>(rows);
  }
};
static constexpr TileConfigs kTileConfigs;

// Makes a thread ready for products of left tiles of `rows` rows (1 to 16), until `end_tiles`.
static inline void begin_tiles(std::int64_t rows) { _tile_loadconfig(&kTileConfigs.by_rows[rows]); }
static inline void end_tiles() { _tile_release(); }

// result[left tile][right tile] = sum over k of left * right (+ result). `right` holds both right tiles of each k side
// by side. Left tiles pass by the first-level cache, where right ones wait for the next rows.
template <class Other>
static inline void multiply_2x2(float* result, const bf16* left0, const bf16* left1, const bf16* right,
                                std::int64_t num_k, bool accumulates, Other& other) {
  if (accumulates) {
    _tile_loadd(0, result, 64);
    _tile_loadd(1, result + kResultElements, 64);
    _tile_loadd(2, result + 2 * kResultElements, 64);
    _tile_loadd(3, result + 3 * kResultElements, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t k = 0; k < num_k; ++k) {
    _tile_loadd(6, right + 2 * k * kTileElements, 64);
    _tile_stream_loadd(4, left0 + k * kTileElements, 64);
    _tile_loadd(7, right + (2 * k + 1) * kTileElements, 64);
    _tile_stream_loadd(5, left1 + k * kTileElements, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    other.beside(k);
  }
  _tile_stored(0, result, 64);
  _tile_stored(1, result + kResultElements, 64);
  _tile_stored(2, result + 2 * kResultElements, 64);
  _tile_stored(3, result + 3 * kResultElements, 64);
}

template <class Other>
static inline void multiply_1x2(float* result, const bf16* left, const bf16* right, std::int64_t num_k,
                                bool accumulates, std::int64_t /*rows*/, Other& other) {
  if (accumulates) {
    _tile_loadd(0, result, 64);
    _tile_loadd(1, result + kResultElements, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (std::int64_t k = 0; k < num_k; ++k) {
    _tile_loadd(4, left + k * kTileElements, 64);
    _tile_loadd(6, right + 2 * k * kTileElements, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + (2 * k + 1) * kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    other.beside(k);
  }
  _tile_stored(0, result, 64);
  _tile_stored(1, result + kResultElements, 64);
}

#elif defined(OCTAVO_HAS_AVX2)

#include "tiles_avx2.inc.h"

#else  // vectors as wide as a tile

static inline void begin_tiles(std::int64_t) {}
static inline void end_tiles() {}

// One pair of k of 16 columns: sum += left[0] * right[..][0] + left[1] * right[..][1].
static inline f32x16 add_pair(f32x16 sum, std::uint32_t left, u32x16 right) {
#if defined(OCTAVO_HAS_AVX512_BF16)
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(left)), (__m512bh)right);
#else
  const f32x16 even = (f32x16)(u32x16{} + (left << 16)), odd = (f32x16)(u32x16{} + (left & 0xffff0000u));
  sum += even * (f32x16)(right << 16);
  return sum + odd * (f32x16)(right & 0xffff0000u);
#endif
}

template <int kRows>
static inline void multiply_rows(float* result, const bf16* left, const bf16* right, std::int64_t num_k,
                                 bool accumulates) {
  f32x16 sums[kRows][2];
  for (int row = 0; row < kRows; ++row)
    for (int tile = 0; tile < 2; ++tile)
      sums[row][tile] = accumulates ? load_f32(result + tile * kResultElements + row * 16) : splat(0.0f);
  for (std::int64_t k = 0; k < num_k; ++k) {
    for (int pair = 0; pair < 16; ++pair) {
      const u32x16 right0 = load<u32x16>(right + 2 * k * kTileElements + pair * 32);
      const u32x16 right1 = load<u32x16>(right + (2 * k + 1) * kTileElements + pair * 32);
      for (int row = 0; row < kRows; ++row) {
        std::uint32_t pair_of_left;
        __builtin_memcpy(&pair_of_left, left + k * kTileElements + row * 32 + pair * 2, sizeof pair_of_left);
        sums[row][0] = add_pair(sums[row][0], pair_of_left, right0);
        sums[row][1] = add_pair(sums[row][1], pair_of_left, right1);
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int tile = 0; tile < 2; ++tile) store_f32(result + tile * kResultElements + row * 16, sums[row][tile]);
}

template <class Other>
static inline void multiply_1x2(float* result, const bf16* left, const bf16* right, std::int64_t num_k,
                                bool accumulates, std::int64_t rows, Other& other) {
  for (std::int64_t k = 0; k < num_k; ++k) other.beside(k);
  const std::int64_t num_together = rows / kRowsAtOnce * kRowsAtOnce;
  for (std::int64_t row = 0; row < num_together; row += kRowsAtOnce)
    multiply_rows<kRowsAtOnce>(result + row * 16, left + row * 32, right, num_k, accumulates);
  for (std::int64_t row = num_together; row < rows; ++row)
    multiply_rows<1>(result + row * 16, left + row * 32, right, num_k, accumulates);
}

template <class Other>
static inline void multiply_2x2(float* result, const bf16* left0, const bf16* left1, const bf16* right,
                                std::int64_t num_k, bool accumulates, Other& other) {
  Nothing nothing;
  multiply_1x2(result, left0, right, num_k, accumulates, 16, other);
  multiply_1x2(result + 2 * kResultElements, left1, right, num_k, accumulates, 16, nothing);
}

#endif

#if !defined(OCTAVO_HAS_AVX2)

using LeftElement = bf16;  // of the left tiles of linear maps

constexpr bool kReadsWholeTiles = true;  // also lines of rows that are not there

// One row of inputs as its line in each of the left tiles [num_k][16][32]; inputs that are not there are zeros.
static inline void pack_row(const bf16* from, std::int64_t size, std::int64_t num_k, bf16* to) {
  const std::int64_t num_whole = size / 32;
  for (std::int64_t k = 0; k < num_whole; ++k) __builtin_memcpy(to + k * kTileElements, from + k * 32, 64);
  for (std::int64_t k = num_whole; k < num_k; ++k) {
    __builtin_memset(to + k * kTileElements, 0, 64);
    __builtin_memcpy(to + k * kTileElements, from + k * 32, static_cast<std::size_t>(larger(0, size - k * 32)) * sizeof(bf16));
  }
}

// Without anything beside it.
static inline void multiply_1x2(float* result, const bf16* left, const bf16* right, std::int64_t num_k,
                                bool accumulates, std::int64_t rows) {
  Nothing nothing;
  multiply_1x2(result, left, right, num_k, accumulates, rows, nothing);
}

#endif
