// Attention over paged memory. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A row's result has the same bits whatever else is in the step. Its context is taken in spans at absolute positions;
// within one, scores are products in one order, weights are summed lane by lane, and values are added position by
// position. Tiles that a row does not see add exact zeros, so blocks of rows may share them or leave them out.

constexpr std::int64_t kSpanTiles = 8;  // 256 positions
// Tiles that some rows of a block see and others do not: its tokens are neighbours, so two at either end of their sight.
constexpr std::int64_t kMaxEdgeTiles = 4;
constexpr std::int64_t kMaxParts = kMaxHeadDim / kPart;
constexpr std::int64_t kPairElements = 2 * kResultElements;  // of a result, for one row tile

// Some rows of one request and one kv head. Positions are in the context.
struct RowBlock {
  std::int64_t request, kv_head, first_row, num_rows, group_size, first_token, first_position;

  std::int64_t token(std::int64_t row) const { return first_token + (first_row + row) / group_size; }
  std::int64_t position(std::int64_t row) const { return first_position + (first_row + row) / group_size; }
  std::int64_t query_head(std::int64_t row) const { return kv_head * group_size + (first_row + row) % group_size; }
};

// The first and the last position that a row sees.
struct Sight {
  std::int64_t first, last;
};

static inline Sight sight(const AttentionArgs& args, const RowBlock& rows, std::int64_t row) {
  const std::int64_t last = rows.position(row);
  return {args.sliding_window ? larger(0, last - args.sliding_window + 1) : 0, last};
}

template <class Element>
struct Workspace {
  alignas(64) Element queries[2 * kMaxParts * kLeftElements];           // [row tiles][parts] left parts
  alignas(64) Element weights[2 * kSpanTiles * kLeftElements];          // [row tiles][tiles] left parts
  alignas(64) float scores[kSpanTiles * 2 * kPairElements];             // [tiles] results
  alignas(64) float mixed[kMaxParts * 2 * kPairElements];               // [parts] results: of this span
  alignas(64) float total[kMaxParts * 2 * kPairElements];               // [parts] results: of all spans so far
  alignas(64) Element keys[kSpanTiles * kTilePositions * kMaxHeadDim];  // tiles that had to be put together
  alignas(64) Element values[kSpanTiles * kTilePositions * kMaxHeadDim];
  alignas(64) float key_scales[kSpanTiles * kTilePositions];            // of keys and values kept as int8
  alignas(64) float value_scales[kSpanTiles * kTilePositions];
  alignas(64) Element cleaned[kMaxEdgeTiles * kTilePositions * kMaxHeadDim];
  f32x16 lanes[kMaxRowsOfBlock] = {};  // of each row's scores, the greatest in each lane; then of its weights, the sum
  alignas(64) float bases[kMaxRowsOfBlock], old_shares[kMaxRowsOfBlock], new_shares[kMaxRowsOfBlock];
  RowStates states[2];  // of each row tile
};

// A span of tiles of one context. Where the pool holds none that can be used as they are, pointers are null until the
// span is gathered.
template <class Element>
struct Span {
  RowBlock rows;
  std::int64_t first_tile, num_tiles, begin_tile, end_tile;  // of the span, and of all that its rows see
  const Element* keys[kSpanTiles];
  const Element* values[kSpanTiles];
  bool is_seen_by_all[kSpanTiles];

  bool is_first() const { return first_tile == begin_tile; }
  bool is_last() const { return first_tile + num_tiles == end_tile; }
};

static inline std::int64_t slot_of(const AttentionArgs& args, std::int64_t request, std::int64_t position) {
  const std::int32_t block = args.block_table[request * args.num_blocks_per_request + position / args.block_size];
  return block * args.block_size + position % args.block_size;
}

// Makes a tile of keys or values from slots that lie one after the other in blocks of another size. Positions behind
// the context are left as zeros.
template <class Element, class Put>
static inline void gather_tile(const AttentionArgs& args, const RowBlock& rows, const Element* pool, std::int64_t tile,
                               Element* to, const Put& put) {
  const std::int64_t padded = padded_head(args), first = tile * kTilePositions;
  const std::int64_t count = smaller(kTilePositions, args.seq_lens[rows.request] - first);
  __builtin_memset(to, 0, static_cast<std::size_t>(kTilePositions * padded) * sizeof(Element));
  for (std::int64_t at = 0; at < count; ++at) {
    const std::int64_t slot = slot_of(args, rows.request, first + at);
    put(to, at, pool + (slot * args.num_kv_heads + rows.kv_head) * padded, padded);
  }
}

