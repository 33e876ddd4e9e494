// Products of one or two left tiles with vectors: how rows and columns are grouped so that their sums fit in registers.
// Included from tiles_widened.inc.h, tiles_avx512.inc.h and dense_tiles.inc.h, after these definitions:
//   kRowsTogether      the most rows of a group;
//   kRowsOfWholePanel  the most rows that take all columns of a panel at once;
//   kPassesOfMany      passes of a larger group over a panel: 1, or 2 with half of the columns each;
//   choose_block       the kernel for so many rows, on a whole panel or half of it; `is_first`: the first pass over
//                      these weights in this call.

// Passes over a panel for so many rows of a tile.
static inline std::int64_t num_passes(std::int64_t rows) {
  return rows <= kRowsOfWholePanel ? rows > 0 : kPassesOfMany * ceil_div(rows, kRowsTogether);
}

// The first `rows` of a tile, in groups as even as possible: 16 rows, at most 6 each, are 6, 5 and 5. Advances `ahead`.
static inline void multiply_tile(float* result, const LeftElement* left, const Element* right, std::int64_t num_k,
                                 bool accumulates, std::int64_t rows, bool is_first_tile, Ahead& ahead) {
  const bool is_whole = rows <= kRowsOfWholePanel;
  const std::int64_t num_groups = ceil_div(rows, kRowsTogether), num_parts = is_whole ? 1 : kPassesOfMany;
  for (std::int64_t group = 0, row = 0; group < num_groups; ++group) {
    const std::int64_t count = rows / num_groups + (group < rows % num_groups);
    const MultiplyBlock multiply = choose_block(count, is_whole, is_first_tile && group == 0);
    for (std::int64_t part = 0; part < num_parts; ++part) {
      multiply(result + part * kResultElements + row * 16, left + row * 32, right + right_index(part, 0, 0), num_k,
               accumulates, ahead);
      ahead.from = ahead.line(num_k * ahead.lines);
    }
    row += count;
  }
}

// result[row tile][2 right tiles] = sum over k of left * right (+ result), for 1 to 32 rows: of one row tile, or of two
// that are `stride` apart. Prefetches `ahead` meanwhile.
static inline void multiply_tiles(float* result, const LeftElement* left, std::int64_t stride, std::int64_t rows,
                                  const Element* right, std::int64_t num_k, bool accumulates, Ahead ahead) {
  const std::int64_t first = smaller(16, rows), second = rows - first;
  ahead.lines = ceil_div(ahead.lines, num_passes(first) + num_passes(second));
  multiply_tile(result, left, right, num_k, accumulates, first, true, ahead);
  if (second > 0)
    multiply_tile(result + 2 * kResultElements, left + stride, right, num_k, accumulates, second, false, ahead);
}
