// Linear maps whose weights are integers. Included inside namespace octavo::OCTAVO_LEVEL.
//
// out = row scale * (sum over groups, in order, of scale * exact sum) + bias: the same for any number of rows, whichever
// unit multiplies.

// One row's totals of a pair of panels [2][2][16]: scaled, biased, to where they belong.
static inline void finish_row(const IntegerProduct& product, std::int64_t row, std::int64_t pair, f32x16* values,
                              bool streams) {
  const f32x16 scale = splat(product.rows.scales[row]);
  const std::int64_t num_panels = smaller(kPair, product.to.num_panels() - pair * kPair);
  for (std::int64_t i = 0; i < num_panels * 2; ++i) {
    values[i] *= scale;
    if (product.packed.bias) values[i] = values[i] + load_f32(product.packed.bias + pair * kPair * 32 + i * 16);
  }
  store_row(product.to, row, pair, values, streams);
}

template <int kBits, int kRows>
static inline void multiply_pair_of_panels(const IntegerProduct& product, std::int64_t row, std::int64_t pair, bool streams) {
  const std::int64_t num_panels = smaller(kPair, product.to.num_panels() - pair * kPair);
  f32x16 results[kRows][4] = {};
  for (std::int64_t i = 0; i < num_panels; ++i)
    multiply_panel<kBits, kRows>(product, row, pair * kPair + i, results[0] + i * 2, 4);
  for (int i = 0; i < kRows; ++i) finish_row(product, row + i, pair, results[i], streams);
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

// Cuts rows and panels into chunks and calls multiply(first row, end row, first pair, end pair, streams) for each.
template <class Multiply>
static inline void for_each_block(const IntegerProduct& product, std::int64_t rows_together, std::int64_t pairs_together,
                                  Pool& pool, const Multiply& multiply) {
  const std::int64_t num_blocks = ceil_div(product.num_rows, rows_together);
  const std::int64_t num_pairs = ceil_div(product.to.num_panels(), kPair);
  // Enough chunks that no thread waits long for another, and few enough that claiming them costs nothing.
  const std::int64_t num_together = ceil_div(num_pairs, pairs_together);
  const std::int64_t group = larger(1, num_together / (pool.num_threads() * kChunksPerThread)) * pairs_together;
  const std::int64_t num_groups = ceil_div(num_pairs, group);
  const bool streams = product.num_rows * product.to.out_size * 2 > kStreamedBytes;
  pool.run(num_blocks * num_groups, [&](std::int64_t chunk) {
    const std::int64_t row = chunk / num_groups * rows_together, pair = chunk % num_groups * group;
    multiply(row, smaller(product.num_rows, row + rows_together), pair, smaller(num_pairs, pair + group), streams);
    if (streams) end_stream();
  });
}

template <int kBits>
static void multiply_by_vectors(const IntegerProduct& product, Pool& pool) {
  for_each_block(product, kIntegerRowsOfBlock, 1, pool,
                 [&](std::int64_t row, std::int64_t end, std::int64_t pair, std::int64_t end_pair, bool streams) {
                   for (; pair < end_pair; ++pair) multiply_by_vectors<kBits>(product, row, end, pair, streams);
                 });
}

#if defined(OCTAVO_HAS_AMX)

// Row tiles [first, end) times k tiles [k, k + count) of one panel: into results [row tiles][2][16][16], integers or, in
// groups, floats.
static inline void multiply_panel_tiles(const IntegerProduct& product, std::int64_t first, std::int64_t end,
                                        std::int64_t panel, std::int64_t k, std::int64_t count, float* results,
                                        std::uint8_t* expanded) {
  const std::int64_t stride = product.num_k() * kTileBytes;
  const std::uint8_t* right = product.panel(panel) + k * 2 * kTileBytes * product.form().bits / 8;
  if (product.form().bits == 4) {
    expand_nibbles(right, count, expanded);
    right = expanded;
  }
  Ahead ahead = {right + kPrefetchBytes, 32};
  const auto multiply = [&](auto row_tiles, std::int64_t tile) {
    constexpr int kRowTiles = decltype(row_tiles)::value;
    float* result = results + (tile - first) * 2 * kResultElements;
    const std::int8_t* left = product.rows.left + tile * stride + k * kTileBytes;
    if (product.form().group_size == 0) {
      multiply_integers<kRowTiles>(reinterpret_cast<std::int32_t*>(result), left, stride, right, count, k > 0, ahead);
      ahead = {};
    } else {
      const std::int64_t groups_end = product.groups() * product.units_per_group();
      multiply_groups<kRowTiles>(result, left, stride, right, k * 2, smaller(count * 2, groups_end - k * 2),
                                 GroupScales{product, panel, tile * 16});
    }
  };
  std::int64_t tile = first;
  for (; tile + 1 < end; tile += 2) multiply(Constant<2>{}, tile);
  if (tile < end) multiply(Constant<1>{}, tile);
}

// The results of a pair of panels [2][row tiles][2][16][16], to the output.
static inline void finish_pair(const IntegerProduct& product, std::int64_t first, std::int64_t end, std::int64_t pair,
                               std::int64_t num_panels, const float* results, bool streams) {
  const std::int64_t panel_results = (end - first) * 2 * kResultElements;
  for (std::int64_t row = first * 16; row < smaller(product.num_rows, end * 16); ++row) {
    const float* of_row = results + (row / 16 - first) * 2 * kResultElements + row % 16 * 16;
    f32x16 values[4] = {};
    for (std::int64_t i = 0; i < num_panels * 2; ++i) {
      values[i] = load_f32(of_row + i / 2 * panel_results + i % 2 * kResultElements);
      if (product.form().group_size == 0)
        values[i] = product.with_offset(
            multiply_add(__builtin_convertvector((i32x16)values[i], f32x16),
                         load_f32(product.scales(pair * kPair + i / 2, 0) + i % 2 * 16), splat(0.0f)),
            pair * kPair + i / 2, 0, i % 2, row);
    }
    finish_row(product, row, pair, values, streams);
  }
}

static inline void multiply_by_tiles(const IntegerProduct& product, const Blocking& blocking, std::int64_t first,
                                     std::int64_t end, std::int64_t pair, std::int64_t end_pair, bool streams) {
  const std::int64_t panel = pair * kPair, num_panels = smaller(end_pair * kPair, product.to.num_panels()) - panel;
  const std::int64_t panel_results = (end - first) * 2 * kResultElements;
  const std::int64_t result_bytes = num_panels * panel_results * 4, expanded_bytes = blocking.num_k * 2 * kTileBytes;
  float* results = static_cast<float*>(thread_scratch().bytes(static_cast<std::size_t>(result_bytes + expanded_bytes)));
  std::uint8_t* expanded = reinterpret_cast<std::uint8_t*>(results) + result_bytes;
  for (std::int64_t k = 0; k < product.num_k(); k += blocking.num_k)
    for (std::int64_t i = 0; i < num_panels; ++i)
      multiply_panel_tiles(product, first, end, panel + i, k, smaller(blocking.num_k, product.num_k() - k),
                           results + i * panel_results, expanded);
  for (std::int64_t i = 0; i < num_panels; i += kPair)
    finish_pair(product, first, end, (panel + i) / kPair, smaller(kPair, num_panels - i), results + i * panel_results, streams);
}

static inline void begin_integer_tiles(const IntegerProduct& product) {
  const std::int64_t rows = smaller(16, product.num_rows);
  _tile_loadconfig(product.units_per_group() == 1 ? &kHalfTileConfigs.by_rows[rows] : &kTileConfigs.by_rows[rows]);
}

static void multiply_by_tiles(const IntegerProduct& product, Pool& pool) {
  const std::int64_t num_row_tiles = ceil_div(product.num_rows, 16);
  Blocking blocking = choose_blocking(num_row_tiles, product.num_k());
  if (product.form().bits == 4) blocking.num_k = smaller(kTilesOfK, blocking.num_k);  // what is expanded, not more
  for_each_block(product, blocking.row_tiles * 16, blocking.panels / kPair, pool,
                 [&](std::int64_t row, std::int64_t end, std::int64_t pair, std::int64_t end_pair, bool streams) {
                   begin_integer_tiles(product);
                   for (; pair < end_pair; pair += blocking.panels / kPair)
                     multiply_by_tiles(product, blocking, row / 16, ceil_div(end, 16), pair,
                                       smaller(end_pair, pair + blocking.panels / kPair), streams);
                   end_tiles();
                 });
}

#endif

static void multiply(const IntegerProduct& product, Pool& pool) {
#if defined(OCTAVO_HAS_AMX)
  if (product.num_rows > (product.form().bits == 8 ? kFewRows8 : kFewRows4)) return multiply_by_tiles(product, pool);
#endif
  product.form().bits == 8 ? multiply_by_vectors<8>(product, pool) : multiply_by_vectors<4>(product, pool);
}

static void integer_linear(const LinearArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const Integers& form = args.packed.integers;
  void* memory = pool.scratch().bytes(integer_rows_bytes(rows.rows, rows.size, num_groups(form, rows.size)));
  const IntegerRows quantised = place_integer_rows(memory, rows.rows, rows.size);
  quantise_rows(rows, form, quantised, pool);
  multiply({quantised, rows.rows, rows.size, args.packed, {args.output, args.packed.out_size, args.out, nullptr}}, pool);
}

// What lies between the two maps is written row by row: a row's scale is known only when all of it is there.
static void integer_mlp(const MlpArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const std::int64_t middle_size = args.gate_up.out_size;
  const Integers &first = args.gate_up.integers, &second = args.down.integers;
  const std::size_t size = integer_rows_bytes(rows.rows, rows.size, num_groups(first, rows.size));
  const std::size_t next_size = integer_rows_bytes(rows.rows, middle_size, num_groups(second, middle_size));
  const std::size_t middle_bytes = static_cast<std::size_t>(rows.rows * middle_size) * sizeof(bf16);
  std::int8_t* memory = static_cast<std::int8_t*>(pool.scratch().bytes(size + next_size + middle_bytes));
  bf16* middle = reinterpret_cast<bf16*>(memory + size + next_size);
  const IntegerRows quantised = place_integer_rows(memory, rows.rows, rows.size);
  quantise_rows(rows, first, quantised, pool);
  multiply({quantised, rows.rows, rows.size, args.gate_up, {Output::gated, middle_size, middle, nullptr}}, pool);
  const IntegerRows next = place_integer_rows(memory + size, rows.rows, middle_size);
  quantise_rows({middle, rows.rows, middle_size, nullptr, nullptr, 0.0f, nullptr}, second, next, pool);
  multiply({next, rows.rows, middle_size, args.down, {Output::bf16, args.down.out_size, args.out, nullptr}}, pool);
}

static void linear_of_any_weight(const LinearArgs& args, Pool& pool) {
  args.packed.integers.bits ? integer_linear(args, pool) : linear(args, pool);
}

static void mlp_of_any_weights(const MlpArgs& args, Pool& pool) {
  args.gate_up.integers.bits ? integer_mlp(args, pool) : mlp(args, pool);
}