// The span that begins with this tile: up to the next multiple of kSpanTiles, or to the end of what the rows see.
template <class Element>
static inline Span<Element> find_span(const AttentionArgs& args, const RowBlock& rows, std::int64_t first_tile) {
  const Sight first = sight(args, rows, 0), last = sight(args, rows, rows.num_rows - 1);
  Span<Element> span = {};
  span.rows = rows;
  span.begin_tile = first.first / kTilePositions;
  span.end_tile = last.last / kTilePositions + 1;
  span.first_tile = larger(first_tile, span.begin_tile);
  span.num_tiles = smaller(span.end_tile, (span.first_tile / kSpanTiles + 1) * kSpanTiles) - span.first_tile;
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    const std::int64_t start = (span.first_tile + i) * kTilePositions;
    span.is_seen_by_all[i] = start >= last.first && start + kTilePositions - 1 <= first.last;
    if (!has_tiles(args) || args.has_int8_kv) continue;
    const std::int64_t offset = tile_offset(args, slot_of(args, rows.request, start), rows.kv_head);
    span.keys[i] = static_cast<const Element*>(args.keys) + offset;
    span.values[i] = static_cast<const Element*>(args.values) + offset;
  }
  return span;
}

// Puts together a tile of bytes, and its scales. Positions behind the context are left as zeros.
template <class Element, class Put>
static inline void gather_tile_int8(const AttentionArgs& args, const RowBlock& rows, const std::int8_t* pool,
                                    std::int64_t tile, Element* to, float* scales, const Put& put) {
  const std::int64_t padded = padded_head(args), first = tile * kTilePositions;
  const std::int64_t count = smaller(kTilePositions, args.seq_lens[rows.request] - first);
  if (has_tiles(args)) {
    const std::int64_t offset = tile_offset(args, slot_of(args, rows.request, first), rows.kv_head);
    const std::int8_t* from = pool + offset / padded * stored_head(args);
    widen_bytes(from, kTilePositions * padded, to);
    __builtin_memcpy(scales, from + kTilePositions * padded, kTilePositions * kScaleBytes);
    return;
  }
  __builtin_memset(to, 0, static_cast<std::size_t>(kTilePositions * padded) * sizeof(Element));
  __builtin_memset(scales, 0, kTilePositions * kScaleBytes);
  alignas(64) Element head[kMaxHeadDim];
  for (std::int64_t at = 0; at < count; ++at) {
    const std::int64_t slot = slot_of(args, rows.request, first + at);
    const std::int8_t* from = pool + (slot * args.num_kv_heads + rows.kv_head) * stored_head(args);
    widen_bytes(from, padded, head);
    put(to, at, head, padded);
    __builtin_memcpy(scales + at, from + padded, kScaleBytes);
  }
}

template <class Element>
static inline void gather_span(const AttentionArgs& args, Span<Element>& span, Workspace<Element>& work) {
  const auto put_key_at = [](auto... put) { put_key(put...); };
  const auto put_value_at = [](auto... put) { put_value(put...); };
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    const std::int64_t tile = span.first_tile + i, offset = i * kTilePositions * kMaxHeadDim;
    Element *keys = work.keys + offset, *values = work.values + offset;
    if (args.has_int8_kv) {
      float *key_scales = work.key_scales + i * kTilePositions, *value_scales = work.value_scales + i * kTilePositions;
      const std::int8_t* key_pool = static_cast<const std::int8_t*>(args.keys);
      const std::int8_t* value_pool = static_cast<const std::int8_t*>(args.values);
      gather_tile_int8(args, span.rows, key_pool, tile, keys, key_scales, put_key_at);
      gather_tile_int8(args, span.rows, value_pool, tile, values, value_scales, put_value_at);
    } else {
      gather_tile(args, span.rows, static_cast<const Element*>(args.keys), tile, keys, put_key_at);
      gather_tile(args, span.rows, static_cast<const Element*>(args.values), tile, values, put_value_at);
    }
    span.keys[i] = keys;
    span.values[i] = values;
  }
}

static inline std::int64_t out_offset(const AttentionArgs& args, const RowBlock& rows, std::int64_t row) {
  return (rows.token(row) * args.num_heads + rows.query_head(row)) * args.head_dim;
}

