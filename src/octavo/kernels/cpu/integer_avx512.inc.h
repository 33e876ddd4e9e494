// Products of integers by vectors of 64 bytes. Included inside namespace octavo::OCTAVO_LEVEL, at the AVX-512 level.
//
// vpdpbusd sums products of unsigned weights and signed q of rows, 4 of k at a time; all sums stay in registers. The
// shift and shuffle units are idle meanwhile, so expanding 4-bit weights again for every 16 rows costs little; for the
// rows of a prompt it would cost a tenth, so they are expanded once.

constexpr std::int64_t kFewRowsExpanded = 48;  // up to here two-level weights are expanded again for all rows, above once
constexpr std::int64_t kFewRowsTogether = 8;   // up to here rows are multiplied by both tiles of a panel at once, above one by one

typedef std::int32_t Quad __attribute__((may_alias));

// 4 of k of a row, broadcast to 16 outputs. Not by intrinsics: GCC 12 would load many rows at once and spill sums.
[[gnu::always_inline]] static inline __m512i load_quad(const std::int8_t* from) {
  __m512i result;
  asm volatile("vpbroadcastd %1, %0" : "=v"(result) : "m"(*reinterpret_cast<const Quad*>(from)));
  return result;
}

// sum[output] += weights [16 outputs][4] times 4 of k of a row.
[[gnu::always_inline]] static inline void add_quad(__m512i& sum, __m512i weights, __m512i quad) {
  sum = _mm512_dpbusd_epi32(sum, weights, quad);
}
[[gnu::always_inline]] static inline void add_quad(__m512i& sum, __m512i weights, const std::int8_t* quad) {
  asm volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const Quad*>(quad)));
}

// Sums of rows that follow one another within a row tile, by tiles of a panel from `tile` on: all in registers.
template <class Unit, int kRows>
struct RowSums {
  static constexpr int kTiles = kRows > kFewRowsTogether ? 1 : 2;
  __m512i sums[kTiles][kRows];

  // visit(sum, tile, row)
  template <class Visit>
  [[gnu::always_inline]] void for_each(const Visit& visit) {
#pragma GCC unroll 2
    for (int tile = 0; tile < kTiles; ++tile)
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) visit(sums[tile][row], tile, row);
  }

  // Units of k [unit, end).
  [[gnu::always_inline]] void add_units(const PanelBlock& block, const std::int8_t* left, std::int64_t unit, std::int64_t end,
                                        int tile) {
    if constexpr (kRows <= Unit::kMaxRowsInOrder) {
      if (block.ahead.from == nullptr) {
        for (; unit < end; unit += 2) add_k_tile(block, left, unit);
        return;
      }
    }
    for (; unit < end; ++unit) {
      block.fetch(unit);
      if constexpr (kTiles == 1) {
        add_unit(sums[0], Unit(block.right, unit, tile), left_of(left, unit));
      } else {
        add_unit(Unit(block.right, unit, 0), Unit(block.right, unit, 1), left_of(left, unit));
      }
    }
  }

 private:
  static const std::int8_t* left_of(const std::int8_t* left, std::int64_t unit) {
    return left + unit / 2 * kTileBytes + unit % 2 * kUnitK;
  }

  // One tile's unit.
  [[gnu::always_inline]] static void add_unit(__m512i* sums, const Unit& weights, const std::int8_t* left) {
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      const Line now = weights.line(line);
#pragma GCC unroll 2
      for (int quad = 0; quad < 2; ++quad)
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) add_quad(sums[row], now.quads[quad], left + row * kTileK + line * 8 + quad * 4);
    }
  }

  // Both tiles: a row is loaded once for both.
  [[gnu::always_inline]] void add_unit(const Unit& first, const Unit& second, const std::int8_t* left) {
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      const Line of_first = first.line(line), of_second = second.line(line);
#pragma GCC unroll 2
      for (int quad = 0; quad < 2; ++quad)
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m512i of_row = load_quad(left + row * kTileK + line * 8 + quad * 4);
          add_quad(sums[0][row], of_first.quads[quad], of_row);
          add_quad(sums[1][row], of_second.quads[quad], of_row);
        }
    }
  }

  // Two units from front to back, so that the hardware prefetcher follows.
  [[gnu::always_inline]] void add_k_tile(const PanelBlock& block, const std::int8_t* left, std::int64_t unit) {
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; ++tile)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        add_unit(sums[tile], Unit(block.right, unit + half, tile), left_of(left, unit + half));
  }
};

// Some rows times some tiles of a panel, where one scale is for all of k.
template <class Unit, int kRows>
[[gnu::noinline]] static void multiply_rows(const PanelBlock& block, std::int64_t row, int tile) {
  const IntegerProduct& product = block.product;
  const std::int8_t* left = block.left(row);
  float* results = block.result(row, tile);
  RowSums<Unit, kRows> rows;
  if (block.k == 0) {
    rows.for_each([&](__m512i& sum, int, int i) { sum = _mm512_set1_epi32(-Unit::kBias * product.rows.sums[row + i]); });
  } else {
    rows.for_each([&](__m512i& sum, int t, int i) { sum = _mm512_loadu_si512(results + t * kResultElements + i * 16); });
  }
  rows.add_units(block, left, 0, block.count * 2, tile);
  rows.for_each([&](__m512i& sum, int t, int i) { _mm512_storeu_si512(results + t * kResultElements + i * 16, sum); });
}

