// A few rows times weights in blocks as they are stored, some panels side by side. Included from block_product.inc.h, at the
// levels of AVX2.
//
// Every panel is a stream of its own, read from its first byte to its last: processors read ahead by themselves along each
// stream, and further along four than along one. Prefetches would take the places of those requests. Scales lie behind the
// codes of a chunk, so the sums of its groups wait for them in the first-level cache.

constexpr int kStreams = 4;
constexpr std::int64_t kPairsOfFewRows = kStreams;  // of panels, whose halves are streams one after the other

// How many pairs of panels a chunk of a product is a multiple of: as many as let each thread have a few chunks.
static inline std::int64_t pairs_together(const IntegerProduct& product, std::int64_t num_wanted) {
  const std::int64_t num_pairs = ceil_div(product.to.num_panels(), kPair);
  std::int64_t together = product.num_rows <= kFewRowsOfBlocks ? kPairsOfFewRows : 1;
  while (together > 1 && num_pairs < together * (num_wanted / 2)) together /= 2;
  return together;
}

struct BlockStream {
  const std::uint8_t* next;  // the panel's next strip of a chunk
  float* results;
};

// Scales of a strip of a chunk, for sums of kRows rows.
template <class Of>
struct StoredScales {
  static constexpr int kStrips = 1, kSubs = Of::traits.num_subs();
  static constexpr bool kHasOffsets = Of::traits.has_offsets;

  ScalesOfStrip<Of> scales;

  [[gnu::always_inline]] f32x16 scale(std::int64_t group, int half, int) const { return scales.scale(group, half); }
  [[gnu::always_inline]] f32x16 offset(std::int64_t group, int half, int) const { return scales.offset(group, half); }
};

// Where codes have several planes, their lines are not read in order, and processors do not take them for a stream: the lines
// of the next group are fetched in order. So they are where the products of a group take longer than a processor looks ahead.
template <class Of, int kRows>
[[gnu::always_inline]] static inline void fetch_next_group(const std::uint8_t* group) {
  constexpr std::int64_t kBits = Of::traits.bits, kBytes = Of::traits.group_bytes();
  if constexpr (kRows == 1 && (kBits & (kBits - 1)) == 0) return;
#pragma GCC unroll 8
  for (std::int64_t at = kBytes; at < 2 * kBytes; at += 64) __builtin_prefetch(group + at);
}

// The next strip of up to kStreams panels of one type.
template <class Of, class Way, int kRows>
[[gnu::noinline]] static void multiply_strips(const ChunkOfRows& of, std::int64_t span, BlockStream* streams, int count, int strip) {
  constexpr int kSubs = Of::traits.num_subs();
  alignas(64) float sums[kStreams][kChunkGroups][kSubs][kRows][16];
  const std::int64_t row = of.first * 16;
  const std::int8_t* left = of.left(row);
  const TileGroup* groups = of.groups(row);
#pragma GCC unroll 1
  for (std::int64_t group = 0; group < of.num_groups; ++group) {
    const std::int8_t* q = left + group / 2 * kTileBytes + group % 2 * kUnitK;
#pragma GCC unroll 1
    for (int s = 0; s < count; ++s) {
      if constexpr (kRows > 2) asm("" : "+r"(q));  // GCC 12 would broadcast all of q once, and keep them in memory
      const StoredCodes<Of> codes = {streams[s].next};
      fetch_next_group<Of, kRows>(codes.planes + group * Of::traits.group_bytes());
      const auto put = [&](const auto& dots, int half) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) store_f32(sums[s][group][half][i], dots.sum(0, i));
      };
      if constexpr (kSubs == 1) {
        put(dots_of_group<Way, 0, kRows>(codes, group, groups[group], q, Numbers<0, 1, 2, 3, 4, 5, 6, 7>{}), 0);
      } else {
        put(dots_of_group<Way, 0, kRows>(codes, group, groups[group], q, Numbers<0, 1, 2, 3>{}), 0);
        put(dots_of_group<Way, 1, kRows>(codes, group, groups[group], q, Numbers<0, 1, 2, 3>{}), 1);
      }
    }
  }
  const std::int64_t strip_bytes = Of::traits.chunk_bytes(of.num_groups, span);