template <class Element>
static inline void make_queries(const AttentionArgs& args, const RowBlock& rows, Element* queries) {
  const std::int64_t width = args.num_heads + 2 * args.num_kv_heads, num_parts = padded_head(args) / kPart;
  const std::int64_t num_row_tiles = ceil_div(rows.num_rows, 16);
  const Element* qkv = static_cast<const Element*>(args.qkv);
  // Rows lie far apart, and the processor does not guess where the next one is.
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    prefetch_head(args, qkv + (rows.token(row) * width + rows.query_head(row)) * args.head_dim);
    prefetch_head(args, static_cast<const Element*>(args.out) + out_offset(args, rows, row));
  }
  alignas(64) Element query[kMaxHeadDim] = {};
  for (std::int64_t row = 0; row < num_row_tiles * 16; ++row) {
    if (row < rows.num_rows) {
      const std::int64_t token = rows.token(row), at = (token * width + rows.query_head(row)) * args.head_dim;
      make_head(args, qkv + at, args.query_norm, token, query);
    } else {
      __builtin_memset(query, 0, sizeof query);
    }
    for (std::int64_t part = 0; part < num_parts; ++part)
      __builtin_memcpy(queries + (row / 16 * num_parts + part) * kLeftElements + row % 16 * kPart, query + part * kPart,
                       kPart * sizeof(Element));
  }
}

// Scores of all tiles of a span. Meanwhile the keys of the span that comes next are fetched.
template <class Element>
static inline void score_span(const AttentionArgs& args, const Span<Element>& span, const Span<Element>& next,
                              Workspace<Element>& work) {
  const std::int64_t num_parts = padded_head(args) / kPart;
  for (std::int64_t i = 0; i < span.num_tiles; ++i)
    multiply_parts(
        work.scores + i * 2 * kPairElements, work.queries, num_parts * kLeftElements, span.rows.num_rows, num_parts,
        [&](std::int64_t part) { return span.keys[i] + part * kRightElements; },
        [&](std::int64_t part) { prefetch_part(next.keys[i], part); });
}

// Lane i of a vector of scores is of position `start` + i; those out of sight become nothing.
static inline f32x16 hide(f32x16 scores, std::int64_t start, Sight seen) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const std::int32_t first = static_cast<std::int32_t>(smaller(16, larger(-1, seen.first - start)));
  const std::int32_t last = static_cast<std::int32_t>(smaller(16, larger(-1, seen.last - start)));
  const i32x16 is_seen = (lanes >= first) & (lanes <= last);
  return is_seen ? scores : splat(kNothing);
}

template <class Element>
static inline float* scores_of(Workspace<Element>& work, std::int64_t row, std::int64_t tile, std::int64_t half) {
  return work.scores + (tile * 2 + row / 16) * kPairElements + half * kResultElements + row % 16 * 16;
}

// Hides what the row does not see, and finds the greatest of what it sees.
template <class Element>
static inline f32x16 max_of_scores(const AttentionArgs& args, const Span<Element>& span,
                                   Workspace<Element>& work, std::int64_t row) {
  f32x16 max = splat(kNothing);
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    for (std::int64_t half = 0; half < 2; ++half) {
      float* scores = scores_of(work, row, i, half);
      if (args.has_int8_kv)
        store_f32(scores, load_f32(scores) * load_f32(work.key_scales + i * kTilePositions + half * 16));
      if (!span.is_seen_by_all[i]) {
        const std::int64_t start = (span.first_tile + i) * kTilePositions + half * 16;
        store_f32(scores, hide(load_f32(scores), start, sight(args, span.rows, row)));
      }
      max = greater(load_f32(scores), max);
    }
  }
  return max;
}

// One row's scores to weights, rounded as products take them; returns their sum before rounding.
template <class Element>
static inline f32x16 weigh_row(float factor, const Span<Element>& span, Workspace<Element>& work, std::int64_t row,
                                const float* value_scales) {
  Element* weights = work.weights + row / 16 * kSpanTiles * kLeftElements + row % 16 * kPart;
  const f32x16 base = splat(work.bases[row]);
  f32x16 sum = splat(0.0f);
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    for (std::int64_t half = 0; half < 2; ++half) {
      const f32x16 score = load_f32(scores_of(work, row, i, half));
      f32x16 weight = weight_of(Element{}, (score - base) * factor);
      sum += weight;
      if (value_scales) {
        // A scale that nobody has written, or a NaN that others see, is not looked at.
        const f32x16 scaled = weight * load_f32(value_scales + i * kTilePositions + half * 16);
        weight = weight == 0.0f ? weight : scaled;
      }
      store_some(weights + i * kLeftElements + half * 16, weight, 16);
    }
  }
  return sum;
}

