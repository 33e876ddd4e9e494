// Integer products with vpdpbusd: four products at once, summed in 32 bits. Included from integer_avx2.inc.h.
//
// The instruction requires unsigned weights: 128 or 8 is added to them, and subtracted from the initial sums. There are
// two encodings: AVX-VNNI's on processors without AVX-512, AVX-512's on older ones.

constexpr std::int32_t kBias8 = 128;

struct VexDots {
  [[gnu::always_inline]] static void add(__m256i& sum, __m256i weights, __m256i quad) {
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(quad));
  }
  [[gnu::always_inline]] static void add_words(__m256i& sum, __m256i weights, __m256i quad) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(quad));
  }
};

struct EvexDots {
  [[gnu::always_inline]] static void add(__m256i& sum, __m256i weights, __m256i quad) {
    asm volatile("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(quad));
  }
  [[gnu::always_inline]] static void add_words(__m256i& sum, __m256i weights, __m256i quad) {
    asm("%{evex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(quad));
  }
};

// sums[row][half of 16 outputs] += one unit of k, 8 quads, of rows that follow one another within a row tile.
template <class Dots, int kRows>
static inline void add_bytes(__m256i (*sums)[2], const std::int8_t* left, const std::uint8_t* right) {
  const __m256i bias = _mm256_set1_epi8(-128);
  for (std::int64_t quad = 0; quad < 8; ++quad) {
    const __m256i weights[2] = {_mm256_xor_si256(load_bytes(right + quad * 64), bias),
                                _mm256_xor_si256(load_bytes(right + quad * 64 + 32), bias)};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m256i q = load_quad(left + row * kTileK + quad * 4);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) Dots::add(sums[row][half], weights[half], q);
    }
  }
}

// The same of nibbles.
template <class Dots, int kRows>
static inline void add_nibbles(__m256i (*sums)[2], const std::int8_t* left, const std::uint8_t* right) {
  const __m256i low = _mm256_set1_epi8(0x0f);
  for (std::int64_t line = 0; line < 4; ++line) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i weights = load_bytes(right + line * 64 + half * 32);
      const __m256i first = _mm256_and_si256(weights, low), second = _mm256_and_si256(_mm256_srli_epi16(weights, 4), low);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const std::int8_t* q = left + row * kTileK + line * 8;
        Dots::add(sums[row][half], first, load_quad(q));
        Dots::add(sums[row][half], second, load_quad(q + 4));
      }
    }
  }
}
