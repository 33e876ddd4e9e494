// Linear maps. Included inside namespace octavo::OCTAVO_LEVEL. Layouts: ops.h and tiles.inc.h.

constexpr std::int64_t kPanelOutputs = 32;

static inline void pack_panel(const PackArgs& args, std::int64_t panel) {
  const std::int64_t num_k = ceil_div(args.in_size, 32);
  Element* to = static_cast<Element*>(args.packed) + panel * num_k * 2 * kTileElements;
  for (std::int64_t k = 0; k < num_k; ++k, to += 2 * kTileElements) {
    for (std::int64_t tile = 0; tile < 2; ++tile) {
      for (std::int64_t column = 0; column < 16; ++column) {
        // A gated panel: 16 gates, then the ups that belong to them.
        const std::int64_t output = args.is_gated ? panel * 16 + column : (panel * 2 + tile) * 16 + column;
        const std::int64_t row = args.is_gated && tile == 1 ? args.out_size + output : output;
        const Element* from = static_cast<const Element*>(args.weight) + row * args.in_size + k * 32;
        const std::int64_t count = output < args.out_size ? smaller(32, args.in_size - k * 32) : 0;
        for (std::int64_t i = 0; i < 32; ++i) to[right_index(tile, column, i)] = i < count ? from[i] : Element{0};
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

// All rows as left tiles [row tiles][num_k][16][32], normalised where that is asked for. Rows that are not there are
// zeros where products read them.
static void pack_rows(const RowsArgs& args, LeftElement* left, Pool& pool) {
  const std::int64_t num_k = ceil_div(args.size, 32);
  pool.run(ceil_div(args.rows, 16), [&](std::int64_t tile) {
    void* memory = args.norm_weight ? thread_scratch().bytes(args.size * sizeof(Element)) : nullptr;
    Element* normalised = static_cast<Element*>(memory);
    for (std::int64_t line = 0; line < (kReadsWholeTiles ? 16 : smaller(16, args.rows - tile * 16)); ++line) {
      const std::int64_t row = tile * 16 + line;
      const Element* from = static_cast<const Element*>(args.x) + row * args.size;
      if (normalised && row < args.rows) normalise_row(args, row, normalised), from = normalised;
      pack_row(from, row < args.rows ? args.size : 0, num_k, left + tile * num_k * kTileElements + line * 32);
    }
  });
}

// Where a map's results go.
struct Destination {
  Output output;
  std::int64_t out_size;  // N
  void* out;              // [T, N]; or, gated:
  LeftElement* out_left;  // left tiles of the next map [row tiles][ceil(N / 32)][16][32], in place of `out`
  Leader* leaders = nullptr;  // [T], which meet all results in place of that; a chunk's own

  std::int64_t outputs_per_panel() const { return output == Output::gated ? 16 : 32; }
  std::int64_t num_panels() const { return ceil_div(out_size, outputs_per_panel()); }
  LeftElement* left_line(std::int64_t row, std::int64_t line) const {
    return out_left + (row / 16 * ceil_div(out_size, 32) + line) * kTileElements + row % 16 * 32;
  }
};

// One map, its rows packed already.
struct Product {
  const LeftElement* left;  // [row tiles][num_k][16][32]
  std::int64_t rows, num_k;
  PackedWeight packed;
  Destination to;

  std::int64_t num_row_tiles() const { return ceil_div(rows, 16); }
};

// Panels are computed in pairs, so that results of 16 bits fill whole cache lines.
constexpr std::int64_t kPair = 2;

#if defined(OCTAVO_FLOAT32)
#include "float32_store.inc.h"
#else

// One row's results of a pair of panels [2][2][16], biases added: to where they belong in the output.
[[gnu::always_inline]] static inline void store_row(const Destination& to, std::int64_t row, std::int64_t pair, const f32x16* values,
                             bool streams) {
  const std::int64_t width = to.outputs_per_panel() * kPair, column = pair * width;
  const std::int64_t count = smaller(width, to.out_size - column);
  if (to.output == Output::float32) {
    float* out = static_cast<float*>(to.out) + row * to.out_size + column;
    if (streams && count == 64 && reinterpret_cast<std::uintptr_t>(out) % 64 == 0) {
      for (int i = 0; i < 4; ++i) stream_line(out + i * 16, (u16x32)values[i]);
      return;
    }
    alignas(64) float lanes[64];
    for (int i = 0; i < 4; ++i) store_f32(lanes + i * 16, values[i]);
    __builtin_memcpy(out, lanes, static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  u16x32 lines[2];
  if (to.output == Output::gated) {
    // Rounded where a separate op would have read them rounded.
    lines[0] = narrow_both(silu(rounded(values[0])) * rounded(values[1]), silu(rounded(values[2])) * rounded(values[3]));
  } else {
    lines[0] = narrow_both(values[0], values[1]), lines[1] = narrow_both(values[2], values[3]);
  }
#if defined(OCTAVO_WIDENS_BF16)
  if (to.out_left) return put_left(to.left_line(row, pair), reinterpret_cast<const bf16*>(lines));
#endif
  bf16* out = to.out_left
                  ? reinterpret_cast<bf16*>(to.left_line(row, pair))
                  : static_cast<bf16*>(to.out) + row * to.out_size + column;
  if (streams && count == width && reinterpret_cast<std::uintptr_t>(out) % 64 == 0) {
    for (std::int64_t i = 0; i < width; i += 32) stream_line(out + i, lines[i / 32]);
  } else if (count == width || to.out_left) {
    for (std::int64_t i = 0; i < width; i += 32) store(out + i, lines[i / 32]);
  } else {
    __builtin_memcpy(out, lines, static_cast<std::size_t>(count) * sizeof(bf16));
  }
}

#endif

// One row's results of a pair of panels, to where they belong.
[[gnu::always_inline]] static inline void put_results(const Destination& to, std::int64_t row, std::int64_t pair,
                                                      const f32x16* values, bool streams) {
  to.leaders ? to.leaders[row].meet(values, pair * 64, to.out_size) : store_row(to, row, pair, values, streams);
}

// Rows whose sums are complete, on their way to the output. They go one by one between the products of the next panels, so
// that vectors and matrix tiles work at the same time.
template <class Panels>
struct Finish {
  Panels of;
  std::int64_t row = 0, end = 0;
  std::int64_t num_steps = 0;  // until they should be gone
  std::int64_t credit = 0;

  void do_all() {
    while (row < end) of.put_row(row++);
  }
  // One step's share.
  void do_some(std::int64_t num_rows) {
    for (credit += num_rows; credit >= num_steps && row < end; credit -= num_steps) of.put_row(row++);
  }
};

// Results of a pair of panels, or of the one that is left.
struct FinishedPanels {
  const Product* product;
  const float* results;  // [2][row tiles first ...][2][16][16]
  std::int64_t panel_results, first, panel, num_panels;
  bool streams;

  void put_row(std::int64_t row) const {
    const float* of_row = results + (row / 16 - first) * 2 * kResultElements + row % 16 * 16;
    const float* bias = product->packed.bias;
    f32x16 values[4] = {};
    const auto take_panel = [&](std::int64_t i) {
      values[i * 2] = load_f32(of_row + i * panel_results);
      values[i * 2 + 1] = load_f32(of_row + i * panel_results + kResultElements);
      if (!bias) return;
      values[i * 2] += load_f32(bias + panel * 32 + i * 32);
      values[i * 2 + 1] += load_f32(bias + panel * 32 + i * 32 + 16);
    };
    take_panel(0);  // not in a loop of any number, which would keep them in memory
    if (num_panels == kPair) take_panel(1);
    put_results(product->to, row, panel / kPair, values, streams);
  }
};

// What goes on beside a product: rows that are finished, and memory that will be wanted.
struct Beside {
  Finish<FinishedPanels>& finish;
  std::int64_t num_rows;
  Ahead ahead;

  void beside(std::int64_t k) {
    ahead.fetch(k);
    finish.do_some(num_rows);
  }
};

// How a product is cut so that its operands come from caches: row tiles and panels that are computed together, and the
// k tiles that they take at a time. Per panel those k tiles stay in the first-level cache for all the rows; the rows'
// tiles stay in the second-level cache for all the panels.
struct Blocking {
  std::int64_t row_tiles, panels, num_k;
};

static inline Blocking choose_blocking(std::int64_t rows, std::int64_t num_k) {
  const std::int64_t num_row_tiles = ceil_div(rows, 16);
  // Few rows: memory decides. The first product of a panel streams its weights, the others find them in a cache.
  if (rows <= kFewRows) return {larger(2, num_row_tiles), kPair, num_k};
  const std::int64_t num_blocks = ceil_div(num_row_tiles, kMostRowTiles);
  const std::int64_t row_tiles = ceil_div(ceil_div(num_row_tiles, num_blocks), 2) * 2;
  // Where the rows' tiles of all k fit, they stay while pair after pair of panels passes by. Where they do not, those of
  // a block of k are used for many panels, whose sums wait meanwhile.
  const bool fits = row_tiles * num_k * kTileElements * std::int64_t{sizeof(LeftElement)} <= kLeftCacheBytes;
  return {row_tiles, fits ? kPair : kMostPanels, kTilesOfK};
}

// Some row tiles of a product, in the hands of one thread.
struct ProductRows {
  const Product& product;
  const Blocking& blocking;
  std::int64_t first, end;  // row tiles
  bool streams;
  float* results;  // of `blocking.panels` panels, twice where these are a pair: one pair finishes beside the next one
  Finish<FinishedPanels> finish = {};

  std::int64_t num_tiles() const { return end - first; }
  std::int64_t stride() const { return product.num_k * kTileElements; }
  std::int64_t panel_results() const { return num_tiles() * 2 * kResultElements; }
  std::int64_t num_rows() const { return smaller(product.rows, end * 16) - first * 16; }

  // From weights to output, but for the last rows, which are left to `finish`.
  void multiply(std::int64_t panel, std::int64_t num_panels) {
    const Element* right = static_cast<const Element*>(product.packed.weight) + panel * 2 * stride();
    const bool are_a_pair = blocking.panels == kPair;
    float* to = results + (are_a_pair ? panel / kPair % 2 * kPair * panel_results() : 0);
    for (std::int64_t k = 0; k < product.num_k; k += blocking.num_k) {
      const std::int64_t count = smaller(blocking.num_k, product.num_k - k);
      const bool is_last_k = k + count == product.num_k;
      for (std::int64_t i = 0; i < num_panels; ++i) {
        const Element* right_now = right + i * 2 * stride() + k * 2 * kTileElements;
        const Element* right_next = i + 1 < num_panels ? right_now + 2 * stride()
                                    : is_last_k        ? right + num_panels * 2 * stride()
                                                       : right + (k + count) * 2 * kTileElements;
        multiply_panel(k, count, right_now, right_next, to + i * panel_results());
        if (is_last_k && (i % kPair == kPair - 1 || i + 1 == num_panels)) {
          const std::int64_t pair = i / kPair * kPair;
          finish.do_all();
          finish = {{&product, to + pair * panel_results(), panel_results(), first, panel + pair, i + 1 - pair, streams},
                    first * 16, first * 16 + num_rows(), kPair * ceil_div(num_tiles(), 2) * (are_a_pair ? product.num_k : count)};
        }
      }
    }
  }

 private:
  // The sums of one panel over `count` k tiles.
  void multiply_panel(std::int64_t k, std::int64_t count, const Element* right, const Element* right_next, float* result) {
    const bool streams_weights = num_rows() <= kFewRows;
    // Each product fetches its share of what the next block of k needs; a streaming one, what itself needs next.
    constexpr std::int64_t kLinesOfK = 2 * kTileElements * sizeof(Element) / 64;
    Ahead ahead = {right_next, ceil_div(kLinesOfK, ceil_div(num_tiles(), 2))};
    if (streams_weights) ahead = {right + kPrefetchElements, kLinesOfK};
    for (std::int64_t tile = 0; tile < num_tiles(); tile += 2, result += 4 * kResultElements) {
      const LeftElement* left = product.left + (first + tile) * stride() + k * kTileElements;
#if defined(OCTAVO_HAS_AMX)
      Beside beside = {finish, num_rows(), ahead};
      if (tile + 1 < num_tiles()) {
        multiply_2x2(result, left, left + stride(), right, count, k > 0, beside);
      } else {
        multiply_1x2(result, left, right, count, k > 0, smaller(16, product.rows - (first + tile) * 16), beside);
      }
#else
      const std::int64_t rows = smaller(num_rows() - tile * 16, 32);
      multiply_tiles(result, left, stride(), rows, right, count, k > 0, ahead);
#endif
      ahead = streams_weights ? Ahead{} : Ahead{ahead.line(count * ahead.lines), ahead.lines};
    }
  }
};

// How a product is cut into chunks, each of which any thread may take.
struct Cut {
  Blocking blocking;
  std::int64_t group, num_groups;  // panels of a chunk, and how many such groups there are
  std::int64_t num_chunks;
  bool streams;
};

// About `num_wanted` chunks for each block of rows: enough that no thread waits long for another, and few enough that
// claiming them costs nothing.
static inline Cut cut_product(const Product& product, std::int64_t num_wanted) {
  const std::int64_t num_panels = product.to.num_panels();
  const Blocking blocking = choose_blocking(product.rows, product.num_k);
  const std::int64_t group = larger(1, ceil_div(num_panels, blocking.panels) / num_wanted) * blocking.panels;
  const std::int64_t num_groups = ceil_div(num_panels, group);
  const bool streams = product.to.out_left == nullptr && product.rows * product.to.out_size * std::int64_t{sizeof(Element)} >= kStreamedBytes;
  return {blocking, group, num_groups, ceil_div(product.num_row_tiles(), blocking.row_tiles) * num_groups, streams};
}

static inline void multiply_chunk(Product product, const Cut& cut, std::int64_t chunk) {
  if (product.to.leaders) product.to.leaders += chunk % cut.num_groups * product.rows;
  const Blocking& blocking = cut.blocking;
  const std::int64_t first = chunk / cut.num_groups * blocking.row_tiles;
  const std::int64_t end = smaller(product.num_row_tiles(), first + blocking.row_tiles);
  const std::int64_t first_panel = chunk % cut.num_groups * cut.group;
  const std::int64_t end_panel = smaller(product.to.num_panels(), first_panel + cut.group);
  const std::int64_t num_results = larger(blocking.panels, 2 * kPair) * (end - first) * 2 * kResultElements;
  float* results = static_cast<float*>(thread_scratch().bytes(num_results * sizeof(float)));
  ProductRows rows = {product, blocking, first, end, cut.streams, results};
  begin_tiles(smaller(16, product.rows));
  for (std::int64_t panel = first_panel; panel < end_panel; panel += blocking.panels)
    rows.multiply(panel, smaller(blocking.panels, end_panel - panel));
  rows.finish.do_all();
  end_tiles();
  if (cut.streams) end_stream();
}

static void multiply(const Product& product, Pool& pool) {
  const Cut cut = cut_product(product, pool.num_threads() * kChunksPerThread);
  pool.run(cut.num_chunks, [&](std::int64_t chunk) { multiply_chunk(product, cut, chunk); });
}

static inline std::int64_t left_elements(std::int64_t rows, std::int64_t size) {
  return ceil_div(rows, 16) * ceil_div(size, 32) * kTileElements;
}

static void linear(const LinearArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  LeftElement* left = static_cast<LeftElement*>(pool.scratch().bytes(left_elements(rows.rows, rows.size) * sizeof(LeftElement)));
  pack_rows(rows, left, pool);
  multiply({left, rows.rows, ceil_div(rows.size, 32), args.packed, {args.output, args.packed.out_size, args.out, nullptr}}, pool);
}

// Leaders of all rows, for as many groups of panels as a product may be cut into: what chunks have found is joined.
static inline std::int64_t most_groups(const Pool& pool) { return 2 * pool.num_threads() * kChunksPerThread; }

static inline void begin_leaders(Leader* leaders, std::int64_t rows, const Pool& pool) {
  for (std::int64_t i = 0; i < most_groups(pool) * rows; ++i) leaders[i] = Leader();
}

static inline void join_leaders(const Leader* leaders, std::int64_t rows, const Pool& pool, Largest* out) {
  for (std::int64_t row = 0; row < rows; ++row) {
    out[row] = leaders[row].largest();
    for (std::int64_t group = 1; group < most_groups(pool); ++group) {
      const Largest other = leaders[group * rows + row].largest();
      if (leads(other, out[row])) out[row] = other;
    }
  }
}

static void largest(const LargestArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const std::int64_t left_bytes = left_elements(rows.rows, rows.size) * sizeof(LeftElement);
  char* memory = static_cast<char*>(pool.scratch().bytes(left_bytes + most_groups(pool) * rows.rows * sizeof(Leader)));
  LeftElement* left = reinterpret_cast<LeftElement*>(memory);
  Leader* leaders = reinterpret_cast<Leader*>(memory + left_bytes);
  begin_leaders(leaders, rows.rows, pool);
  pack_rows(rows, left, pool);
  const Destination to = {Output::float32, args.packed.out_size, nullptr, nullptr, leaders};
  multiply({left, rows.rows, ceil_div(rows.size, 32), args.packed, to}, pool);
  join_leaders(leaders, rows.rows, pool, args.out);
}

// down(silu(gate(x)) * up(x)). What lies between the two maps never leaves the layout of tiles.
static void mlp(const MlpArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const std::int64_t middle_size = args.gate_up.out_size, size = left_elements(rows.rows, rows.size);
  const std::int64_t num_elements = size + left_elements(rows.rows, middle_size);
  LeftElement* left = static_cast<LeftElement*>(pool.scratch().bytes(num_elements * sizeof(LeftElement)));
  LeftElement* middle = left + size;
  pack_rows(rows, left, pool);
  multiply({left, rows.rows, ceil_div(rows.size, 32), args.gate_up, {Output::gated, middle_size, nullptr, middle}}, pool);
  multiply({middle, rows.rows, ceil_div(middle_size, 32), args.down, {Output::plain, args.down.out_size, args.out, nullptr}}, pool);
}