#pragma GCC unroll 1
  for (int s = 0; s < count; ++s) {
    const StoredScales<Of> scales = {{streams[s].next + of.num_groups * Of::traits.group_bytes(), of.num_groups, span}};
    streams[s].next += strip_bytes;
    float* results = streams[s].results + strip * kResultElements;
    f32x16 totals[1][kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) totals[0][i] = of.index == 0 ? splat(0.0f) : load_f32(results + i * 16);
#pragma GCC unroll 1
    for (std::int64_t group = 0; group < of.num_groups; ++group) {
      const auto sum = [&](int half) {
        return [&sums, s, group, half](int, int i) __attribute__((always_inline)) { return load_f32(sums[s][group][half][i]); };
      };
      add_scaled<0>(scales, group, groups[group], sum(0), totals);
      if constexpr (kSubs == 2) add_scaled<1>(scales, group, groups[group], sum(1), totals);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) store_f32(results + i * 16, totals[0][i]);
  }
}

// `num_rows`: at most kMost.
template <class Of, class Way, int kMost>
static inline void multiply_strips_by_few_rows(const ChunkOfRows& of, std::int64_t num_rows, std::int64_t span, BlockStream* streams,
                                               int count, int strip) {
  if constexpr (kMost > 1) {
    if (num_rows < kMost) return multiply_strips_by_few_rows<Of, Way, kMost - 1>(of, num_rows, span, streams, count, strip);
  }
  multiply_strips<Of, Way, kMost>(of, span, streams, count, strip);
}

// Panels of the types of `like`.
static inline void multiply_streams(const IntegerProduct& product, const BlockPanel& like, BlockStream* streams, int count,
                                    std::int64_t first, std::int64_t end_row) {
  for (std::int64_t index = 0; index * kChunkGroups < like.num_groups; ++index) {
    const ChunkOfRows of = {product, index, like.groups_of(index), first, nullptr};
    for (int strip = 0; strip < 2; ++strip)
      with_type(like.types[strip], [&](auto type) {
        typedef decltype(type) Of;
        with_way<Of>([&](auto way) {
          multiply_strips_by_few_rows<Of, decltype(way), kFewRowsOfBlocks>(of, end_row - first * 16, like.span, streams, count, strip);
        });
      });
  }
}

// Rows [first row tile * 16, end) times panels [panel, end_panel), whose results are `panel_results` apart.
static inline void multiply_panels_of_blocks(const IntegerProduct& product, std::int64_t panel, std::int64_t end_panel, std::int64_t first,
                                             std::int64_t end_row, float* results, std::int64_t panel_results) {
  BlockPanel like = {};
  BlockStream streams[kStreams];
  int count = 0;
  const auto flush = [&] {
    if (count > 0) multiply_streams(product, like, streams, count, first, end_row);
    count = 0;
  };
  // The first panels of all pairs, then the second ones: each pair is a stream.
  for (std::int64_t of_pair = 0; of_pair < kPair; ++of_pair)
    for (std::int64_t at = panel + of_pair; at < end_panel; at += kPair) {
      const BlockPanel of = BlockPanel::of(product.form().blocks, product.form().values, at, product.in_size);
      float* to = results + (at - panel) * panel_results;
      if (!is_multiplied_as_stored(of, end_row - first * 16)) {
        multiply_expanded_panel(product, of, first, end_row, to);
        continue;
      }
      if (count == kStreams || of.types[0] != like.types[0] || of.types[1] != like.types[1]) flush();
      streams[count++] = {of.data, to}, like = of;
    }
  flush();
}
