// The product of one linear layer. Included inside namespace octavo::OCTAVO_LEVEL.

// Where a linear's results go.
struct Destination {
  Output output;
  std::int64_t out_size;  // N
  void* out;              // [T, N] or, for gates and ups, [T, 2 * N]; or, with an activation:
  LeftElement* out_left;  // left tiles of the next linear [row tiles][ceil(N / 32)][16][32], instead of `out`
  Activation activation = {};
  Leader* leaders = nullptr;  // [T], a chunk's own; results go to these instead of memory
  bool is_float16 = false;    // `out` is, though other results of this level's ops are not

  std::int64_t outputs_per_panel() const { return output == Output::gated || output == Output::gates_and_ups ? 16 : 32; }
  std::int64_t num_panels() const { return ceil_div(out_size, outputs_per_panel()); }
  LeftElement* left_line(std::int64_t row, std::int64_t line) const {
    return out_left + (row / 16 * ceil_div(out_size, 32) + line) * kTileElements + row % 16 * 32;
  }
};

// One linear, its rows already packed.
struct Product {
  const LeftElement* left;  // [row tiles][num_k][16][32]
  std::int64_t rows, num_k;
  PackedWeight packed;
  Destination to;

  std::int64_t num_row_tiles() const { return ceil_div(rows, 16); }
};

// Panels are computed in pairs, so that 16-bit results fill whole cache lines.
constexpr std::int64_t kPair = 2;
