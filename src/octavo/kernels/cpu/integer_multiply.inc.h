// A product of integers, cut into chunks. Included inside namespace octavo::OCTAVO_LEVEL.

#if !defined(OCTAVO_INTEGERS_BY_PANELS)

template <int kBits, int kRows>
static inline void multiply_pair_of_panels(const IntegerProduct& product, std::int64_t row, std::int64_t pair, bool streams) {
  const std::int64_t num_panels = smaller(kPair, product.to.num_panels() - pair * kPair);
  f32x16 results[kRows][4] = {};
  for (std::int64_t i = 0; i < num_panels; ++i) {
    f32x16* of_panel = results[0] + i * 2;
    product.form().is_two_level ? multiply_two_level_panel<kRows>(product, row, pair * kPair + i, of_panel, 4)
                             : multiply_panel<kBits, kRows>(product, row, pair * kPair + i, of_panel, 4);
  }
  for (int i = 0; i < kRows; ++i)
    num_panels == kPair ? finish_row<kPair>(product, row + i, pair, results[i], streams)
                        : finish_row<1>(product, row + i, pair, results[i], streams);
}

// Rows [first, end) times a pair of panels, by vectors.
template <int kBits>
static inline void multiply_by_vectors(const IntegerProduct& product, std::int64_t first, std::int64_t end,
                                       std::int64_t pair, bool streams) {
  std::int64_t row = first;
  for (; row + kIntegerRowsAtOnce <= end; row += kIntegerRowsAtOnce)
    multiply_pair_of_panels<kBits, kIntegerRowsAtOnce>(product, row, pair, streams);
  for (; row < end; ++row) multiply_pair_of_panels<kBits, 1>(product, row, pair, streams);
}

static inline void multiply_chunk_by_vectors(const IntegerProduct& product, const IntegerCut& cut, std::int64_t chunk) {
  with_block(product, cut, chunk, [](const IntegerProduct& part, std::int64_t row, std::int64_t end, std::int64_t pair,
                                     std::int64_t end_pair, bool streams) {
    for (; pair < end_pair; ++pair)
      part.form().bits == 8 ? multiply_by_vectors<8>(part, row, end, pair, streams)
                            : multiply_by_vectors<4>(part, row, end, pair, streams);
  });
}

#endif

#if defined(OCTAVO_HAS_AMX)

// Some row tiles of a product, computed by one thread.
struct RowsByTiles {
  const IntegerProduct& product;
  std::int64_t first, end;      // row tiles
  const std::uint8_t* right;    // what is multiplied now: k tiles [k, k + count) of a panel, as they are stored
  const std::uint8_t* next;     // what is multiplied after that
  std::int64_t panel, k, count;
  float* results;               // [row tiles][2][16][16], integers or, in groups, floats
  std::uint8_t* expanded;       // room for `count` k tiles of bytes
  Finish<FinishedIntegers>& finish;  // of earlier panels, whose rows are stored meanwhile

  void multiply() {
    const Integers& form = product.form();
    if (form.group_size != 0) {
      finish.do_all();
      return multiply_in_groups();
    }
    const std::int64_t num_pairs = ceil_div(end - first, 2), lines = k_tile_bytes(form) / 64;
    if (num_pairs <= kFewPairs) {
      for_each_pair(first, smaller(end, first + 2), [&](std::int64_t at) {
        for (std::int64_t line = 0; line < lines; ++line) prefetch_line(right + (at * lines + line) * 64);
        expand(at + 1);
        finish.do_some(num_rows());
      });
      return for_each_pair(first + 2, end, [&](std::int64_t) { finish.do_some(num_rows()); });
    }
    Ahead ahead = {next, ceil_div(lines, num_pairs)};
    for (std::int64_t tile = first; tile < end; tile += 2) {
      for_each_pair(tile, smaller(end, tile + 2), [&](std::int64_t at) {
        for (std::int64_t i = 0; i < ahead.lines; ++i) __builtin_prefetch(ahead.line(at * ahead.lines + i), 0, 2);
        if (tile == first) expand(at + 1);
        finish.do_some(num_rows());
      });
      ahead.from = ahead.line(count * ahead.lines);
    }
  }

 private:
  static constexpr std::int64_t kFewPairs = 2;  // of row tiles: memory decides, not products

