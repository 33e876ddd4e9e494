// Selects the multiply_block<rows, vectors of columns> instantiation for a number of rows. Included from
// tiles_widened.inc.h and dense_tiles.inc.h, before row_groups.inc.h.

using MultiplyBlock = decltype(&multiply_block<1, kPanelVectors>);

// For at most kMost rows.
template <int kMost, int kVectors>
static inline MultiplyBlock block_of(std::int64_t rows) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return block_of<kMost - 1, kVectors>(rows);
  }
  return multiply_block<kMost, kVectors>;
}

static inline MultiplyBlock choose_block(std::int64_t rows, bool is_whole, bool /*is_first*/) {
  return is_whole ? block_of<kRowsOfWholePanel, kPanelVectors>(rows)
                  : block_of<kRowsTogether, kPanelVectors / kPassesOfMany>(rows);
}
