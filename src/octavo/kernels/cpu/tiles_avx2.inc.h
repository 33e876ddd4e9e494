// Products of tiles by AVX2's 16 registers, from left tiles that are float32: what is multiplied comes from memory as it
// is, by broadcasts that cost the multipliers nothing. Included from tiles.inc.h.
//
// Right tiles stay bf16 and are widened in registers, beside the multiplications of four rows or more. Sums run over k
// one by one, in the order of k, in registers or from where they waited: the same bits for any number of rows.

using LeftElement = float;
constexpr bool kReadsWholeTiles = false;

static inline void begin_tiles(std::int64_t) {}
static inline void end_tiles() {}

constexpr std::int64_t kRowsTogether = 6;  // by 16 columns: 12 sums, two weights, a mask, and a value of the left
constexpr std::int64_t kRowsOfWholePanel = 3, kPassesOfMany = 2;  // more rows take half of the columns, twice

static inline void put_left(float* to, const bf16* from) {
  for (int i = 0; i < 4; ++i) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
    _mm256_storeu_ps(to + i * 8, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
  }
}

// One row of inputs as its line in each of the left tiles [num_k][16][32]; inputs that are not there are zeros.
static inline void pack_row(const bf16* from, std::int64_t size, std::int64_t num_k, float* to) {
  const std::int64_t num_whole = size / 32;
  for (std::int64_t k = 0; k < num_whole; ++k) put_left(to + k * kTileElements, from + k * 32);
  if (num_whole == num_k) return;
  bf16 rest[32] = {};
  __builtin_memcpy(rest, from + num_whole * 32, static_cast<std::size_t>(size % 32) * sizeof(bf16));
  put_left(to + num_whole * kTileElements, rest);
}

// Columns 8 * vector ... of the even or the odd k of a pair.
template <bool kIsOdd>
static inline __m256 load_columns(const bf16* part, std::int64_t pair, std::int64_t vector) {
  const bf16* from = part + vector / 2 * kTileElements + pair * 32 + vector % 2 * 16;
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if constexpr (kIsOdd) return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-0x10000)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
}

// One k of some rows, whose elements lie 32 apart, times some vectors of columns.
template <int kRows, int kVectors>
static inline void add_k(__m256 (&sums)[kRows][kVectors], const float* left, const __m256 (&columns)[kVectors]) {
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const __m256 factor = _mm256_broadcast_ss(left + row * 32);
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector)
      sums[row][vector] = _mm256_fmadd_ps(factor, columns[vector], sums[row][vector]);
  }
}

// Some rows of a left tile, and as many columns, from the first of a right tile on, as kVectors hold.
template <int kRows, int kVectors>
static void multiply_block(float* result, const float* left, const bf16* right, std::int64_t num_k, bool accumulates,
                           Ahead ahead) {
  const auto place = [&](int row, int i) { return result + i / 2 * kResultElements + row * 16 + i % 2 * 8; };
  __m256 sums[kRows][kVectors], columns[kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) sums[row][i] = accumulates ? _mm256_loadu_ps(place(row, i)) : _mm256_setzero_ps();
  for (std::int64_t k = 0; k < num_k; ++k, left += kTileElements, right += 2 * kTileElements) {
    ahead.fetch(k);
    for (std::int64_t pair = 0; pair < 16; ++pair) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) columns[i] = load_columns<false>(right, pair, i);
      add_k(sums, left + pair * 2, columns);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) columns[i] = load_columns<true>(right, pair, i);
      add_k(sums, left + pair * 2 + 1, columns);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) _mm256_storeu_ps(place(row, i), sums[row][i]);
}

using MultiplyBlock = void (*)(float*, const float*, const bf16*, std::int64_t, bool, Ahead);

static inline MultiplyBlock choose_block(std::int64_t rows, bool is_whole, bool /*is_first*/) {
  static constexpr MultiplyBlock kWhole[] = {multiply_block<1, 4>, multiply_block<2, 4>, multiply_block<3, 4>};
  static constexpr MultiplyBlock kHalf[] = {multiply_block<3, 2>, multiply_block<4, 2>, multiply_block<5, 2>,
                                            multiply_block<6, 2>};
  return is_whole ? kWhole[rows - 1] : kHalf[rows - 3];
}

#include "row_groups.inc.h"
