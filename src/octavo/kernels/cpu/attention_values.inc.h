// Weighted sums of values, and a row's result over all spans. Included inside namespace octavo::OCTAVO_LEVEL.

// Location of a row's elements from 16 * i on in the results of all parts.
static inline std::int64_t mixed_offset(std::int64_t row, std::int64_t i) {
  return (i / 2 * 2 + row / 16) * kPairElements + i % 2 * kResultElements + row % 16 * 16;
}

// Adds a span's weighted sum of values of one row to the row's total.
template <class Element>
static inline void add_mixed(Workspace<Element>& work, std::int64_t row, std::int64_t num_parts, bool is_first) {
  const float old_share = work.old_shares[row], new_share = work.new_shares[row];
  for (std::int64_t i = 0; i < num_parts * 2; ++i) {
    const std::int64_t at = mixed_offset(row, i);
    const f32x16 before = is_first ? splat(0.0f) : load_f32(work.total + at);
    store_f32(work.total + at, before * old_share + load_f32(work.mixed + at) * new_share);
  }
}

template <class Element>
static inline void finish_row(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work,
                              std::int64_t row, float share) {
  Element* out = static_cast<Element*>(args.out) + out_offset(args, rows, row);
  for (std::int64_t i = 0; i * 16 < value_size(args); ++i) {
    // + 0: masked tiles may have turned a negative zero into a positive one.
    const f32x16 result = load_f32(work.total + mixed_offset(row, i)) * share + 0.0f;
    store_some(out + i * 16, result, smaller(16, value_size(args) - i * 16));
  }
}

// A zero weight does not cancel a NaN, and masked values may contain one: of another row's later position, or left in a
// block by another request.
template <class Element>
static inline bool has_hidden_nan(const AttentionArgs& args, const Span& span, const Tiles<Element>& values) {
  for (std::int64_t i = 0; i < span.num_tiles; ++i)
    if (!span.is_seen_by_all[i] && !is_finite(values.of[i], kTilePositions * padded_value(args))) return true;
  return false;
}
