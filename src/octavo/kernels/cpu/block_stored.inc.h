// A few rows times weights in blocks as they are stored, panel by panel. Included from block_product.inc.h.

constexpr std::int64_t kPairsOfFewRows = 1;

static inline std::int64_t pairs_together(const IntegerProduct&, std::int64_t) { return 1; }

// A strip of a chunk.
template <class Of>
struct StoredStrip : StoredCodes<Of> {
  static constexpr bool kHasOffsets = Of::traits.has_offsets;

  ScalesOfStrip<Of> scales;

  StoredStrip(const BlockPanel& panel, std::int64_t index, int strip)
      : StoredCodes<Of>{panel.chunk(index, strip)},
        scales(this->planes + panel.groups_of(index) * Of::traits.group_bytes(), panel.groups_of(index), panel.span) {
    const std::int64_t code_bytes = panel.groups_of(index) * Of::traits.group_bytes();
    const std::int64_t all_bytes = Of::traits.chunk_bytes(panel.groups_of(index), panel.span);
    for (std::int64_t at = code_bytes; at < all_bytes; at += 64) prefetch_line(this->planes + at);
  }
  [[gnu::always_inline]] void fetch(std::int64_t group) const {
#pragma GCC unroll 8
    for (std::int64_t line = 0; line < Of::traits.bits; ++line) prefetch_line(this->planes + group * Of::traits.group_bytes() + line * 64);
  }
  [[gnu::always_inline]] f32x16 scale(std::int64_t group, int half, int) const { return scales.scale(group, half); }
  [[gnu::always_inline]] f32x16 offset(std::int64_t group, int half, int) const { return scales.offset(group, half); }
};

static inline void multiply_stored_panel(const IntegerProduct& product, const BlockPanel& panel, std::int64_t first, std::int64_t end_row,
                                         float* results) {
  const std::int64_t row = first * 16;
  for (std::int64_t index = 0; index * kChunkGroups < panel.num_groups; ++index) {
    const ChunkOfRows of = {product, index, panel.groups_of(index), first, results};
    for (int strip = 0; strip < 2; ++strip)
      with_type(panel.types[strip], [&](auto type) {
        typedef decltype(type) Of;
        const StoredStrip<Of> source(panel, index, strip);
        with_way<Of>([&](auto way) {
          multiply_chunk_by_some_rows<decltype(way), kFewRowsOfBlocks>(of, source, row, end_row - row, strip);
        });
      });
  }
}

// Rows [first row tile * 16, end) times panels [panel, end_panel), whose results are `panel_results` apart.
static inline void multiply_panels_of_blocks(const IntegerProduct& product, std::int64_t panel, std::int64_t end_panel, std::int64_t first,
                                             std::int64_t end_row, float* results, std::int64_t panel_results) {
  for (; panel < end_panel; ++panel, results += panel_results) {
    const BlockPanel of = BlockPanel::of(product.form().blocks, product.form().values, panel, product.in_size);
    const auto multiply = is_multiplied_as_stored(of, end_row - first * 16) ? multiply_stored_panel : multiply_expanded_panel;
    multiply(product, of, first, end_row, results);
  }
}
