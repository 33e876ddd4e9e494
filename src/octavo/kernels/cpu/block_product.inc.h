// Products with weights in blocks, for any number of rows. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A chunk of a panel is expanded into the first-level cache and multiplied by all rows of a block. Group by group,
// total += (weight's scale * row's scale) * exact sum, then += offset * (row's scale * sum of its q): in the same order for
// any number of rows.

static inline f32x16 fused_multiply_add(f32x16 a, f32x16 b, f32x16 sum) {
#if defined(__AVX2__) && !defined(OCTAVO_HAS_AVX512)
  typedef f32x16::Half Half;
  return {(Half)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)sum.low),
          (Half)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)sum.high)};
#else
  return multiply_add(a, b, sum);
#endif
}

constexpr std::int64_t kFewRowsOfBlocks = 2;

// An expanded chunk of a panel, and the rows to multiply by it.
struct ChunkOfRows {
  const IntegerProduct& product;
  const ExpandedChunk& chunk;
  std::int64_t index, num_groups;  // of the chunk; its groups
  int bias[2];                     // of each strip's codes
  std::int64_t first;              // row tile
  float* results;                  // [row tiles][2][16][16]
  Ahead ahead;                     // what each group prefetches: all at once, products would stall

  const std::int8_t* left(std::int64_t row) const {
    return product.rows.left + (row / 16 * product.num_k() + index * (kChunkGroups / 2)) * kTileBytes + row % 16 * kTileK;
  }
  // Of which the row is the first lane.
  const TileGroup* groups(std::int64_t row) const {
    const std::int64_t num_sums = product.in_size / kUnitK * kTileGroupInts;
    const SumsOfRow sums = sums_of_row(product.rows, product.form(), row, num_sums);
    return reinterpret_cast<const TileGroup*>(sums.first) + index * kChunkGroups;
  }
  float* result(std::int64_t row, int strip) const {
    return results + ((row / 16 - first) * 2 + strip) * kResultElements + row % 16 * 16;
  }
};

