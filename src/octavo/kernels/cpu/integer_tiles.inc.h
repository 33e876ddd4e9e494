// Products of integers by matrix tiles, for many rows. Included inside namespace octavo::OCTAVO_LEVEL, where there are
// tiles. The sums are those of integer_dot.inc.h.

// For groups of 32: tiles of half the depth.
struct HalfTileConfigs {
  TileConfig by_rows[17];
  constexpr HalfTileConfigs() : by_rows() {
    for (int rows = 1; rows <= 16; ++rows) {
      for (int tile = 0; tile < 6; ++tile) by_rows[rows].rows[tile] = static_cast<std::uint8_t>(rows);
      for (int tile = 4; tile < 6; ++tile) by_rows[rows].row_bytes[tile] = 32;
      for (int tile = 6; tile < 8; ++tile) by_rows[rows].rows[tile] = 8;
    }
  }
};
static constexpr HalfTileConfigs kHalfTileConfigs;

// Expands a panel's k tiles [num_k][2] from nibbles to bytes.
static inline void expand_nibbles(const std::uint8_t* from, std::int64_t num_k, std::uint8_t* to) {
  for (std::int64_t line = 0; line < num_k * 2 * 8; ++line, from += 64, to += 128) {
    const u8x64 pair = load_line(from);
    prefetch_line(from);
    const u8x64 first = (pair & 0x0f) - 8, second = (pair >> 4) - 8;
    __builtin_memcpy(to, &first, sizeof first);
    __builtin_memcpy(to + 64, &second, sizeof second);
  }
}

template <int kRowTiles>
static inline void begin_sums(const std::int32_t* results) {
  if (results == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kRowTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    return;
  }
  _tile_loadd(0, results, 64);
  _tile_loadd(1, results + kResultElements, 64);
  if constexpr (kRowTiles == 2) {
    _tile_loadd(2, results + 2 * kResultElements, 64);
    _tile_loadd(3, results + 3 * kResultElements, 64);
  }
}

template <int kRowTiles>
static inline void end_sums(std::int32_t* results) {
  _tile_stored(0, results, 64);
  _tile_stored(1, results + kResultElements, 64);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, results + 2 * kResultElements, 64);
    _tile_stored(3, results + 3 * kResultElements, 64);
  }
}

// Adds left * right of one tile's depth, or half of it. Left tiles bypass the first-level cache, where right ones stay
// for the next rows.
template <int kRowTiles>
static inline void add_tiles(const std::int8_t* left, std::int64_t left_stride, const std::uint8_t* right) {
  _tile_loadd(6, right, 64);
  _tile_stream_loadd(4, left, 64);
  _tile_dpbssd(0, 4, 6);
  _tile_loadd(7, right + kTileBytes, 64);
  _tile_dpbssd(1, 4, 7);
  if constexpr (kRowTiles == 2) {
    _tile_stream_loadd(5, left + left_stride, 64);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

// One scale for all k: results [row tiles][2][16][16] stay integers until the last k is added. `alongside(k)` is called
// before each k tile.
template <int kRowTiles, class Alongside>
static inline void multiply_integers(std::int32_t* results, const std::int8_t* left, std::int64_t left_stride,
                                     const std::uint8_t* right, std::int64_t num_k, bool accumulates, const Alongside& alongside) {
  begin_sums<kRowTiles>(accumulates ? results : nullptr);
  for (std::int64_t k = 0; k < num_k; ++k) {
    alongside(k);
    add_tiles<kRowTiles>(left + k * kTileBytes, left_stride, right + k * 2 * kTileBytes);
  }
  end_sums<kRowTiles>(results);
}

// totals += scale * sums (+ offset * row sums) of one group.
struct GroupScales {
  const IntegerProduct& product;
  std::int64_t panel, first_row;  // of the row tiles

  template <int kRowTiles>
  void add(const std::int32_t* sums, std::int64_t group, bool accumulates, float* totals) const {
    const std::int64_t num_rows = smaller(kRowTiles * 16, product.num_rows - first_row);
    const float* scales = product.scales(panel, group);
    for (int half = 0; half < 2; ++half) {
      const f32x16 scale = load_f32(scales + half * 16);
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const std::int64_t at = (row / 16 * 2 + half) * kResultElements + row % 16 * 16;
        i32x16 sum;
        __builtin_memcpy(&sum, sums + at, sizeof sum);
        const f32x16 total = accumulates ? load_f32(totals + at) : splat(0.0f);
        store_f32(totals + at, multiply_add(convert<f32x16>(sum), scale, total));
      }
      if (product.form().offsets) add_offsets(group, half, num_rows, totals);
    }
  }

  void add_offsets(std::int64_t group, int half, std::int64_t num_rows, float* totals) const {
    for (std::int64_t row = 0; row < num_rows; ++row) {
      float* total = totals + (row / 16 * 2 + half) * kResultElements + row % 16 * 16;
      store_f32(total, product.with_offset(load_f32(total), panel, group, half, first_row + row));
    }
  }
};

// A scale for each group: totals [row tiles][2][16][16] are floats. While tiles multiply one group, vectors scale the
// sums of the previous one.
template <int kRowTiles>
static inline void multiply_groups(float* totals, const std::int8_t* left, std::int64_t left_stride,
                                   const std::uint8_t* right, std::int64_t first_unit, std::int64_t num_units,
                                   const GroupScales& scales) {
  alignas(64) std::int32_t sums[2][kRowTiles * 2 * kResultElements];
  const std::int64_t per_group = scales.product.units_per_group(), step = per_group == 1 ? 1 : 2;
  const std::int64_t first_group = first_unit / per_group, num_groups = ceil_div(num_units, per_group);
  for (std::int64_t i = 0; i <= num_groups; ++i) {
    if (i < num_groups) {
      begin_sums<kRowTiles>(nullptr);
      const std::int64_t end = smaller(num_units, (i + 1) * per_group);
      for (std::int64_t unit = i * per_group; unit < end; unit += step)
        add_tiles<kRowTiles>(left + unit / 2 * kTileBytes + unit % 2 * kUnitK, left_stride,
                             right + unit / 2 * 2 * kTileBytes + unit % 2 * (kTileBytes / 2));
    }
    if (i > 0) scales.add<kRowTiles>(sums[(i - 1) % 2], first_group + i - 1, first_group + i > 1, totals);
    if (i < num_groups) end_sums<kRowTiles>(sums[i % 2]);
  }
}
