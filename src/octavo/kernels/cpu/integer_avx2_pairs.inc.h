// Integer products without vpdpbusd. Included from integer_avx2.inc.h.
//
// vpmaddubsw requires one unsigned operand and adds pairs of products with saturation to 16 bits. For 8-bit weights it
// gets |w|, and the row's q with the sign of w: 2 * 128 * 127 just fits. To 4-bit weights 8 is added, and the pairs of a
// whole unit are summed in 16 bits: 16 * 15 * 127 = 30,480.

constexpr std::int32_t kBias8 = 0;

struct Maddubs {  // the only one
  static void add_words(__m256i& sum, __m256i weights, __m256i quad) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(weights, quad));
  }
};

// Keeps the compiler from starting a row before it has finished the previous one: sums would not fit into registers.
static inline void hold(__m256i& value) { asm volatile("" : "+x"(value)); }

static inline __m256i add_pairs(__m256i sum, __m256i pairs) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// sums[row][half of 16 outputs] += one unit of k, 8 quads, of rows that follow one another within a row tile.
template <class Dots, int kRows>
static inline void add_bytes(__m256i (*sums)[2], const std::int8_t* left, const std::uint8_t* right) {
  for (std::int64_t quad = 0; quad < 8; ++quad) {
    const __m256i weights[2] = {load_bytes(right + quad * 64), load_bytes(right + quad * 64 + 32)};
    const __m256i magnitudes[2] = {_mm256_abs_epi8(weights[0]), _mm256_abs_epi8(weights[1])};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      __m256i q = load_quad(left + row * kTileK + quad * 4);
      hold(q);
#pragma GCC unroll 8
      for (int half = 0; half < 2; ++half) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitudes[half], _mm256_sign_epi8(q, weights[half]));
        sums[row][half] = add_pairs(sums[row][half], pairs);
        hold(sums[row][half]);
      }
    }
  }
}

// The same of nibbles.
template <class Dots, int kRows>
static inline void add_nibbles(__m256i (*sums)[2], const std::int8_t* left, const std::uint8_t* right) {
  const __m256i low = _mm256_set1_epi8(0x0f);
  __m256i pairs[kRows][2] = {};
  for (std::int64_t line = 0; line < 4; ++line) {
#pragma GCC unroll 8
    for (int half = 0; half < 2; ++half) {
      const __m256i weights = load_bytes(right + line * 64 + half * 32);
      const __m256i first = _mm256_and_si256(weights, low), second = _mm256_and_si256(_mm256_srli_epi16(weights, 4), low);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const std::int8_t* q = left + row * kTileK + line * 8;
        const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(first, load_quad(q)),
                                              _mm256_maddubs_epi16(second, load_quad(q + 4)));
        pairs[row][half] = _mm256_add_epi16(pairs[row][half], both);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int half = 0; half < 2; ++half) sums[row][half] = add_pairs(sums[row][half], pairs[row][half]);
}
