// Experts whose weights are integers. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A token is quantized once for all of its experts; the activations between their linears are quantized again.
//
// Legend: T = tokens, R = pairs, X = experts, D = hidden size, I = intermediate size.

// Quantized rows in the order of experts; each expert's rows start on a new row tile.
struct SortedIntegers {
  IntegerRows rows;  // [row tiles][num_k][16][64], and by row in the sorted order
  std::int64_t max_size, max_groups;
  bool are_by_tile;  // the sums

  static SortedIntegers in(Room& room, const Integers& form, std::int64_t num_tiles, std::int64_t num_rows, std::int64_t max_size) {
    const std::int64_t groups = num_row_sums(form, max_size);
    return {{room.take<std::int8_t>(num_tiles * num_k_tiles(max_size) * kTileBytes), room.take<float>(num_rows),
             room.take<std::int32_t>(num_tiles * 16 * groups)},
            max_size, groups, form.blocks.num_parts > 0};
  }

  // What begins at a row tile and a row.
  IntegerRows from(std::int64_t tile, std::int64_t row) const {
    return {rows.left + tile * num_k_tiles(max_size) * kTileBytes, rows.scales + row, rows.sums + (are_by_tile ? tile * 16 : row) * max_groups};
  }
};

// All of them have weights of the same form. `Element`: of the activations.
template <class Element>
struct IntegerExperts {
  SortedPairs sorted;
  ExpertProduct<IntegerProduct, IntegerCut>* products;  // [X]
  Element* normalized;       // [T, D]
  LeftElement* token_tiles;  // left tiles of these, for a router in bf16
  IntegerRows tokens;
  SortedIntegers left;
  Element* middle;           // [R, I], with the largest I as row size
  SortedIntegers middle_left;
  Element* answers;          // [R, D] in the sorted order

  static IntegerExperts in(Room& room, const Experts& experts, std::int64_t num_tokens, std::int64_t num_pairs, std::int64_t size) {
    const Integers &form = experts.up[0].integers, &next = experts.down[0].integers;
    const std::int64_t num_tiles = SortedPairs::max_tiles(num_pairs, experts.count), most = experts.max_intermediate;
    const std::size_t token_bytes = integer_rows_bytes(num_tokens, size, num_row_sums(form, size));
    return {SortedPairs::in(room, num_pairs, experts.count),
            room.take<ExpertProduct<IntegerProduct, IntegerCut>>(experts.count),
            room.take<Element>(num_tokens * size),
            room.take<LeftElement>(kIsFloat16<Element> ? 0 : left_elements(num_tokens, size)),
            place_integer_rows(room.take<std::int8_t>(static_cast<std::int64_t>(token_bytes)), num_tokens, size),
            SortedIntegers::in(room, form, num_tiles, num_pairs, size),
            room.take<Element>(num_pairs * most),
            SortedIntegers::in(room, next, num_tiles, num_pairs, most),
            room.take<Element>(num_pairs * size)};
  }

  // See PlainExperts.
  void take(const RowsArgs& rows, const Experts& experts, Pool& pool) {
    if (rows.fused.norm_weight) rms_norm<Element>({rows, normalized}, pool);
    quantize_rows<Element>(plain(rows), experts.up[0].integers, tokens, pool);
  }
  void multiply_router(const RowsArgs& rows, const PackedWeight& router, float* logits, Pool& pool) const {
    if constexpr (kIsFloat16<Element>) {
      const Pool::NestedOp nested(pool);  // this one keeps its memory
      kFloat16Ops.linear({plain(rows), router, Output::float32, logits}, pool);
    } else {
      pack_rows(plain(rows), token_tiles, pool);
      OCTAVO_LEVEL::multiply_router(router, token_tiles, rows.rows, ceil_div(rows.size, 32), logits, pool);
    }
  }

