// Products of tiles with AMX. Included from tiles.inc.h.

using LeftElement = bf16;
constexpr bool kReadsWholeTiles = true;  // also padding rows

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

// Configures the thread for left tiles of `rows` rows (1 to 16), until `end_tiles`.
static inline void begin_tiles(std::int64_t rows) { _tile_loadconfig(&kTileConfigs.by_rows[rows]); }
static inline void end_tiles() { _tile_release(); }

// result[left tile][right tile] = sum over k of left * right (+ result). `right` holds both right tiles of each k,
// adjacent. Left tiles bypass L1, where right ones stay for the next rows.
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
    other.alongside(k);
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
    other.alongside(k);
  }
  _tile_stored(0, result, 64);
  _tile_stored(1, result + kResultElements, 64);
}
