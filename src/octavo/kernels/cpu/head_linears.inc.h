// A linear for each head, all of one size. Included inside namespace octavo::OCTAVO_LEVEL.

// Results are computed head by head, and then put side by side. A row's bits are those of `linear`.
static void head_linears(const HeadLinearsArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const std::int64_t num_heads = args.num_heads, width = rows.size / num_heads, rest = width - args.in_size;
  const std::int64_t out_size = args.heads[0].out_size, num_k = ceil_div(args.in_size, 32);
  const std::int64_t num_tiles = ceil_div(rows.rows, 16), left_size = left_elements(rows.rows, args.in_size);
  struct Memory {
    LeftElement* left;  // [H] left tiles
    Element* results;   // [H, T, N]
  };
  const Memory memory = placed(pool, [&](Room& room) -> Memory {
    return {room.take<LeftElement>(num_heads * left_size), room.take<Element>(num_heads * rows.rows * out_size)};
  });
  const Element* x = static_cast<const Element*>(rows.x);
  {
    const InPhase phase(pool.phases(), Phase::rows);
    pool.run(num_tiles, [&](std::int64_t tile) {
      for (std::int64_t head = 0; head < num_heads; ++head) {
        LeftElement* left = memory.left + head * left_size + tile * num_k * kTileElements;
        for (std::int64_t line = 0; line < (kReadsWholeTiles ? 16 : smaller(16, rows.rows - tile * 16)); ++line) {
          const std::int64_t row = tile * 16 + line;
          const bool is_row = row < rows.rows;
          pack_row(is_row ? x + row * rows.size + head * width : x, is_row ? args.in_size : 0, num_k, left + line * 32);
        }
      }
    });
  }
  const auto product = [&](std::int64_t head) -> Product {
    return {memory.left + head * left_size, rows.rows, num_k, args.heads[head],
            {Output::plain, out_size, memory.results + head * rows.rows * out_size, nullptr}};
  };
  const Cut cut = cut_product(product(0), ceil_div(pool.num_threads() * kExpertChunksPerThread, num_heads));
  {
    const InPhase phase(pool.phases(), Phase::products);
    pool.run(num_heads * cut.num_chunks, [&](std::int64_t chunk) {
      multiply_chunk(product(chunk / cut.num_chunks), cut, chunk % cut.num_chunks);
    });
  }
  Element* out = static_cast<Element*>(args.out);
  pool.run(num_tiles, [&](std::int64_t tile) {
    for (std::int64_t row = tile * 16; row < smaller(rows.rows, tile * 16 + 16); ++row) {
      for (std::int64_t head = 0; head < num_heads; ++head) {
        Element* to = out + (row * num_heads + head) * (out_size + rest);
        const Element* from = x + row * rows.size + head * width + args.in_size;
        __builtin_memcpy(to, memory.results + (head * rows.rows + row) * out_size,
                         static_cast<std::size_t>(out_size) * sizeof(Element));
        __builtin_memcpy(to + out_size, from, static_cast<std::size_t>(rest) * sizeof(Element));
      }
    }
  });
}