  void compute(const Experts& experts, const Activation& activation, std::int64_t size, const Pairs& pairs, Pool& pool) {
    const std::int64_t num_tiles = sorted.sort(pairs, experts.count), most = experts.max_intermediate;
    gather(experts.up[0].integers, size, pairs, num_tiles, pool);
    multiply_experts(sorted, experts.count, products, pool,
                     [&](std::int64_t expert, std::int64_t tile, std::int64_t rows) -> IntegerProduct {
                       const PackedWeight& up = experts.up[expert];
                       const std::int64_t row = sorted.first_row[expert];
                       return {left.from(tile, row), rows, size, up,
                               {activated_output(activation), up.out_size, middle + row * most, nullptr, activation, nullptr, kIsFloat16<Element>}};
                     });
    quantize_middle(experts, pairs, num_tiles, pool);
    multiply_experts(sorted, experts.count, products, pool,
                     [&](std::int64_t expert, std::int64_t tile, std::int64_t rows) -> IntegerProduct {
                       const std::int64_t row = sorted.first_row[expert];
                       return {middle_left.from(tile, row), rows, experts.up[expert].out_size, experts.down[expert],
                               {Output::plain, size, answers + row * size, nullptr, {}, nullptr, kIsFloat16<Element>}};
                     });
  }

 private:
  RowsArgs plain(const RowsArgs& rows) const {
    return {rows.fused.norm_weight ? normalized : rows.x, rows.rows, rows.size};
  }

  // Copies tokens to their experts.
  void gather(const Integers& form, std::int64_t size, const Pairs& pairs, std::int64_t num_tiles, Pool& pool) const {
    const std::int64_t num_k = num_k_tiles(size), groups = left.max_groups;
    pool.run(num_tiles, [&](std::int64_t tile) {
      const std::int64_t first = sorted.tile_row[tile], count = sorted.tile_row[tile + 1] - first;
      const IntegerRows to = left.from(tile, first);
      for (std::int64_t line = 0; line < count; ++line) {
        const std::int64_t token = pairs.token(sorted.pair[first + line]);
        const std::int8_t* from = tokens.left + token / 16 * num_k * kTileBytes + token % 16 * kTileK;
        for (std::int64_t k = 0; k < num_k; ++k)
          __builtin_memcpy(to.left + k * kTileBytes + line * kTileK, from + k * kTileBytes, kTileK);
        to.scales[line] = tokens.scales[token];
        const SumsOfRow copy = sums_of_row(to, form, line, groups), of_token = sums_of_row(tokens, form, token, groups);
        for (std::int64_t group = 0; group < groups; ++group) copy.first[group * copy.step] = of_token.first[group * copy.step];
      }
    });
  }

  // Quantizes the activations row by row: a row's scale is known only when the whole row has been computed.
  void quantize_middle(const Experts& experts, const Pairs& pairs, std::int64_t num_tiles, Pool& pool) const {
    pool.run(num_tiles, [&](std::int64_t tile) {
      const std::int64_t first = sorted.tile_row[tile], end = sorted.tile_row[tile + 1];
      const std::int64_t expert = pairs.expert_ids[sorted.pair[first]], begin = sorted.first_row[expert];
      const std::int64_t size = experts.up[expert].out_size;
      const Integers& form = experts.down[expert].integers;
      const std::int64_t groups = num_row_sums(form, size);
      const Element* from = middle + begin * experts.max_intermediate;  // [rows of the expert, I]
      // An expert's row tiles are laid out for its own number of k, and its sums for its own groups.
      const IntegerRows of_expert = middle_left.from(tile - (first - begin) / 16, begin);
      std::int8_t* lines = of_expert.left + (first - begin) / 16 * num_k_tiles(size) * kTileBytes;
      float* wide = form.is_rotated ? static_cast<float*>(thread_scratch().bytes(rotated_bytes(form, size))) : nullptr;
      for (std::int64_t row = first; row < end; ++row)
        quantize_row(from + (row - begin) * size, size, form, wide, lines + (row - first) * kTileK, of_expert.scales + (row - begin),
                     sums_of_row(of_expert, form, row - begin, groups));
    });
  }
};