// The same in groups: total += scale * sum (+ offset * sum of the row's q) of each.
template <class Unit, int kRows>
[[gnu::noinline]] static void multiply_rows_in_groups(const PanelBlock& block, std::int64_t row, int tile) {
  const IntegerProduct& product = block.product;
  const std::int64_t num_groups = product.groups(), per_group = product.units_per_group(), num_units = block.num_units();
  const std::int8_t* left = block.left(row);
  float* results = block.result(row, tile);
  RowSums<Unit, kRows> rows;
  if (block.k == 0)
    rows.for_each([&](__m512i&, int t, int i) { store_f32(results + t * kResultElements + i * 16, splat(0.0f)); });
  for (std::int64_t group = block.first_group(), unit = 0; unit < num_units; ++group) {
    const std::int32_t* row_sums = product.rows.sums + row * num_groups + group;
    rows.for_each([&](__m512i& sum, int, int i) { sum = _mm512_set1_epi32(-Unit::kBias * row_sums[i * num_groups]); });
    const std::int64_t end = smaller(num_units, unit + per_group);
    rows.add_units(block, left, unit, end, tile);
    unit = end;
    const float* scales = product.scales(block.panel, group) + tile * 16;
    rows.for_each([&](__m512i& sum, int t, int i) {
      float* total = results + t * kResultElements + i * 16;
      store_f32(total, multiply_add(convert<f32x16>((i32x16)sum), load_f32(scales + t * 16), load_f32(total)));
    });
    if (product.form().offsets) {
      rows.for_each([&](__m512i&, int t, int i) {
        float* total = results + t * kResultElements + i * 16;
        store_f32(total, product.with_offset(load_f32(total), block.panel, group, tile + t, row + i));
      });
    }
  }
}

template <class Unit, int kRows>
static inline void multiply_rows_of_any_form(PanelBlock& block, std::int64_t row) {
  for (int tile = 0; tile < 2; tile += RowSums<Unit, kRows>::kTiles) {
    if (Unit::kMayBeInGroups && block.is_in_groups()) {
      multiply_rows_in_groups<Unit, kRows>(block, row, tile);
    } else {
      multiply_rows<Unit, kRows>(block, row, tile);
    }
    block.end_pass();
  }
}

template <class Unit>
static inline void multiply_some_rows(PanelBlock& block, std::int64_t row, std::int64_t count) {
  switch (count) {
    case 1: return multiply_rows_of_any_form<Unit, 1>(block, row);
    case 2: return multiply_rows_of_any_form<Unit, 2>(block, row);
    case 3: return multiply_rows_of_any_form<Unit, 3>(block, row);
    case 4: return multiply_rows_of_any_form<Unit, 4>(block, row);
    case 5: return multiply_rows_of_any_form<Unit, 5>(block, row);
    case 6: return multiply_rows_of_any_form<Unit, 6>(block, row);
    case 7: return multiply_rows_of_any_form<Unit, 7>(block, row);
    case 8: return multiply_rows_of_any_form<Unit, 8>(block, row);
    default: return multiply_rows_of_any_form<Unit, Unit::kMaxRows>(block, row);
  }
}

// All rows: as many of each row tile at once as possible, or in parts that are as equal as possible.
template <class Unit>
static inline void multiply_all_rows(PanelBlock& block) {
  const std::int64_t num_rows = block.end - block.first * 16;
  const bool reads_in_order = num_rows <= Unit::kMaxRowsInOrder && block.units_per_group() % 2 == 0;
  if (!reads_in_order) block.begin_ahead(ceil_div(num_rows, kFewRowsTogether));
  for (std::int64_t row = block.first * 16; row < block.end;) {
    const std::int64_t rest = smaller(block.end, (row / 16 + 1) * 16) - row;
    const std::int64_t count = rest == Unit::kMaxRows ? rest : ceil_div(rest, ceil_div(rest, kFewRowsTogether));
    multiply_some_rows<Unit>(block, row, count);
    row += count;
  }
}

static void multiply_panel_block(PanelBlock block) {
  const Integers& form = block.product.form();
  if (form.is_two_level) {
    if (block.end - block.first * 16 <= kFewRowsExpanded) return multiply_all_rows<TwoLevelUnit>(block);
    alignas(64) std::uint8_t expanded[kBlockTilesOfK * 2 * kTileBytes];
    expand_block(block, expanded);
    block.right = expanded;
    return multiply_all_rows<ByteUnit>(block);
  }
  form.bits == 8 ? multiply_all_rows<ByteUnit>(block) : multiply_all_rows<NibbleUnit>(block);
}
