// Expert MLPs, each on its own rows. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Legend: R = pairs, X = experts, D = hidden size, I = intermediate size.

// One expert's part of a phase.
template <class AnyProduct, class AnyCut>
struct ExpertProduct {
  AnyProduct product;
  AnyCut cut;
  std::int64_t first_chunk;
};

// Runs one product per expert that has rows: make(expert, its first row tile, its rows).
template <class AnyProduct, class AnyCut, class Make>
static void multiply_experts(const SortedPairs& sorted, std::int64_t num_experts, ExpertProduct<AnyProduct, AnyCut>* products,
                             Pool& pool, const Make& make) {
  std::int64_t num_active = 0;
  for (std::int64_t expert = 0; expert < num_experts; ++expert) num_active += sorted.rows_of(expert) > 0;
  const std::int64_t num_wanted = ceil_div(pool.num_threads() * kExpertChunksPerThread, larger(1, num_active));
  std::int64_t num_products = 0, num_chunks = 0, tile = 0;
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    const std::int64_t rows = sorted.rows_of(expert);
    if (rows == 0) continue;
    const AnyProduct product = make(expert, tile, rows);
    products[num_products] = {product, cut_product(product, num_wanted), num_chunks};
    num_chunks += products[num_products++].cut.num_chunks;
    tile += ceil_div(rows, 16);
  }
  pool.run(num_chunks, [&](std::int64_t chunk) {
    std::int64_t at = 0;  // the last product that starts at or before this chunk
    for (std::int64_t end = num_products; end - at > 1;) {
      const std::int64_t half = (at + end) / 2;
      products[half].first_chunk <= chunk ? at = half : end = half;
    }
    multiply_chunk(products[at].product, products[at].cut, chunk - products[at].first_chunk);
  });
}

// Copies tokens from their left tiles to those of their experts.
static void gather_tokens(const LeftElement* tokens, std::int64_t num_k, const Pairs& pairs, const SortedPairs& sorted,
                          std::int64_t num_tiles, LeftElement* left, Pool& pool) {
  pool.run(num_tiles, [&](std::int64_t tile) {
    const std::int64_t first = sorted.tile_row[tile], count = sorted.tile_row[tile + 1] - first;
    LeftElement* to = left + tile * num_k * kTileElements;
    for (std::int64_t line = 0; line < (kReadsWholeTiles ? 16 : count); ++line) {
      const std::int64_t token = line < count ? pairs.token(sorted.pair[first + line]) : 0;
      const LeftElement* from = tokens + token / 16 * num_k * kTileElements + token % 16 * 32;
      for (std::int64_t k = 0; k < num_k; ++k) {
        LeftElement* to_line = to + k * kTileElements + line * 32;
        line < count ? __builtin_memcpy(to_line, from + k * kTileElements, 32 * sizeof *to)
                     : __builtin_memset(to_line, 0, 32 * sizeof *to);
      }
    }
  });
}

// Experts with dense weights, and the buffers between the steps of their MLPs.
struct PlainExperts {
  SortedPairs sorted;
  ExpertProduct<Product, Cut>* products;  // [X]
  LeftElement* tokens;                    // left tiles
  LeftElement* left;                      // left tiles of the sorted rows
  LeftElement* middle;                    // the same, between the two linears
  Element* answers;                       // [R, D], sorted by expert

  static PlainExperts in(Room& room, const Experts& experts, std::int64_t num_tokens, std::int64_t num_pairs, std::int64_t size) {
    const std::int64_t num_tiles = SortedPairs::max_tiles(num_pairs, experts.count);
    return {SortedPairs::in(room, num_pairs, experts.count), room.take<ExpertProduct<Product, Cut>>(experts.count),
            room.take<LeftElement>(left_elements(num_tokens, size)),
            room.take<LeftElement>(num_tiles * ceil_div(size, 32) * kTileElements),
            room.take<LeftElement>(num_tiles * ceil_div(experts.max_intermediate, 32) * kTileElements),
            room.take<Element>(num_pairs * size)};
  }

  // Packs the tokens, normalized if `rows` says so.
  void take(const RowsArgs& rows, const Experts&, Pool& pool) { pack_rows(rows, tokens, pool); }
  // Computes the logits [T, outputs of the router] of the tokens taken.
  void multiply_router(const RowsArgs& rows, const PackedWeight& router, float* logits, Pool& pool) const {
    OCTAVO_LEVEL::multiply_router(router, tokens, rows.rows, ceil_div(rows.size, 32), logits, pool);
  }

  // Computes `answers`.
  void compute(const Experts& experts, const Activation& activation, std::int64_t size, const Pairs& pairs, Pool& pool) {
    const std::int64_t num_k = ceil_div(size, 32), num_tiles = sorted.sort(pairs, experts.count);
    gather_tokens(tokens, num_k, pairs, sorted, num_tiles, left, pool);
    const std::int64_t middle_stride = ceil_div(experts.max_intermediate, 32) * kTileElements;  // per row tile
    multiply_experts(sorted, experts.count, products, pool,
                     [&](std::int64_t expert, std::int64_t tile, std::int64_t rows) -> Product {
                       const PackedWeight& up = experts.up[expert];
                       return {left + tile * num_k * kTileElements, rows, num_k, up,
                               {activated_output(activation), up.out_size, nullptr, middle + tile * middle_stride, activation}};
                     });
    multiply_experts(sorted, experts.count, products, pool,
                     [&](std::int64_t expert, std::int64_t tile, std::int64_t rows) -> Product {
                       return {middle + tile * middle_stride, rows, ceil_div(experts.up[expert].out_size, 32),
                               experts.down[expert],
                               {Output::plain, size, answers + sorted.first_row[expert] * size, nullptr}};
                     });
  }
};
