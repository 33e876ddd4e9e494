// Products with weights in blocks, for any number of rows. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A few rows are multiplied by weights as they are stored, whose codes and scales are made in registers: block_streams.inc.h,
// block_stored.inc.h. For more rows, a chunk of a panel is first expanded into the first-level cache. Group by group,
// total += (weight's scale * row's scale) * exact sum, then += offset * (row's scale * sum of its q): the same code, and so
// the same order and bits, for any number of rows.

static inline f32x16 fused_multiply_add(f32x16 a, f32x16 b, f32x16 sum) {
#if defined(__AVX2__) && !defined(OCTAVO_HAS_AVX512)
  typedef f32x16::Half Half;
  return {(Half)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)sum.low),
          (Half)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)sum.high)};
#else
  return multiply_add(a, b, sum);
#endif
}

// A chunk of a panel, and the rows to multiply by it.
struct ChunkOfRows {
  const IntegerProduct& product;
  std::int64_t index, num_groups;  // of the chunk; its groups
  std::int64_t first;              // row tile
  float* results;                  // [row tiles][2][16][16]

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

// Strips of an expanded chunk, from `strip` on.
template <int kNumSubs, bool kOffsets>
struct ExpandedStrips {
  static constexpr int kStrips = kBlockStrips, kSubs = kNumSubs;
  static constexpr bool kHasOffsets = kOffsets;

  const ExpandedChunk& chunk;
  int strip;
  int bias;     // of the codes
  Ahead ahead;  // what each group prefetches: all at once, products would stall

  void fetch(std::int64_t group) const {
    for (std::int64_t i = 0; i < ahead.lines; ++i) __builtin_prefetch(ahead.line(group * ahead.lines + i), 0, 2);
  }
  template <int kQuad>
  [[gnu::always_inline]] u8x64 codes(std::int64_t group, int s) const {
    return load<u8x64>(chunk.values[strip + s] + group * kGroupBytes + kQuad * 64);
  }
  [[gnu::always_inline]] f32x16 scale(std::int64_t group, int half, int s) const {
    return load_f32(&chunk.scales[group][half][(strip + s) * 16]);
  }
  [[gnu::always_inline]] f32x16 offset(std::int64_t group, int half, int s) const {
    return load_f32(&chunk.offsets[group][half][(strip + s) * 16]);
  }
};

// 4 of k of all strips.
template <int kQuad, int kLeft, class Source, class Dots>
[[gnu::always_inline]] static inline void add_quad_of(const Source& source, std::int64_t group, const std::int8_t* q, Dots& dots) {
  u8x64 codes[Source::kStrips];
#pragma GCC unroll 2
  for (int s = 0; s < Source::kStrips; ++s) codes[s] = source.template codes<kQuad>(group, s);
  dots.add(codes, q + kQuad * 4, kLeft);
}

// Adds sums of a group, or of half of it, to the totals: `sum(strip, row)`.
template <int kHalf, int kRows, class Source, class Sum>
[[gnu::always_inline]] static inline void add_scaled(const Source& source, std::int64_t group, const TileGroup& of_rows, const Sum& sum,
                                                     f32x16 (&totals)[Source::kStrips][kRows]) {
#pragma GCC unroll 2
  for (int s = 0; s < Source::kStrips; ++s) {
    const f32x16 scale = source.scale(group, kHalf, s);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
      totals[s][i] = fused_multiply_add(sum(s, i), scale * splat(of_rows.scale[i]), totals[s][i]);
    if constexpr (Source::kHasOffsets) {
      const f32x16 offset = source.offset(group, kHalf, s);
      const float* sums = Source::kSubs == 1 ? of_rows.scaled_sum : of_rows.scaled_half[kHalf];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) totals[s][i] = fused_multiply_add(offset, splat(sums[i]), totals[s][i]);
    }
  }
}

// Sums of products of a group, or of half of it.
template <class Way, int kHalf, int kRows, class Source, int... kQuad>
[[gnu::always_inline]] static inline BlockDots<Way, Source::kStrips, kRows> dots_of_group(const Source& source, std::int64_t group,
                                                                                         const TileGroup& of_rows, const std::int8_t* q,
                                                                                         Numbers<kQuad...>) {
  constexpr int kQuads = sizeof...(kQuad);
  BlockDots<Way, Source::kStrips, kRows> dots(Source::kSubs == 1 ? of_rows.begin : of_rows.begin_half[kHalf], source.bias);
  (add_quad_of<kHalf * kQuads + kQuad, kQuads - 1 - kQuad>(source, group, q, dots), ...);
  return dots;
}

