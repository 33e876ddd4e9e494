// Integer products panel by panel, for any number of rows. Included inside namespace octavo::OCTAVO_LEVEL, at levels
// without matrix tiles: the level's own file, included after this one, provides `multiply_panel_block`.

#define OCTAVO_INTEGERS_BY_PANELS

constexpr std::int64_t kBlockTilesOfK = 8;  // of a panel, multiplied by all rows of a block: 16 KiB

// k tiles [k, k + count) of one panel, and the rows [first row tile * 16, end) to multiply.
struct PanelBlock {
  const IntegerProduct& product;
  std::int64_t panel, k, count;
  std::int64_t first, end;
  float* results;             // [row tiles][2][16][16]: integers or, in groups, floats
  const std::uint8_t* right;  // as stored, or expanded
  Ahead ahead = {};           // what each unit prefetches

  bool is_in_groups() const { return product.form().group_size != 0; }
  std::int64_t units_per_group() const { return is_in_groups() ? product.units_per_group() : count * 2; }
  std::int64_t first_group() const { return is_in_groups() ? k * 2 / units_per_group() : 0; }
  // The last k tile may reach beyond the last group.
  std::int64_t num_units() const {
    return is_in_groups() ? smaller(count * 2, product.groups() * units_per_group() - k * 2) : count * 2;
  }
  const std::int8_t* left(std::int64_t row) const {
    return product.rows.left + (row / 16 * product.num_k() + k) * kTileBytes + row % 16 * kTileK;
  }
  float* result(std::int64_t row, int tile) const {
    return results + ((row / 16 - first) * 2 + tile) * kResultElements + row % 16 * 16;
  }

  // Spreads prefetches of the next block over all units of this one, whose k are read `num_passes` times.
  void begin_ahead(std::int64_t num_passes) {
    const std::int64_t num_bytes = count * k_tile_bytes(product.form());
    ahead = {product.panel(panel) + k * k_tile_bytes(product.form()) + num_bytes, ceil_div(num_bytes / 64, num_passes * count * 2)};
  }
  void fetch(std::int64_t unit) const {
    for (std::int64_t i = 0; i < ahead.lines; ++i) __builtin_prefetch(ahead.line(unit * ahead.lines + i), 0, 2);
  }
  void end_pass() { ahead.from = ahead.line(count * 2 * ahead.lines); }
};

// The k tiles of a block of two-level weights, as bytes at `to` [count * 2 * kTileBytes].
static inline void expand_block(const PanelBlock& block, std::uint8_t* to) {
  for (std::int64_t k = 0; k < block.count; ++k) expand_two_level(block.right + k * kTwoLevelBytes, to + k * 2 * kTileBytes);
}

// Adds all rows of a block times its k tiles to its results.
static void multiply_panel_block(PanelBlock block);

// Row tiles [first, end) times a pair of panels.
static inline void multiply_pair_of_panels(const IntegerProduct& product, std::int64_t first, std::int64_t end,
                                           std::int64_t pair, bool streams) {
  const std::int64_t num_panels = smaller(kPair, product.to.num_panels() - pair * kPair);
  const std::int64_t panel_results = (end - first) * 2 * kResultElements, end_row = smaller(product.num_rows, end * 16);
  float* results = static_cast<float*>(thread_scratch().bytes(static_cast<std::size_t>(kPair * panel_results * 4)));
  for (std::int64_t i = 0; i < num_panels; ++i)
    for (std::int64_t k = 0, panel = pair * kPair + i; k < product.num_k(); k += kBlockTilesOfK)
      multiply_panel_block({product, panel, k, smaller(kBlockTilesOfK, product.num_k() - k), first, end_row,
                            results + i * panel_results, product.panel(panel) + k * k_tile_bytes(product.form())});
  FinishedIntegers{&product, results, panel_results, first, pair, num_panels, streams}.put_rows(first * 16, end_row);
}

static inline IntegerCut cut_product(const IntegerProduct& product, std::int64_t num_wanted) {
  if (product.form().blocks.num_parts) return cut_product_of_blocks(product, num_wanted);
  return cut_in_blocks(product, kIntegerRowsOfBlock, 1, num_wanted);
}

static inline void multiply_chunk(const IntegerProduct& product, const IntegerCut& cut, std::int64_t chunk) {
  if (product.form().blocks.num_parts) return multiply_chunk_of_blocks(product, cut, chunk);
  with_block(product, cut, chunk, [](const IntegerProduct& part, std::int64_t row, std::int64_t end, std::int64_t pair,
                                     std::int64_t end_pair, bool streams) {
    for (; pair < end_pair; ++pair) multiply_pair_of_panels(part, row / 16, ceil_div(end, 16), pair, streams);
  });
}
