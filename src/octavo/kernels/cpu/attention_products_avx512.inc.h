// Scores over a span, and the weighted sum of values, with 64-byte vectors. Included inside namespace
// octavo::OCTAVO_LEVEL.
//
// Products read tiles in memory order, for each position head by head: a thread reads 27 GB/s sequentially, but 10 to
// 13 when jumping between tiles of one head. A prompt's rows are of one head.

// One kv head's keys or values of 32 positions: in the pool, or gathered in `work`.
template <class Stored, class Element>
static inline const Stored* tile_of(const AttentionArgs& args, const Span& span, bool is_keys, std::int64_t head,
                                    std::int64_t i, Workspace<Element>& work) {
  if (has_tiles(args))
    return reinterpret_cast<const Stored*>((is_keys ? span.keys : span.values)[i] + head * span.head_stride);
  Stored* to = reinterpret_cast<Stored*>(work.tiles);
  const void* pool = is_keys ? args.keys : args.values;
  gather_tile(args, span.rows, static_cast<const char*>(pool), head, span.first_tile + i, to, is_keys);
  return to;
}

// The tile read next: the next head's, or the next positions' of the first head; after all keys, values. The same tile
// if that is unknown.
template <class Stored>
static inline const Stored* after_tile(const AttentionArgs& args, const Span& span, bool is_keys, std::int64_t head,
                                       std::int64_t i, const Stored* tile) {
  const char* const* tiles = is_keys ? span.keys : span.values;
  const char* after = nullptr;
  if (head + 1 < span.rows.num_heads) {
    after = tiles[i] + (head + 1) * span.head_stride;
  } else if (i + 1 < span.num_tiles) {
    after = tiles[i + 1];
  } else if (is_keys) {
    after = span.values[0];
  }
  return has_tiles(args) && after ? reinterpret_cast<const Stored*>(after) : tile;
}

template <class Stored, class Element>
static inline void score_tiles(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  const std::int64_t num_parts = padded_head(args) / kPart, num_rows = span.rows.rows_per_head;
  LeftRows rows = {reinterpret_cast<const char*>(work.queries), num_parts * kLeftBytes<Stored>, 0, num_rows};
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    for (std::int64_t head = 0; head < span.rows.num_heads; ++head) {
      const Stored* keys = tile_of<Stored>(args, span, true, head, i, work);
      const Stored* after = after_tile(args, span, true, head, i, keys);
      rows.first_row = head * num_rows;
      multiply_parts<Stored>(
          work.scores + i * 2 * kPairElements, rows, 1, num_parts, false,
          [&](std::int64_t, std::int64_t part) { return keys + part * kRightElements; },
          [&](std::int64_t part) { return after + part * kRightElements; });
    }
  }
}

// Adds some rows' weighted sum of one tile of values.
template <class Stored, class Element>
static inline void mix_tile(const AttentionArgs& args, std::int64_t first_row, std::int64_t num_rows, std::int64_t i,
                            const Stored* values, const Stored* after, Workspace<Element>& work) {
  const std::int64_t num_parts = padded_value(args) / kPart;
  const char* weights = reinterpret_cast<const char*>(work.weights) + i * kLeftBytes<Stored>;
  const LeftRows rows = {weights, kSpanTiles * kLeftBytes<Stored>, first_row, num_rows};
  for (std::int64_t part = 0, count; part < num_parts; part += count) {
    count = tiles_together(num_rows, num_parts - part);
    multiply_parts<Stored>(
        work.mixed + part * 2 * kPairElements, rows, count, 1, i > 0,
        [&](std::int64_t next, std::int64_t) { return values + (part + next) * kRightElements; },
        [&](std::int64_t) { return after + part * kRightElements; });
  }
}

// A copy of a tile without the positions masked for this row.
template <class Stored, class Element>
static inline const Stored* clean_tile(const AttentionArgs& args, const Span& span, std::int64_t i, std::int64_t row,
                                       const Stored* values, Workspace<Element>& work) {
  const std::int64_t padded = padded_value(args), start = (span.first_tile + i) * kTilePositions;
  const Sight seen = sight(args, span.rows, row);
  Stored* to = reinterpret_cast<Stored*>(work.cleaned);
  const Stored nothing[kMaxHeadDim] = {};
  __builtin_memcpy(to, values, static_cast<std::size_t>(kTilePositions * padded) * sizeof(Stored));
  for (std::int64_t at = 0; at < kTilePositions; ++at)
    if (start + at < seen.first || start + at > seen.last) put_value(to, at, nothing, padded);
  return to;
}

template <class Stored, class Element>
static inline void mix_tiles(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  const std::int64_t size = kTilePositions * padded_value(args), num_rows = span.rows.rows_per_head;
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    for (std::int64_t head = 0; head < span.rows.num_heads; ++head) {
      const Stored* values = tile_of<Stored>(args, span, false, head, i, work);
      const std::int64_t first = head * num_rows;
      // A zero weight does not cancel a NaN, and masked values may contain one: of another row's later position, or
      // left in a block by another request.
      if (span.is_seen_by_all[i] || is_finite(values, size)) {
        mix_tile(args, first, num_rows, i, values, after_tile(args, span, false, head, i, values), work);
        continue;
      }
      for (std::int64_t row = first; row < first + num_rows; ++row) {
        const Stored* clean = clean_tile(args, span, i, row, values, work);
        mix_tile(args, row, 1, i, clean, clean, work);
      }
    }
  }
}

// The same for a prompt's rows, if nothing has to be masked or gathered: part by part, with sums in registers over all
// tiles. With many rows, values are read from cache.
template <class Stored, class Element>
static inline void mix_parts(const AttentionArgs& args, const Span& span, const Tiles<Stored>& values,
                             Workspace<Element>& work) {
  const char* weights = reinterpret_cast<const char*>(work.weights);
  const LeftRows rows = {weights, kSpanTiles * kLeftBytes<Stored>, 0, span.rows.rows_per_head};
  for (std::int64_t part = 0; part < padded_value(args) / kPart; ++part) {
    const auto right = [&](std::int64_t, std::int64_t tile) { return values.of[tile] + part * kRightElements; };
    const auto next = [&](std::int64_t tile) { return right(0, tile + 1 < span.num_tiles ? tile + 1 : tile); };
    multiply_parts<Stored>(work.mixed + part * 2 * kPairElements, rows, 1, span.num_tiles, false, right, next);
  }
}

template <class Stored, class Element>
static inline void mix_values(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  if (span.rows.rows_per_head <= kTileRows || !has_tiles(args)) return mix_tiles<Stored>(args, span, work);
  const Tiles<Stored> values = stored_tiles<Stored>(span, false, 0);
  has_hidden_nan(args, span, values) ? mix_tiles<Stored>(args, span, work) : mix_parts(args, span, values, work);
}

template <class Element>
static inline void score_span(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  args.has_int8_kv ? score_tiles<std::int8_t>(args, span, work) : score_tiles<Element>(args, span, work);
}

template <class Element>
static inline void mix_span(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  if (!args.has_int8_kv) return mix_values<Element>(args, span, work);
  mix_values<std::int8_t>(args, span, work);
  for (std::int64_t i = 0; i < padded_value(args) / 16; ++i)
    for (std::int64_t row = 0; row < span.rows.num_rows(); ++row)
      scale_sums(work.mixed + mixed_offset(row, i), splat(work.weight_scales[row]));
}