template <class Way, int kHalf, int kRows, class Source, class Quads>
[[gnu::always_inline]] static inline void add_group(const Source& source, std::int64_t group, const TileGroup& of_rows,
                                                    const std::int8_t* q, f32x16 (&totals)[Source::kStrips][kRows], Quads quads) {
  const auto dots = dots_of_group<Way, kHalf, kRows>(source, group, of_rows, q, quads);
  add_scaled<kHalf>(source, group, of_rows, [&](int s, int i) __attribute__((always_inline)) { return dots.sum(s, i); }, totals);
}

// kRows rows times the source's strips from `strip` on. Totals stay in registers between groups if there are enough.
template <class Way, int kRows, class Source>
[[gnu::noinline]] static void multiply_chunk_by_rows(const ChunkOfRows& of, const Source& source, std::int64_t row, int strip) {
  const std::int8_t* left = of.left(row);
  const TileGroup* groups = of.groups(row);
  float* results = of.result(row, strip);
  f32x16 totals[Source::kStrips][kRows];
#pragma GCC unroll 2
  for (int s = 0; s < Source::kStrips; ++s)
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
      totals[s][i] = of.index == 0 ? splat(0.0f) : load_f32(results + s * kResultElements + i * 16);
#pragma GCC unroll 1
  for (std::int64_t group = 0; group < of.num_groups; ++group) {
    const std::int8_t* q = left + group / 2 * kTileBytes + group % 2 * kUnitK;
    source.fetch(group);
    if constexpr (Source::kSubs == 1) {
      add_group<Way, 0>(source, group, groups[group], q, totals, Numbers<0, 1, 2, 3, 4, 5, 6, 7>{});
    } else {
      add_group<Way, 0>(source, group, groups[group], q, totals, Numbers<0, 1, 2, 3>{});
      add_group<Way, 1>(source, group, groups[group], q, totals, Numbers<0, 1, 2, 3>{});
    }
  }
#pragma GCC unroll 2
  for (int s = 0; s < Source::kStrips; ++s)
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) store_f32(results + s * kResultElements + i * 16, totals[s][i]);
}

// At most kMost rows.
template <class Way, int kMost, class Source>
static inline void multiply_chunk_by_some_rows(const ChunkOfRows& of, const Source& source, std::int64_t row, std::int64_t count,
                                               int strip) {
  if constexpr (kMost > 1) {
    if (count < kMost) return multiply_chunk_by_some_rows<Way, kMost - 1>(of, source, row, count, strip);
  }
  multiply_chunk_by_rows<Way, kMost>(of, source, row, strip);
}

// All rows up to `end`, a few at a time, in parts that are as equal as possible.
// `num_lines`: cache lines to prefetch meanwhile, beginning at those of `source`.
template <class Way, class Source>
static inline void multiply_chunk_by_all_rows(const ChunkOfRows& of, Source& source, std::int64_t num_lines, std::int64_t end, int strip) {
  constexpr std::int64_t kMost = kMaxBlockRows<Way, Source::kSubs, Source::kHasOffsets>;
  const std::int64_t num_rows = end - of.first * 16;
  const std::int64_t num_passes = num_rows / 16 * ceil_div(16, kMost) + ceil_div(num_rows % 16, kMost);
  source.ahead.lines = ceil_div(num_lines, num_passes * of.num_groups);
  for (std::int64_t row = of.first * 16; row < end;) {
    const std::int64_t rest = smaller(end, (row / 16 + 1) * 16) - row, count = ceil_div(rest, ceil_div(rest, kMost));
    multiply_chunk_by_some_rows<Way, kMost>(of, source, row, count, strip);
    source.ahead.from = source.ahead.line(of.num_groups * source.ahead.lines);
    row += count;
  }
}