  const std::int8_t* left(std::int64_t tile) const {
    return product.rows.left + (tile * product.num_k() + k) * kTileBytes;
  }
  std::int64_t left_stride() const { return product.num_k() * kTileBytes; }
  std::int64_t num_rows() const { return smaller(product.num_rows, end * 16) - first * 16; }

  // Expands k tile number `at` of these from 4 bits, just before it is needed.
  void expand(std::int64_t at) const {
    const Integers& form = product.form();
    if (form.bits == 8 || at >= count) return;
    const std::uint8_t* from = right + at * k_tile_bytes(form);
    std::uint8_t* to = expanded + at * 2 * kTileBytes;
    form.is_two_level ? expand_two_level(from, to) : expand_nibbles(from, 1, to);
  }

  // One scale for all k, two row tiles at a time.
  template <class Alongside>
  void for_each_pair(std::int64_t tile, std::int64_t last, const Alongside& alongside) const {
    if (tile == first) expand(0);
    const std::uint8_t* bytes = product.form().bits == 4 ? expanded : right;
    for (; tile < last; tile += 2) {
      std::int32_t* sums = reinterpret_cast<std::int32_t*>(results + (tile - first) * 2 * kResultElements);
      if (tile + 1 < last) {
        multiply_integers<2>(sums, left(tile), left_stride(), bytes, count, k > 0, alongside);
      } else {
        multiply_integers<1>(sums, left(tile), left_stride(), bytes, count, k > 0, alongside);
      }
    }
  }

  void multiply_in_groups() const {
    const std::int64_t groups_end = product.groups() * product.units_per_group();
    const std::int64_t num_units = smaller(count * 2, groups_end - k * 2);
    const std::uint8_t* bytes = right;
    if (product.form().bits == 4) expand_nibbles(right, count, expanded), bytes = expanded;
    for (std::int64_t tile = first; tile < end; tile += 2) {
      float* totals = results + (tile - first) * 2 * kResultElements;
      const GroupScales scales = {product, panel, tile * 16};
      if (tile + 1 < end) {
        multiply_groups<2>(totals, left(tile), left_stride(), bytes, k * 2, num_units, scales);
      } else {
        multiply_groups<1>(totals, left(tile), left_stride(), bytes, k * 2, num_units, scales);
      }
    }
  }
};

// How an integer product is cut: see `Blocking`. If the activations of all k fit into a cache, they stay there for all
// pairs of panels; otherwise a block of k is multiplied by many panels, whose partial sums are kept meanwhile.
static inline Blocking choose_integer_blocking(const IntegerProduct& product) {
  constexpr std::int64_t kFewest = 16;
  const std::int64_t num_row_tiles = ceil_div(product.num_rows, 16), num_k = product.num_k();
  const std::int64_t fitting = kIntegerLeftBytes / (num_k * kTileBytes);
  const std::int64_t most = larger(kFewest, smaller(kMaxRowTiles, fitting));
  const std::int64_t num_blocks = ceil_div(num_row_tiles, most);
  const std::int64_t row_tiles = ceil_div(ceil_div(num_row_tiles, num_blocks), 2) * 2;
  return {row_tiles, row_tiles <= larger(2, fitting) ? kPair : kMaxPanels, smaller(kIntegerTilesOfK, num_k)};
}

// Some panels; the rows of the last ones are left to `finish`.
static inline void multiply_by_tiles(const IntegerProduct& product, const Blocking& blocking, std::int64_t first,
                                     std::int64_t end, std::int64_t pair, std::int64_t end_pair, bool streams,
                                     Finish<FinishedIntegers>& finish) {
  const std::int64_t panel = pair * kPair, num_panels = smaller(end_pair * kPair, product.to.num_panels()) - panel;
  const std::int64_t panel_results = (end - first) * 2 * kResultElements, tile_bytes = k_tile_bytes(product.form());
  const std::int64_t num_results = larger(blocking.panels, 2 * kPair) * panel_results;
  const std::int64_t expanded_bytes = blocking.num_k * 2 * kTileBytes;
  float* memory = static_cast<float*>(thread_scratch().bytes(static_cast<std::size_t>(num_results * 4 + expanded_bytes)));
  std::uint8_t* expanded = reinterpret_cast<std::uint8_t*>(memory + num_results);
  // A pair of panels is stored while the next one is multiplied, which therefore needs its own memory.
  const bool are_a_pair = blocking.panels == kPair;
  float* results = memory + (are_a_pair ? pair % 2 * kPair * panel_results : 0);
  for (std::int64_t k = 0; k < product.num_k(); k += blocking.num_k) {
    const std::int64_t next_k = k + blocking.num_k, count = smaller(blocking.num_k, product.num_k() - k);
    for (std::int64_t i = 0; i < num_panels; ++i) {
      const std::uint8_t* right = product.panel(panel + i) + k * tile_bytes;
      const std::uint8_t* next = i + 1 < num_panels         ? product.panel(panel + i + 1) + k * tile_bytes
                                 : next_k < product.num_k() ? product.panel(panel) + next_k * tile_bytes
                                                            : product.panel(panel + num_panels);
      RowsByTiles{product, first, end, right, next, panel + i, k, count, results + i * panel_results, expanded, finish}.multiply();
      if (next_k >= product.num_k() && (i % kPair == kPair - 1 || i + 1 == num_panels)) {
        const std::int64_t done = i / kPair * kPair, end_row = smaller(product.num_rows, end * 16);
        finish.do_all();
        finish = {{&product, results + done * panel_results, panel_results, first, (panel + done) / kPair, i + 1 - done, streams},
                  first * 16, end_row, kPair * ceil_div(end - first, 2) * (are_a_pair ? product.num_k() : count)};
      }
    }
  }
}