template <class Element>
static inline void weigh_span(const AttentionArgs& args, const Span<Element>& span,
                              Workspace<Element>& work) {
  const float factor = args.scale * 1.44269504f;  // weights are powers of two, not of e
  const std::int64_t num_rows = span.rows.num_rows;
  for (std::int64_t row = 0; row < num_rows; ++row) work.lanes[row] = max_of_scores(args, span, work, row);
  for (std::int64_t tile = 0; tile * 16 < num_rows; ++tile) {
    const f32x16 max = max_of_each(work.lanes + tile * 16);
    store_f32(work.bases + tile * 16, max == kNothing ? splat(0.0f) : max);
    for (std::int64_t row = tile * 16; row < smaller(num_rows, tile * 16 + 16); ++row)
      work.lanes[row] = weigh_row(factor, span, work, row, args.has_int8_kv ? work.value_scales : nullptr);
    const Shares shares = join(work.states[tile], max * factor, sum_of_each(work.lanes + tile * 16));
    store_f32(work.old_shares + tile * 16, shares.old_share);
    store_f32(work.new_shares + tile * 16, shares.new_share);
  }
}

// The span's weights times its values. Meanwhile the values of the span that comes next are fetched.
template <class Element>
static inline void mix_values(const Span<Element>& span, const Span<Element>& next, Workspace<Element>& work,
                              std::int64_t num_parts) {
  for (std::int64_t part = 0; part < num_parts; ++part)
    multiply_parts(
        work.mixed + part * 2 * kPairElements, work.weights, kSpanTiles * kLeftElements, span.rows.num_rows,
        span.num_tiles, [&](std::int64_t tile) { return span.values[tile] + part * kRightElements; },
        [&](std::int64_t tile) { prefetch_part(next.values[tile], part); });
}

// Adds the span's mix of values of one row to what the row has.
template <class Element>
static inline void add_mixed(Workspace<Element>& work, std::int64_t row, std::int64_t num_parts, bool is_first) {
  const float old_share = work.old_shares[row], new_share = work.new_shares[row];
  for (std::int64_t i = 0; i < num_parts * 2; ++i) {
    const std::int64_t at = (i / 2 * 2 + row / 16) * kPairElements + i % 2 * kResultElements + row % 16 * 16;
    const f32x16 before = is_first ? splat(0.0f) : load_f32(work.total + at);
    store_f32(work.total + at, before * old_share + load_f32(work.mixed + at) * new_share);
  }
}

// Copies the tiles that not all rows see, without the positions that this row does not see.
template <class Element>
static inline Span<Element> clean_for_row(const AttentionArgs& args, const Span<Element>& span,
                                          Workspace<Element>& work, std::int64_t row) {
  const std::int64_t padded = padded_head(args);
  const Sight seen = sight(args, span.rows, row);
  Span<Element> result = span;
  Element* to = work.cleaned;
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    if (span.is_seen_by_all[i]) continue;
    const std::int64_t start = (span.first_tile + i) * kTilePositions;
    __builtin_memcpy(to, span.values[i], static_cast<std::size_t>(kTilePositions * padded) * sizeof(Element));
    for (std::int64_t at = 0; at < kTilePositions; ++at) {
      if (start + at >= seen.first && start + at <= seen.last) continue;
      for (std::int64_t element = 0; element < padded; ++element)
        to[element / kPart * kRightElements + right_index(Element{}, at, element % kPart)] = Element{0};
    }
    result.values[i] = to;
    to += kTilePositions * padded;
  }
  return result;
}

// A weight of zero does not silence a NaN, and values that a row must not see may hold one: another row's of a later
// position, or what another request left in a block.
template <class Element>
static inline bool has_hidden_nan(const AttentionArgs& args, const Span<Element>& span) {
  for (std::int64_t i = 0; i < span.num_tiles; ++i)
    if (!span.is_seen_by_all[i] && !is_finite(span.values[i], kTilePositions * padded_head(args))) return true;
  return false;
}

template <class Element>
static inline void mix_span(const AttentionArgs& args, const Span<Element>& span, const Span<Element>& next,
                            Workspace<Element>& work) {
  const std::int64_t num_parts = padded_head(args) / kPart;
  const bool is_by_row = has_hidden_nan(args, span);
  if (!is_by_row) mix_values(span, next, work, num_parts);
  for (std::int64_t row = 0; row < span.rows.num_rows; ++row) {
    if (is_by_row) mix_values(clean_for_row(args, span, work, row), next, work, num_parts);
    add_mixed(work, row, num_parts, span.is_first());
  }
}

