// Linear maps. Included inside namespace octavo::OCTAVO_LEVEL. Layouts: ops.h and tiles.inc.h.

constexpr std::int64_t kPanelOutputs = 32;

static inline void pack_panel(const PackArgs& args, std::int64_t panel) {
  const std::int64_t num_k = ceil_div(args.in_size, 32);
  bf16* to = args.packed + panel * num_k * 2 * kTileElements;
  for (std::int64_t k = 0; k < num_k; ++k) {
    for (std::int64_t tile = 0; tile < 2; ++tile, to += kTileElements) {
      for (std::int64_t column = 0; column < 16; ++column) {
        // A gated panel: 16 gates, then the ups that belong to them.
        const std::int64_t output = args.is_gated ? panel * 16 + column : (panel * 2 + tile) * 16 + column;
        const std::int64_t row = args.is_gated && tile == 1 ? args.out_size + output : output;
        const bf16* from = args.weight + row * args.in_size + k * 32;
        const std::int64_t count = output < args.out_size ? smaller(32, args.in_size - k * 32) : 0;
        for (std::int64_t i = 0; i < 32; ++i) to[(i / 2) * 32 + column * 2 + i % 2] = i < count ? from[i] : bf16{0};
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

// 16 rows of x as left tiles [num_k][16][32]; rows and inputs that are not there are zeros.
static inline void pack_rows(const LinearArgs& args, std::int64_t row_tile, bf16* to) {
  const std::int64_t num_k = ceil_div(args.in_size, 32);
  for (std::int64_t row = 0; row < 16; ++row) {
    const bf16* from = args.x + (row_tile * 16 + row) * args.in_size;
    const std::int64_t in_size = row_tile * 16 + row < args.rows ? args.in_size : 0;
    const std::int64_t num_whole = in_size / 32;
    for (std::int64_t k = 0; k < num_whole; ++k) __builtin_memcpy(to + k * kTileElements + row * 32, from + k * 32, 64);
    for (std::int64_t k = num_whole; k < num_k; ++k) {
      const std::int64_t count = larger(0, smaller(32, in_size - k * 32));
      bf16* part = to + k * kTileElements + row * 32;
      __builtin_memset(part, 0, 64);
      __builtin_memcpy(part, from + k * 32, static_cast<std::size_t>(count) * sizeof(bf16));
    }
  }
}

// Two result tiles of one row tile, [2][16][16], to where they belong in the output.
static inline void store_panel(const LinearArgs& args, std::int64_t row_tile, std::int64_t panel, const float* result) {
  const std::int64_t num_rows = smaller(16, args.rows - row_tile * 16);
  const f32x16 bias0 = args.bias ? load_f32(args.bias + panel * 32) : splat(0.0f);
  const f32x16 bias1 = args.bias ? load_f32(args.bias + panel * 32 + 16) : splat(0.0f);
  const std::int64_t width = args.output == Output::gated ? 16 : 32;
  const std::int64_t column = panel * width, count = smaller(width, args.out_size - column);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    f32x16 first = load_f32(result + row * 16), second = load_f32(result + kResultElements + row * 16);
    if (args.bias) first += bias0, second += bias1;
    const std::int64_t offset = (row_tile * 16 + row) * args.out_size + column;
    if (args.output == Output::float32) {
      float lanes[32];
      store_f32(lanes, first);
      store_f32(lanes + 16, second);
      __builtin_memcpy(static_cast<float*>(args.out) + offset, lanes, static_cast<std::size_t>(count) * sizeof(float));
      continue;
    }
    bf16* out = static_cast<bf16*>(args.out) + offset;
    if (args.output == Output::gated) {
      // Rounded where a separate op would have read them rounded.
      store_bf16_part(out, silu(widen(narrow(first))) * widen(narrow(second)), count);
    } else if (count == 32) {
      store_bf16(out, first);
      store_bf16(out + 16, second);
    } else {
      store_bf16_part(out, first, smaller(16, count));
      if (count > 16) store_bf16_part(out + 16, second, count - 16);
    }
  }
}

// Rows taken together: their left tiles stay in the second-level cache while the weights pass by once.
static inline std::int64_t row_tiles_at_once(std::int64_t num_row_tiles, std::int64_t num_k) {
  const std::int64_t fitting = larger(2, kLeftCacheBytes / (num_k * kTileElements * 2) / 2 * 2);
  const std::int64_t num_blocks = ceil_div(num_row_tiles, fitting);
  return (ceil_div(num_row_tiles, num_blocks) + 1) / 2 * 2;
}

static void linear(const LinearArgs& args, Pool& pool) {
  if (args.rows == 0) return;
  const std::int64_t num_k = ceil_div(args.in_size, 32), num_row_tiles = ceil_div(args.rows, 16);
  const std::int64_t num_panels = ceil_div(args.out_size, args.output == Output::gated ? 16 : kPanelOutputs);
  bf16* left = static_cast<bf16*>(pool.scratch().bytes(num_row_tiles * num_k * kTileElements * sizeof(bf16)));
  pool.run(num_row_tiles, [&](std::int64_t tile) { pack_rows(args, tile, left + tile * num_k * kTileElements); });

  const std::int64_t block = row_tiles_at_once(num_row_tiles, num_k), num_blocks = ceil_div(num_row_tiles, block);
  // Enough chunks that no thread waits long for another, and few enough that claiming them costs nothing.
  const std::int64_t group = larger(1, num_panels / (pool.num_threads() * kChunksPerThread));
  const std::int64_t num_groups = ceil_div(num_panels, group);
  const std::int64_t rows_of_tile = smaller(16, args.rows);
  pool.run(num_blocks * num_groups, [&](std::int64_t chunk) {
    const std::int64_t first_tile = chunk / num_groups * block, end_tile = smaller(num_row_tiles, first_tile + block);
    const std::int64_t first_panel = chunk % num_groups * group, end_panel = smaller(num_panels, first_panel + group);
    alignas(64) float result[4 * kResultElements];
    begin_tiles(rows_of_tile);
    for (std::int64_t panel = first_panel; panel < end_panel; ++panel) {
      const bf16* right = args.weight + panel * num_k * 2 * kTileElements;
      std::int64_t tile = first_tile;
      for (; tile + 1 < end_tile; tile += 2) {
        const bf16* left0 = left + tile * num_k * kTileElements;
        multiply_2x2(result, left0, left0 + num_k * kTileElements, right, num_k, false);
        store_panel(args, tile, panel, result);
        store_panel(args, tile + 1, panel, result + 2 * kResultElements);
      }
      if (tile < end_tile) {
        multiply_1x2(result, left + tile * num_k * kTileElements, right, num_k, false, rows_of_tile);
        store_panel(args, tile, panel, result);
      }
    }
    end_tiles();
  });
}