static inline void begin_integer_tiles(const IntegerProduct& product) {
  const std::int64_t rows = smaller(16, product.num_rows);
  _tile_loadconfig(product.units_per_group() == 1 ? &kHalfTileConfigs.by_rows[rows] : &kTileConfigs.by_rows[rows]);
}

static inline void multiply_chunk_by_tiles(const IntegerProduct& product, const IntegerCut& cut, std::int64_t chunk) {
  const Blocking blocking = choose_integer_blocking(product);
  with_block(product, cut, chunk, [&](const IntegerProduct& part, std::int64_t row, std::int64_t end, std::int64_t pair,
                                      std::int64_t end_pair, bool streams) {
    Finish<FinishedIntegers> finish = {};
    begin_integer_tiles(part);
    for (; pair < end_pair; pair += blocking.panels / kPair)
      multiply_by_tiles(part, blocking, row / 16, ceil_div(end, 16), pair,
                        smaller(end_pair, pair + blocking.panels / kPair), streams, finish);
    end_tiles();
    finish.do_all();
  });
}

static inline bool goes_by_tiles(const IntegerProduct& product) {
  const std::int64_t few = product.form().is_two_level ? kFewRowsTwoLevel : product.form().bits == 8 ? kFewRows8 : kFewRows4;
  return product.num_rows > few;
}

static inline IntegerCut cut_product(const IntegerProduct& product, std::int64_t num_wanted) {
  if (product.form().blocks.num_parts) return cut_product_of_blocks(product, num_wanted);
  if (!goes_by_tiles(product)) return cut_in_blocks(product, kIntegerRowsOfBlock, 1, num_wanted);
  const Blocking blocking = choose_integer_blocking(product);
  return cut_in_blocks(product, blocking.row_tiles * 16, blocking.panels / kPair, num_wanted);
}

static inline void multiply_chunk(const IntegerProduct& product, const IntegerCut& cut, std::int64_t chunk) {
  if (product.form().blocks.num_parts) return multiply_chunk_of_blocks(product, cut, chunk);
  goes_by_tiles(product) ? multiply_chunk_by_tiles(product, cut, chunk) : multiply_chunk_by_vectors(product, cut, chunk);
}

#elif !defined(OCTAVO_INTEGERS_BY_PANELS)

static inline IntegerCut cut_product(const IntegerProduct& product, std::int64_t num_wanted) {
  if (product.form().blocks.num_parts) return cut_product_of_blocks(product, num_wanted);
  return cut_in_blocks(product, kIntegerRowsOfBlock, 1, num_wanted);
}

static inline void multiply_chunk(const IntegerProduct& product, const IntegerCut& cut, std::int64_t chunk) {
  if (product.form().blocks.num_parts) return multiply_chunk_of_blocks(product, cut, chunk);
  multiply_chunk_by_vectors(product, cut, chunk);
}

#endif

static void multiply(const IntegerProduct& product, Pool& pool) {
  const InPhase phase(pool.phases(), Phase::products);
  const IntegerCut cut = cut_product(product, pool.num_threads() * kChunksPerThread);
  pool.run(cut.num_chunks, [&](std::int64_t chunk) { multiply_chunk(product, cut, chunk); });
}
