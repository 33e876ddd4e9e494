// Scores over a span, and the weighted sum of values: head by head, as each head's tiles are contiguous. Included
// inside namespace octavo::OCTAVO_LEVEL.

// Scores of one kv head's rows against all tiles of a span.
template <class Stored, class Element>
static inline void score_keys(const Span& span, std::int64_t head, const Tiles<Stored>& keys, Workspace<Element>& work,
                              std::int64_t num_parts) {
  const std::int64_t rows_per_head = span.rows.rows_per_head;
  for (std::int64_t i = 0; i < span.num_tiles; ++i)
    multiply_parts(
        work.scores + i * 2 * kPairElements + head * rows_per_head * 16, work.queries + head * rows_per_head * kPart,
        num_parts * kLeftElements, rows_per_head, num_parts,
        [&](std::int64_t part) { return keys.of[i] + part * kRightElements; },
        [&](std::int64_t part) { return keys.of[i + (i + 1 < span.num_tiles)] + part * kRightElements; });
}

template <class Element>
static inline void score_span(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  const std::int64_t num_parts = padded_head(args) / kPart;
  for (std::int64_t head = 0; head < span.rows.num_heads; ++head) {
    if constexpr (kMultipliesBytes) {
      if (multiplies_bytes(args)) {
        score_keys(span, head, stored_tiles<std::int8_t>(span, true, head), work, num_parts);
        continue;
      }
    }
    score_keys(span, head, tiles_of(args, span, true, head, work.tiles), work, num_parts);
  }
}

// The span's weights of one kv head's rows times its values, to `mixed`.
template <class Stored, class Element>
static inline void mix_values(const Span& span, std::int64_t head, const Tiles<Stored>& values,
                              const Workspace<Element>& work, std::int64_t num_parts, float* mixed) {
  const std::int64_t rows_per_head = span.rows.rows_per_head;
  for (std::int64_t part = 0; part < num_parts; ++part)
    multiply_parts(
        mixed + part * 2 * kPairElements + head * rows_per_head * 16, work.weights + head * rows_per_head * kPart,
        kSpanTiles * kLeftElements, rows_per_head, span.num_tiles,
        [&](std::int64_t tile) { return values.of[tile] + part * kRightElements; },
        [&](std::int64_t tile) {
          const bool is_last = tile + 1 == span.num_tiles;
          return values.of[is_last ? 0 : tile + 1] + (part + (is_last && part + 1 < num_parts)) * kRightElements;
        });
}

// Copies the tiles that are not visible to all rows, without the positions masked for this row.
template <class Element>
static inline Tiles<Element> clean_for_row(const AttentionArgs& args, const Span& span, const Tiles<Element>& values,
                                           Workspace<Element>& work, std::int64_t row) {
  const std::int64_t padded = padded_value(args);
  const Sight seen = sight(args, span.rows, row);
  Tiles<Element> result = values;
  Element* to = work.cleaned;
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    if (span.is_seen_by_all[i]) continue;
    const std::int64_t start = (span.first_tile + i) * kTilePositions;
    __builtin_memcpy(to, values.of[i], static_cast<std::size_t>(kTilePositions * padded) * sizeof(Element));
    for (std::int64_t at = 0; at < kTilePositions; ++at) {
      if (start + at >= seen.first && start + at <= seen.last) continue;
      for (std::int64_t element = 0; element < padded; ++element)
        to[element / kPart * kRightElements + right_index(Element{}, at, element % kPart)] = Element{0};
    }
    result.of[i] = to;
    to += kTilePositions * padded;
  }
  return result;
}

template <class Element>
static inline void mix_row_by_row(const AttentionArgs& args, const Span& span, std::int64_t head,
                                  const Tiles<Element>& values, Workspace<Element>& work) {
  const std::int64_t num_parts = padded_value(args) / kPart, first_row = head * span.rows.rows_per_head;
  for (std::int64_t row = first_row; row < first_row + span.rows.rows_per_head; ++row) {
    mix_values(span, head, clean_for_row(args, span, values, work, row), work, num_parts, work.mixed_alone);
    for (std::int64_t i = 0; i < num_parts * 2; ++i)
      store_f32(work.mixed + mixed_offset(row, i), load_f32(work.mixed_alone + mixed_offset(row, i)));
  }
}

template <class Element>
static inline void mix_span(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  const std::int64_t num_parts = padded_value(args) / kPart;
  for (std::int64_t head = 0; head < span.rows.num_heads; ++head) {
    if constexpr (kMultipliesBytes) {
      if (multiplies_bytes(args)) {
        mix_values(span, head, stored_tiles<std::int8_t>(span, false, head), work, num_parts, work.mixed);
        continue;
      }
    }
    const Tiles<Element> values = tiles_of(args, span, false, head, work.tiles);
    if (has_hidden_nan(args, span, values)) {
      mix_row_by_row(args, span, head, values, work);
    } else {
      mix_values(span, head, values, work, num_parts, work.mixed);
    }
  }
}
