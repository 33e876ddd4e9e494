// The parts that attention multiplies by, and the products. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A right part is 32 x 32 elements: [2 tiles][16 pairs of k][16 columns][2] in bf16, as matrix tiles read them. Keys are
// right parts of k = element of the head, column = position; values of k = position, column = element of the head.
// A left part is [16 rows][32 k], of queries or of weights. A result is [row tiles][2][16 rows][16 columns] float32.

constexpr std::int64_t kPart = 32;
constexpr std::int64_t kRightElements = kPart * kPart;
constexpr std::int64_t kLeftElements = 16 * kPart;

static inline std::int64_t right_index(bf16, std::int64_t k, std::int64_t column) {
  return column / 16 * kTileElements + k / 2 * 32 + column % 16 * 2 + k % 2;
}

#if defined(OCTAVO_HAS_AMX)

// result = sum over k of left part k * right(k). `ahead(k)` is a right part that is soon needed, or null.
template <class Right, class Ahead>
static inline void multiply_parts(float* result, const bf16* left, std::int64_t row_tile_stride, std::int64_t num_rows,
                                  std::int64_t num_k, const Right& right, const Ahead& ahead) {
  const bool is_double = num_rows > 16;
  _tile_zero(0);
  _tile_zero(1);
  if (is_double) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t k = 0; k < num_k; ++k) {
    const bf16* part = right(k);
    if (const bf16* next = ahead(k))
      for (int line = 0; line < 32; ++line) _mm_prefetch(next + line * 32, _MM_HINT_T0);
    _tile_loadd(6, part, 64);
    _tile_loadd(4, left + k * kLeftElements, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, part + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (is_double) {
      _tile_loadd(5, left + row_tile_stride + k * kLeftElements, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, result, 64);
  _tile_stored(1, result + kResultElements, 64);
  if (is_double) {
    _tile_stored(2, result + 2 * kResultElements, 64);
    _tile_stored(3, result + 3 * kResultElements, 64);
  }
}

#else

template <class Right, class Ahead>
static inline void multiply_parts(float* result, const bf16* left, std::int64_t row_tile_stride, std::int64_t num_rows,
                                  std::int64_t num_k, const Right& right, const Ahead& ahead) {
  for (std::int64_t k = 0; k < num_k; ++k) {
    if (const bf16* next = ahead(k))
      for (int line = 0; line < 32; ++line) __builtin_prefetch(next + line * 32);
    for (std::int64_t row = 0; row < num_rows; row += 16)
      multiply_1x2(result + row / 16 * 2 * kResultElements, left + row / 16 * row_tile_stride + k * kLeftElements,
                   right(k), 1, k > 0, smaller(16, num_rows - row));
  }
}

#endif

// Whether all of a tile's values are finite: a weight of zero makes nothing of them then.
static inline bool is_finite(const bf16* values, std::int64_t count) {
  u16x16 any = {};
  for (std::int64_t i = 0; i < count; i += 16) {
    u16x16 half;
    __builtin_memcpy(&half, values + i, sizeof half);
    any |= (u16x16)((half & 0x7f80) == 0x7f80);
  }
  std::uint64_t words[4];
  __builtin_memcpy(words, &any, sizeof words);
  return (words[0] | words[1] | words[2] | words[3]) == 0;
}