template <class Element>
static inline void finish_row(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work,
                              std::int64_t row, float share) {
  Element* out = static_cast<Element*>(args.out) + out_offset(args, rows, row);
  for (std::int64_t i = 0; i * 16 < args.head_dim; ++i) {
    const std::int64_t at = (i / 2 * 2 + row / 16) * kPairElements + i % 2 * kResultElements + row % 16 * 16;
    // + 0: tiles that a row does not see may have turned a negative zero into a positive one.
    const f32x16 result = load_f32(work.total + at) * share + 0.0f;
    store_some(out + i * 16, result, smaller(16, args.head_dim - i * 16));
  }
}

static inline RowBlock row_block(const AttentionArgs& args, std::int64_t index) {
  const std::int32_t* block = args.row_blocks + index % args.num_row_blocks * 3;
  const std::int64_t request = block[0], first_token = args.query_start_loc[request];
  const std::int64_t num_new = args.query_start_loc[request + 1] - first_token;
  return {.request = request,
          .kv_head = index / args.num_row_blocks,
          .first_row = block[1],
          .num_rows = block[2],
          .group_size = args.num_heads / args.num_kv_heads,
          .first_token = first_token,
          .first_position = args.seq_lens[request] - num_new};
}

template <class Element>
static inline void begin_rows(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work) {
  make_queries(args, rows, work.queries);
  // Rows of the second tile that are not there are computed all the same.
  if (rows.num_rows > 16) __builtin_memset(work.weights, 0, sizeof work.weights);
  work.states[0] = work.states[1] = {};
  begin_tiles(smaller(16, rows.num_rows));
}

template <class Element>
static inline void finish_rows(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work) {
  end_tiles();
  for (std::int64_t row = 0; row < rows.num_rows; ++row)
    finish_row(args, rows, work, row, 1.0f / work.states[row / 16].sum[row % 16]);
}

// Some row blocks, one after the other. A block's number counts row blocks of the first kv head, then of the next.
template <class Element>
static void attend_blocks(const AttentionArgs& args, std::int64_t block, std::int64_t end_block) {
  Workspace<Element> work;
  const Span<Element> none = {};
  Span<Element> span = find_span<Element>(args, row_block(args, block), 0);
  for (;;) {
    Span<Element> next = {};
    if (!span.is_last()) {
      next = find_span<Element>(args, span.rows, span.first_tile + span.num_tiles);
    } else if (block + 1 < end_block) {
      next = find_span<Element>(args, row_block(args, block + 1), 0);
    }
    if (!has_tiles(args) || args.has_int8_kv) gather_span(args, span, work);
    if (span.is_first()) begin_rows(args, span.rows, work);
    const Span<Element>& ahead = span.rows.num_rows <= 16 ? next : none;  // a prompt's tiles are in caches already
    score_span(args, span, ahead, work);
    weigh_span(args, span, work);
    mix_span(args, span, ahead, work);
    if (span.is_last()) {
      finish_rows(args, span.rows, work);
      if (++block == end_block) return;
    }
    span = next;
  }
}

// Blocks of few rows, which read their keys and values from memory, are taken several at a time, so that the next one's
// are on their way; those of a prompt read theirs from caches, and one may be long work.
static inline std::int64_t blocks_at_once(const AttentionArgs& args, const Pool& pool) {
  const std::int64_t num_rows = args.num_tokens * (args.num_heads / args.num_kv_heads);
  if (num_rows > 16 * args.num_row_blocks) return 1;
  return larger(1, smaller(16, args.num_row_blocks * args.num_kv_heads / (pool.num_threads() * kChunksPerThread)));
}

template <class Element>
static void attention_of(const AttentionArgs& args, Pool& pool) {
  const std::int64_t tokens = larger(1, smaller(16, args.num_tokens / (pool.num_threads() * kChunksPerThread)));
  // All keys and values are written before any is read: requests of one step may share blocks.
  pool.run(ceil_div(args.num_tokens, tokens), [&](std::int64_t chunk) {
    write_kv<Element>(args, chunk * tokens, smaller(args.num_tokens, (chunk + 1) * tokens));
  });
  // Head by head: one head's keys and values stay in the cache while a prompt's rows pass over them.
  const std::int64_t num_blocks = args.num_kv_heads * args.num_row_blocks, blocks = blocks_at_once(args, pool);
  pool.run(ceil_div(num_blocks, blocks), [&](std::int64_t chunk) {
    attend_blocks<Element>(args, chunk * blocks, smaller(num_blocks, (chunk + 1) * blocks));
  });
}

static void attention(const AttentionArgs& args, Pool& pool) {
  args.is_float32 ? attention_of<float>(args, pool) : attention_of<bf16>(args, pool);
}