// kRows rows times kBlockStrips strips from `strip` on. Totals stay in registers between groups if there are enough.
template <class Way, int kSubs, bool kHasOffsets, int kRows>
[[gnu::noinline]] static void multiply_chunk_by_rows(const ChunkOfRows& of, std::int64_t row, int strip) {
  const std::int8_t* left = of.left(row);
  const TileGroup* groups = of.groups(row);
  const std::uint8_t *right = of.chunk.values[strip], *other = of.chunk.values[1];
  float* results = of.result(row, strip);
  f32x16 totals[kBlockStrips][kRows];
#pragma GCC unroll 2
  for (int s = 0; s < kBlockStrips; ++s)
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
      totals[s][i] = of.index == 0 ? splat(0.0f) : load_f32(results + s * kResultElements + i * 16);
#pragma GCC unroll 1
  for (std::int64_t group = 0; group < of.num_groups; ++group, ++groups, right += kGroupBytes, other += kGroupBytes) {
    const std::int8_t* q = left + group / 2 * kTileBytes + group % 2 * kUnitK;
    for (std::int64_t i = 0; i < of.ahead.lines; ++i) __builtin_prefetch(of.ahead.line(group * of.ahead.lines + i), 0, 2);
#pragma GCC unroll 2
    for (int sub = 0; sub < kSubs; ++sub) {
      BlockDots<Way, kRows> dots(kSubs == 1 ? groups->begin : groups->begin_half[sub], of.bias[strip]);
      constexpr int kQuads = 8 / kSubs;
#pragma GCC unroll 8
      for (int quad = 0; quad < kQuads; ++quad) {
        const std::int64_t at = sub * kQuads + quad;
        dots.add(right + at * 64, other + at * 64, q + at * 4, kQuads - 1 - quad);
      }
#pragma GCC unroll 2
      for (int s = 0; s < kBlockStrips; ++s) {
        const f32x16 scale = load_f32(&of.chunk.scales[group][sub][(strip + s) * 16]);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i)
          totals[s][i] = fused_multiply_add(dots.sum(s, i), scale * splat(groups->scale[i]), totals[s][i]);
        if constexpr (kHasOffsets) {
          const f32x16 offset = load_f32(&of.chunk.offsets[group][sub][(strip + s) * 16]);
          const float* of_rows = kSubs == 1 ? groups->scaled_sum : groups->scaled_half[sub];
#pragma GCC unroll 8
          for (int i = 0; i < kRows; ++i) totals[s][i] = fused_multiply_add(offset, splat(of_rows[i]), totals[s][i]);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int s = 0; s < kBlockStrips; ++s)
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) store_f32(results + s * kResultElements + i * 16, totals[s][i]);
}

template <class Way, int kSubs, bool kHasOffsets, int kRows = kMaxBlockRows<Way, kSubs, kHasOffsets>>
static inline void multiply_chunk_by_some_rows(const ChunkOfRows& of, std::int64_t row, std::int64_t count, int strip) {
  if constexpr (kRows > 1) {
    if (count < kRows) return multiply_chunk_by_some_rows<Way, kSubs, kHasOffsets, kRows - 1>(of, row, count, strip);
  }
  multiply_chunk_by_rows<Way, kSubs, kHasOffsets, kRows>(of, row, strip);
}

// All rows up to `end`, a few at a time, in parts that are as equal as possible, times strips from `strip` on.
// `num_lines`: cache lines to prefetch meanwhile.
template <class Way, int kSubs, bool kHasOffsets>
static inline void multiply_chunk_by_all_rows(ChunkOfRows& of, std::int64_t num_lines, std::int64_t end, int strip) {
  constexpr std::int64_t kMost = kMaxBlockRows<Way, kSubs, kHasOffsets>;
  const std::int64_t num_rows = end - of.first * 16;
  const std::int64_t num_passes = num_rows / 16 * ceil_div(16, kMost) + ceil_div(num_rows % 16, kMost);
  of.ahead.lines = ceil_div(num_lines, num_passes * of.num_groups);
  for (std::int64_t row = of.first * 16; row < end;) {
    const std::int64_t rest = smaller(end, (row / 16 + 1) * 16) - row, count = ceil_div(rest, ceil_div(rest, kMost));
    multiply_chunk_by_some_rows<Way, kSubs, kHasOffsets>(of, row, count, strip);
    of.ahead.from = of.ahead.line(of.num_groups * of.ahead.lines);
    row += count;
  }
}

template <class Way>
static inline void multiply_strips(const BlockPanel& panel, ChunkOfRows& of, std::int64_t num_lines, std::int64_t end, int strip) {
  const auto multiply = [&](auto num_subs, auto has_offsets) {
    multiply_chunk_by_all_rows<Way, num_subs.value, has_offsets.value>(of, num_lines, end, strip);
  };
  const auto with_subs = [&](auto num_subs) {
    panel.has_offsets() ? multiply(num_subs, std::true_type{}) : multiply(num_subs, std::false_type{});
  };
  panel.num_subs() == 1 ? with_subs(std::integral_constant<int, 1>{}) : with_subs(std::integral_constant<int, 2>{});
}

static inline void multiply_panel_of_blocks(const IntegerProduct& product, std::int64_t number, std::int64_t first,
                                            std::int64_t end_row, float* results) {
  const BlockPanel panel = BlockPanel::of(product.form().blocks, product.form().values, number, product.in_size);
  // Prefetches are issued during the longest part: for few rows, that is expanding.
  const bool has_few_rows = end_row - first * 16 <= kFewRowsOfBlocks;
  const bool expands_longest = has_few_rows && is_expanded(panel.strips[0]) && is_expanded(panel.strips[1]);
  ExpandedChunk chunk;
  for (std::int64_t index = 0; index * kChunkGroups < panel.num_groups; ++index) {
    for (int strip = 0; strip < 2; ++strip) expand_strip(panel, index, strip, expands_longest, chunk);
    const int bias[2] = {bias_of(panel.strips[0]), bias_of(panel.strips[1])};
    ChunkOfRows of = {product, chunk, index, panel.groups_of(index), {bias[0], bias[1]}, first, results, {}};
    of.ahead.from = panel.chunk(index, 0) + kFarBytes;
    const std::int64_t num_lines = expands_longest ? 0 : panel.bytes_of(index) / 64 * kBlockStrips / 2;
    for (int strip = 0; strip < 2; strip += kBlockStrips)
      with_way(panel.strips[strip], [&](auto way) { multiply_strips<decltype(way)>(panel, of, num_lines, end_row, strip); });
  }
}

static IntegerCut cut_product_of_blocks(const IntegerProduct& product, std::int64_t num_wanted) {
  return cut_in_blocks(product, kIntegerRowsOfBlock, 1, num_wanted);
}

static void multiply_chunk_of_blocks(const IntegerProduct& product, const IntegerCut& cut, std::int64_t chunk) {
  with_block(product, cut, chunk, [](const IntegerProduct& part, std::int64_t row, std::int64_t end_row, std::int64_t pair,
                                     std::int64_t end_pair, bool streams) {
    const std::int64_t first = row / 16, panel_results = (ceil_div(end_row, 16) - first) * 2 * kResultElements;
    float* results = static_cast<float*>(thread_scratch().bytes(static_cast<std::size_t>(kPair * panel_results * 4)));
    for (; pair < end_pair; ++pair) {
      const std::int64_t num_panels = smaller(kPair, part.to.num_panels() - pair * kPair);
      for (std::int64_t i = 0; i < num_panels; ++i)
        multiply_panel_of_blocks(part, pair * kPair + i, first, end_row, results + i * panel_results);
      FinishedIntegers{&part, results, panel_results, first, pair, num_panels, streams}.put_rows(row, end_row);
    }
  });
}
