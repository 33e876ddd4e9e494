// Shared by all integer products: how they are cut into chunks, and how results reach the output. Included inside
// namespace octavo::OCTAVO_LEVEL. A level provides `cut_product` and `multiply_chunk`.

// Scales one row's totals of a pair of panels [2][2][16], or of a single last one, adds the bias and stores them.
template <int kPanels>
[[gnu::always_inline]] static inline void finish_row(const IntegerProduct& product, std::int64_t row, std::int64_t pair,
                                                     f32x16 (&values)[4], bool streams) {
  const f32x16 scale = splat(product.rows.scales[row]);
#pragma GCC unroll 4
  for (int i = 0; i < kPanels * 2; ++i) {
    // An explicit fused multiply-add: there is a copy of this code for every way to multiply, and the compiler would
    // fuse the two operations in some of them only.
    const float* bias = product.packed.bias ? product.packed.bias + pair * kPair * 32 + i * 16 : nullptr;
    values[i] = bias ? multiply_add(values[i], scale, load_f32(bias)) : values[i] * scale;
  }
  put_results(product.to, row, pair, values, streams);
}

// How an integer product is cut into chunks, which threads claim: `rows` of a block times `group` pairs of panels, of
// which there are `num_groups`.
struct IntegerCut {
  std::int64_t rows, group, num_groups, num_chunks;
  bool streams;
};

// About `num_wanted` chunks for each block of rows: enough that no thread waits long for another, and few enough that
// claiming them costs nothing.
static inline IntegerCut cut_in_blocks(const IntegerProduct& product, std::int64_t rows, std::int64_t pairs_together,
                                       std::int64_t num_wanted) {
  const std::int64_t num_pairs = ceil_div(product.to.num_panels(), kPair);
  const std::int64_t group = larger(1, ceil_div(num_pairs, pairs_together) / num_wanted) * pairs_together;
  const std::int64_t num_groups = ceil_div(num_pairs, group);
  const bool streams = product.num_rows * product.to.out_size * 2 > kStreamedBytes;
  return {rows, group, num_groups, ceil_div(product.num_rows, rows) * num_groups, streams};
}

// For weights in blocks, at every level: block_product.inc.h.
static IntegerCut cut_product_of_blocks(const IntegerProduct& product, std::int64_t num_wanted);
static void multiply_chunk_of_blocks(const IntegerProduct& product, const IntegerCut& cut, std::int64_t chunk);

// Calls multiply(product, first row, end row, first pair, end pair, streams) for one chunk.
template <class Multiply>
static inline void with_block(const IntegerProduct& product, const IntegerCut& cut, std::int64_t chunk,
                              const Multiply& multiply) {
  const std::int64_t row = chunk / cut.num_groups * cut.rows, pair = chunk % cut.num_groups * cut.group;
  const std::int64_t end = smaller(product.num_rows, row + cut.rows);
  IntegerProduct of_chunk = product;
  if (product.to.leaders) of_chunk.to.leaders += chunk % cut.num_groups * product.num_rows;
  multiply(of_chunk, row, end, pair, smaller(ceil_div(product.to.num_panels(), kPair), pair + cut.group), cut.streams);
  if (cut.streams) end_stream();
}

// Results of a pair of panels, or of a single last one.
struct FinishedIntegers {
  const IntegerProduct* product;
  const float* results;  // [2][row tiles first ...][2][16][16]: integers or, in groups, floats
  std::int64_t panel_results, first, pair, num_panels;
  bool streams;

  void put_row(std::int64_t row) const { put_rows(row, row + 1); }
  void put_rows(std::int64_t row, std::int64_t end) const {
    num_panels == kPair ? put_rows_of<kPair>(*this, row, end) : put_rows_of<1>(*this, row, end);
  }

 private:
  // By value: it must not alias the output.
  template <int kPanels>
  static void put_rows_of(FinishedIntegers of, std::int64_t row, std::int64_t end) {
    const IntegerProduct& product = *of.product;
    for (; row < end; ++row) {
      const float* of_row = of.results + (row / 16 - of.first) * 2 * kResultElements + row % 16 * 16;
      f32x16 values[4] = {};
#pragma GCC unroll 4
      for (int i = 0; i < kPanels * 2; ++i) {
        values[i] = load_f32(of_row + i / 2 * of.panel_results + i % 2 * kResultElements);
        if (product.form().group_size == 0)
          values[i] = product.scaled((i32x16)values[i], of.pair * kPair + i / 2, i % 2, row);
      }
      finish_row<kPanels>(product, row, of.pair, values, of.streams);
    }
  }
};
