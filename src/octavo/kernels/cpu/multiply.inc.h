// A blocked product: operands come from caches. Included inside namespace octavo::OCTAVO_LEVEL.

// Work interleaved with a product: epilogues of finished rows, and prefetches.
struct Alongside {
  Finish<FinishedPanels>& finish;
  std::int64_t num_rows;
  Ahead ahead;

  void alongside(std::int64_t k) {
    ahead.fetch(k);
    finish.do_some(num_rows);
  }
};

// Whether products call `Alongside`. Elsewhere the next panels would overwrite results that wait for their epilogue.
#if defined(OCTAVO_HAS_AMX)
constexpr bool kFinishesAlongside = true;
#else
constexpr bool kFinishesAlongside = false;
#endif

// Blocking: row tiles and panels computed together, and the k tiles taken at a time. A panel's k tiles stay in L1 for
// all the rows; the rows' tiles stay in L2 for all the panels.
struct Blocking {
  std::int64_t row_tiles, panels, num_k;
};

static inline Blocking choose_blocking(std::int64_t rows, std::int64_t num_k) {
  const std::int64_t num_row_tiles = ceil_div(rows, 16);
  // Few rows: memory-bound. The first product of a panel streams its weights, the others find them in a cache.
  if (rows <= kFewRows) return {larger(2, num_row_tiles), kPair, num_k};
  const std::int64_t num_blocks = ceil_div(num_row_tiles, kMaxRowTiles);
  const std::int64_t row_tiles = ceil_div(ceil_div(num_row_tiles, num_blocks), 2) * 2;
  // If the rows' tiles fit for all k, they stay while one pair of panels after another passes. If not, those of one
  // block of k are used for many panels, whose partial sums wait meanwhile.
  const bool fits = row_tiles * num_k * kTileElements * std::int64_t{sizeof(LeftElement)} <= kLeftCacheBytes;
  return {row_tiles, fits ? kPair : kMaxPanels, kTilesOfK};
}

// Some row tiles of a product, computed by one thread.
struct ProductRows {
  const Product& product;
  const Blocking& blocking;
  std::int64_t first, end;  // row tiles
  bool streams;
  float* results;  // of `blocking.panels` panels, doubled for pairs: one pair's epilogue overlaps the next pair
  Finish<FinishedPanels> finish = {};

  std::int64_t num_tiles() const { return end - first; }
  std::int64_t stride() const { return product.num_k * kTileElements; }
  std::int64_t panel_results() const { return num_tiles() * 2 * kResultElements; }
  std::int64_t num_rows() const { return smaller(product.rows, end * 16) - first * 16; }

  // From weights to output, except for the last rows' epilogue, which is left to `finish`.
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
          if constexpr (!kFinishesAlongside) finish.do_all();
        }
      }
    }
  }

 private:
  // Accumulates one panel over `count` k tiles.
  void multiply_panel(std::int64_t k, std::int64_t count, const Element* right, const Element* right_next, float* result) {
    const bool streams_weights = num_rows() <= kFewRows;
    // Each product prefetches its share of the next block of k; a streaming one, what it needs next itself.
    constexpr std::int64_t kLinesOfK = 2 * kTileElements * sizeof(Element) / 64;
    Ahead ahead = {right_next, ceil_div(kLinesOfK, ceil_div(num_tiles(), 2))};
    if (streams_weights) ahead = {right + kPrefetchElements, kLinesOfK};
    for (std::int64_t tile = 0; tile < num_tiles(); tile += 2, result += 4 * kResultElements) {
      const LeftElement* left = product.left + (first + tile) * stride() + k * kTileElements;
#if defined(OCTAVO_HAS_AMX)
      Alongside alongside = {finish, num_rows(), ahead};
      if (tile + 1 < num_tiles()) {
        multiply_2x2(result, left, left + stride(), right, count, k > 0, alongside);
      } else {
        multiply_1x2(result, left, right, count, k > 0, smaller(16, product.rows - (first + tile) * 16), alongside);
      }
#else
      const std::int64_t rows = smaller(num_rows() - tile * 16, 32);
      multiply_tiles(result, left, stride(), rows, right, count, k > 0, ahead);
#endif
      ahead = streams_weights ? Ahead{} : Ahead{ahead.line(count * ahead.lines), ahead.lines};
    }
  }
};

// How a product is cut into chunks, each claimed by any thread.
struct Cut {
  Blocking blocking;
  std::int64_t group, num_groups;  // panels per chunk, and the number of such groups
  std::int64_t num_chunks;
  bool streams;
};

// About `num_wanted` chunks per block of rows: enough to balance threads, few enough that claiming them is free.
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
  const InPhase phase(pool.phases(), Phase::products);
  const Cut cut = cut_product(product, pool.num_threads() * kChunksPerThread);
  pool.run(cut.num_chunks, [&](std::int64_t chunk) { multiply_chunk(product, cut, chunk); });
}