// Many rows times a chunk, which is expanded for them.
static inline void multiply_expanded_chunk(const BlockPanel& panel, const ChunkOfRows& of, std::int64_t end_row, ExpandedChunk& chunk) {
  for (int strip = 0; strip < 2; ++strip)
    with_type(panel.types[strip], [&](auto type) { expand_strip<decltype(type)>(panel, of.index, strip, chunk); });
  const std::int64_t num_lines = panel.bytes_of(of.index) / 64 * kBlockStrips / 2;
  Ahead ahead = {panel.chunk(of.index, 0) + kFarBytes, 0};
  for (int strip = 0; strip < 2; strip += kBlockStrips) {
    const auto multiply = [&](auto way, auto num_subs, auto has_offsets) {
      ExpandedStrips<num_subs.value, has_offsets.value> source = {chunk, strip, bias_of(panel.strips[strip]), ahead};
      multiply_chunk_by_all_rows<decltype(way)>(of, source, num_lines, end_row, strip);
      ahead = source.ahead;
    };
    const auto with_subs = [&](auto way, auto num_subs) {
      panel.has_offsets() ? multiply(way, num_subs, std::true_type{}) : multiply(way, num_subs, std::false_type{});
    };
    with_type(panel.types[strip], [&](auto type) {
      with_way<decltype(type)>([&](auto way) {
        panel.num_subs() == 1 ? with_subs(way, std::integral_constant<int, 1>{}) : with_subs(way, std::integral_constant<int, 2>{});
      });
    });
  }
}

constexpr std::int64_t kFewRowsOfBlocks = 4;  // at most: multiplied by weights as they are stored

// Not where strips differ in what a group adds to totals: many rows' order is then that of both.
static inline bool is_multiplied_as_stored(const BlockPanel& panel, std::int64_t num_rows) {
  return num_rows <= kFewRowsOfBlocks && panel.strips[0].sub == panel.strips[1].sub &&
         panel.strips[0].has_offsets == panel.strips[1].has_offsets;
}

static inline void multiply_expanded_panel(const IntegerProduct& product, const BlockPanel& panel, std::int64_t first, std::int64_t end_row,
                                           float* results) {
  ExpandedChunk chunk;
  for (std::int64_t index = 0; index * kChunkGroups < panel.num_groups; ++index)
    multiply_expanded_chunk(panel, {product, index, panel.groups_of(index), first, results}, end_row, chunk);
}

// Codes of a strip of a chunk as they are stored.
template <class Of>
struct StoredCodes {
  static constexpr int kStrips = 1, kSubs = Of::traits.num_subs();
  static constexpr int bias = stored_bias_of(Of::traits);

  const std::uint8_t* planes;

  template <int kQuad>
  [[gnu::always_inline]] u8x64 codes(std::int64_t group, int) const {
    return biased_codes<Of, bias, kQuad>(planes + group * Of::traits.group_bytes());
  }
};

#if defined(OCTAVO_HAS_AVX2)
#include "block_streams.inc.h"
#else
#include "block_stored.inc.h"
#endif

static IntegerCut cut_product_of_blocks(const IntegerProduct& product, std::int64_t num_wanted) {
  return cut_in_blocks(product, kIntegerRowsOfBlock, pairs_together(product, num_wanted), num_wanted);
}

static void multiply_chunk_of_blocks(const IntegerProduct& product, const IntegerCut& cut, std::int64_t chunk) {
  with_block(product, cut, chunk, [](const IntegerProduct& part, std::int64_t row, std::int64_t end_row, std::int64_t pair,
                                     std::int64_t end_pair, bool streams) {
    const std::int64_t first = row / 16, panel_results = (ceil_div(end_row, 16) - first) * 2 * kResultElements;
    const std::int64_t most = end_row - row <= kFewRowsOfBlocks ? kPairsOfFewRows : 1;
    float* results = static_cast<float*>(thread_scratch().bytes(static_cast<std::size_t>(most * kPair * panel_results * 4)));
    for (; pair < end_pair; pair += most) {
      const std::int64_t end = smaller(end_pair, pair + most), num_panels = part.to.num_panels();
      multiply_panels_of_blocks(part, pair * kPair, smaller(end * kPair, num_panels), first, end_row, results, panel_results);
      for (std::int64_t at = pair; at < end; ++at)
        FinishedIntegers{&part, results + (at - pair) * kPair * panel_results, panel_results, first, at,
                         smaller(kPair, num_panels - at * kPair), streams}.put_rows(row, end_row);
    }
  });
}
