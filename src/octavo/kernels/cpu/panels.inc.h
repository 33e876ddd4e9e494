// Packs weights into panels and rows into tiles. Included inside namespace octavo::OCTAVO_LEVEL. Layouts: ops.h and
// tiles.inc.h.

constexpr std::int64_t kPanelOutputs = 32;
constexpr std::int64_t kInputsAhead = 256;  // prefetched while a panel is packed: its rows are too many streams for the hardware

// 32 inputs of an output, `count` of them there, into its column of a tile: neighbors that a tile keeps together are one store.
static inline void put_inputs(const Element* from, std::int64_t count, Element* column) {
  Element padded[32] = {};
  if (count < 32) __builtin_memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(Element)), from = padded;
  const std::int64_t together = right_index(0, 0, 1) == 1 ? 2 : 1;
  for (std::int64_t i = 0; i < 32; i += together)
    __builtin_memcpy(column + right_index(0, 0, i), from + i, static_cast<std::size_t>(together) * sizeof(Element));
}

static inline void pack_panel(const PackArgs& args, std::int64_t panel) {
  const std::int64_t num_k = ceil_div(args.in_size, 32);
  Element* to = static_cast<Element*>(args.packed) + panel * num_k * 2 * kTileElements;
  for (std::int64_t k = 0; k < num_k; ++k, to += 2 * kTileElements) {
    for (std::int64_t tile = 0; tile < 2; ++tile) {
      for (std::int64_t column = 0; column < 16; ++column) {
        // A gated panel: 16 gates, then their ups.
        const std::int64_t output = args.is_gated ? panel * 16 + column : (panel * 2 + tile) * 16 + column;
        const std::int64_t row = args.is_gated && tile == 1 ? args.out_size + output : output;
        const Element* from = static_cast<const Element*>(args.weight) + row * args.in_size + k * 32;
        const std::int64_t count = output < args.out_size ? smaller(32, args.in_size - k * 32) : 0;
        __builtin_prefetch(from + kInputsAhead);
        put_inputs(from, count, to + right_index(tile, column, 0));
      }
    }
  }
}

static void pack_linear(const PackArgs& args, Pool& pool) {
  const std::int64_t num_panels = ceil_div(args.out_size, args.is_gated ? 16 : kPanelOutputs);
  const std::int64_t group = ceil_div(num_panels, 1024);
  pool.run(ceil_div(num_panels, group), [&](std::int64_t chunk) {
    for (std::int64_t panel = chunk * group; panel < smaller(num_panels, (chunk + 1) * group); ++panel)
      pack_panel(args, panel);
  });
}

// Packs all rows as left tiles [row tiles][num_k][16][32], normalized if `rows` says so. Padding rows are zeros where
// products read them.
static void pack_rows(const RowsArgs& args, LeftElement* left, Pool& pool) {
  const InPhase phase(pool.phases(), Phase::rows);
  const std::int64_t num_k = ceil_div(args.size, 32);
  pool.run(ceil_div(args.rows, 16), [&](std::int64_t tile) {
    void* memory = args.fused.norm_weight ? thread_scratch().bytes(args.size * sizeof(Element)) : nullptr;
    Element* normalized = static_cast<Element*>(memory);
    for (std::int64_t line = 0; line < (kReadsWholeTiles ? 16 : smaller(16, args.rows - tile * 16)); ++line) {
      const std::int64_t row = tile * 16 + line;
      const Element* from = static_cast<const Element*>(args.x) + row * args.size;
      if (normalized && row < args.rows) normalize_row(args, row, normalized), from = normalized;
      pack_row(from, row < args.rows ? args.size : 0, num_k, left + tile * num_k * kTileElements + line * 32);
    }
  });
}
