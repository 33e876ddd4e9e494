// One linear layer of rows. Included inside namespace octavo::OCTAVO_LEVEL.

// Where a map's results go.
struct Destination {
  Output output;
  std::int64_t out_size;  // N
  void* out;              // [T, N]; or, activated:
  LeftElement* out_left;  // left tiles of the next linear [row tiles][ceil(N / 32)][16][32], in place of `out`
  Activation activation = {};
  Leader* leaders = nullptr;  // [T], which meet all results in place of that; a chunk's own

  std::int64_t outputs_per_panel() const { return output == Output::gated ? 16 : 32; }
  std::int64_t num_panels() const { return ceil_div(out_size, outputs_per_panel()); }
  LeftElement* left_line(std::int64_t row, std::int64_t line) const {
    return out_left + (row / 16 * ceil_div(out_size, 32) + line) * kTileElements + row % 16 * 32;
  }
};

// One map, its rows packed already.
struct Product {
  const LeftElement* left;  // [row tiles][num_k][16][32]
  std::int64_t rows, num_k;
  PackedWeight packed;
  Destination to;

  std::int64_t num_row_tiles() const { return ceil_div(rows, 16); }
};

// Panels are computed in pairs, so that results of 16 bits fill whole cache lines.
constexpr std::int64_t kPair = 2;
