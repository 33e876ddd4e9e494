// Products of tiles with vector multiplies and adds, on any processor. Included from tiles.inc.h.

using LeftElement = bf16;
constexpr bool kReadsWholeTiles = false;

static inline void begin_tiles(std::int64_t) {}
static inline void end_tiles() {}

// One pair of k of 16 columns: sum += left[0] * right[..][0] + left[1] * right[..][1].
static inline f32x16 add_pair(f32x16 sum, std::uint32_t left, u32x16 right) {
  const f32x16 even = (f32x16)(u32x16{} + (left << 16)), odd = (f32x16)(u32x16{} + (left & 0xffff0000u));
  sum += even * (f32x16)(right << 16);
  return sum + odd * (f32x16)(right & 0xffff0000u);
}

template <int kRows>
static inline void multiply_rows(float* result, const bf16* left, const bf16* right, std::int64_t num_k,
                                 bool accumulates, Ahead ahead) {
  f32x16 sums[kRows][2];
  for (int row = 0; row < kRows; ++row)
    for (int tile = 0; tile < 2; ++tile)
      sums[row][tile] = accumulates ? load_f32(result + tile * kResultElements + row * 16) : splat(0.0f);
  for (std::int64_t k = 0; k < num_k; ++k) {
    for (int pair = 0; pair < 16; ++pair) {
      ahead.fetch_share<16>(k, pair);
      const u32x16 right0 = load<u32x16>(right + 2 * k * kTileElements + pair * 32);
      const u32x16 right1 = load<u32x16>(right + (2 * k + 1) * kTileElements + pair * 32);
      for (int row = 0; row < kRows; ++row) {
        std::uint32_t pair_of_left;
        __builtin_memcpy(&pair_of_left, left + k * kTileElements + row * 32 + pair * 2, sizeof pair_of_left);
        sums[row][0] = add_pair(sums[row][0], pair_of_left, right0);
        sums[row][1] = add_pair(sums[row][1], pair_of_left, right1);
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int tile = 0; tile < 2; ++tile) store_f32(result + tile * kResultElements + row * 16, sums[row][tile]);
}

// The first `rows` of a tile; the first of them prefetch `ahead`.
static inline void multiply_tile(float* result, const bf16* left, const bf16* right, std::int64_t num_k,
                                 bool accumulates, std::int64_t rows, Ahead ahead) {
  const std::int64_t num_together = rows / kRowsAtOnce * kRowsAtOnce;
  for (std::int64_t row = 0; row < num_together; row += kRowsAtOnce)
    multiply_rows<kRowsAtOnce>(result + row * 16, left + row * 32, right, num_k, accumulates, row == 0 ? ahead : Ahead{});
  for (std::int64_t row = num_together; row < rows; ++row)
    multiply_rows<1>(result + row * 16, left + row * 32, right, num_k, accumulates, row == 0 ? ahead : Ahead{});
}

// result[row tile][2 right tiles] = sum over k of left * right (+ result), for 1 to 32 rows: of one row tile, or of two
// that are `stride` apart. Prefetches `ahead`.
static inline void multiply_tiles(float* result, const bf16* left, std::int64_t stride, std::int64_t rows,
                                  const bf16* right, std::int64_t num_k, bool accumulates, Ahead ahead) {
  multiply_tile(result, left, right, num_k, accumulates, smaller(16, rows), ahead);
  if (rows > 16)
    multiply_tile(result + 2 * kResultElements, left + stride, right, num_k, accumulates, rows - 16, {});
}
