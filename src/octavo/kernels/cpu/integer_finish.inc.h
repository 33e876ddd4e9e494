// What all products of integers share around their sums: how they are cut, and how results reach the output. Included
// inside namespace octavo::OCTAVO_LEVEL.

// One row's totals of a pair of panels [2][2][16], or of the one that is left: scaled, biased, to where they belong.
template <int kPanels>
[[gnu::always_inline]] static inline void finish_row(const IntegerProduct& product, std::int64_t row, std::int64_t pair,
                                                     f32x16 (&values)[4], bool streams) {
  const f32x16 scale = splat(product.rows.scales[row]);
#pragma GCC unroll 4
  for (int i = 0; i < kPanels * 2; ++i) {
    values[i] *= scale;
    if (product.packed.bias) values[i] = values[i] + load_f32(product.packed.bias + pair * kPair * 32 + i * 16);
  }
  store_row(product.to, row, pair, values, streams);
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

// The results of a pair of panels [2][row tiles][2][16][16], or of the one that is left, to the output.
template <int kPanels>
static inline void finish_panels(const IntegerProduct& product, std::int64_t first, std::int64_t end, std::int64_t pair,
                                 const float* results, bool streams) {
  const std::int64_t panel_results = (end - first) * 2 * kResultElements, end_row = smaller(product.num_rows, end * 16);
  for (std::int64_t row = first * 16; row < end_row; ++row) {
    const float* of_row = results + (row / 16 - first) * 2 * kResultElements + row % 16 * 16;
    f32x16 values[4] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kPanels * 2; ++i) {
      values[i] = load_f32(of_row + i / 2 * panel_results + i % 2 * kResultElements);
      if (product.form().group_size == 0)
        values[i] = product.scaled((i32x16)values[i], pair * kPair + i / 2, i % 2, row);
    }
    finish_row<kPanels>(product, row, pair, values, streams);
  }
}

static inline void finish_pair(const IntegerProduct& product, std::int64_t first, std::int64_t end, std::int64_t pair,
                               std::int64_t num_panels, const float* results, bool streams) {
  num_panels == kPair ? finish_panels<kPair>(product, first, end, pair, results, streams)
                      : finish_panels<1>(product, first, end, pair, results, streams);
}
