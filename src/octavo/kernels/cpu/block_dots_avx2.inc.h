// BlockDots by vectors of 32 bytes, at the levels of AVX2. Included from block_dots.inc.h.
//
// Without vpdpbusd, vpmaddubsw adds pairs of products with saturation to 16 bits. Codes of up to 6 bits are used
// unsigned, and the pairs of a few quads are added before they are widened: SmallCodes. For others it gets |w|, and the
// row's q with the sign of w: 2 * 128 * 127 just fits into 16 bits.

constexpr int kBlockStrips = 1;

#if defined(OCTAVO_HAS_VNNI)

template <class Way, int kSubs, bool kHasOffsets>
constexpr int kMaxBlockRows = 4;

template <class Of, class Multiply>
static inline void with_way(const Multiply& multiply) {
  has_avx_vnni() ? multiply(VexDots{}) : multiply(EvexDots{});
}

template <class Way, int kStrips, int kRows>
struct BlockDots {
  __m256i sums[kRows][2];

  [[gnu::always_inline]] BlockDots(const std::int32_t* begin, int bias) {
    typedef i32x16::Half Half;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
      sums[row][0] = sums[row][1] = bias == 0 ? __m256i{} : (__m256i)with_bias((Half)_mm256_set1_epi32(begin[row]), bias);
  }
  [[gnu::always_inline]] void add(const u8x64 (&codes)[1], const std::int8_t* left, int) {
    const __m256i weights[2] = {(__m256i)codes[0].low, (__m256i)codes[0].high};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m256i quad = load_quad(left + row * kTileK);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) Way::add(sums[row][half], weights[half], quad);
    }
  }
  [[gnu::always_inline]] f32x16 sum(int, int row) const {
    return {(f32x16::Half)_mm256_cvtepi32_ps(sums[row][0]), (f32x16::Half)_mm256_cvtepi32_ps(sums[row][1])};
  }
};

#else

template <class Way, int kSubs, bool kHasOffsets>
constexpr int kMaxBlockRows = 6;

// How many quads' pairs are summed in 16 bits, which hold kQuads * 2 * (2^bits - 1) * 127.
template <int kQuads>
struct SmallCodes {};
struct SignedCodes {};

// Calls multiply(way) with the right way for a type's codes.
template <class Of, class Multiply>
static inline void with_way(const Multiply& multiply) {
  if constexpr (!has_small_codes(Of::traits)) {
    multiply(SignedCodes{});
  } else {
    multiply(SmallCodes<Of::traits.bits == 6 ? 2 : Of::traits.bits == 5 || Of::traits.is_table ? 4 : 8>{});
  }
}

template <class Way, int kStrips, int kRows>
struct BlockDots;

template <int kQuads, int kStrips, int kRows>
struct BlockDots<SmallCodes<kQuads>, kStrips, kRows> {
  __m256i sums[kRows][2], pairs[kRows][2] = {};

  [[gnu::always_inline]] BlockDots(const std::int32_t* begin, int bias) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
      sums[row][0] = sums[row][1] = bias == 0 ? __m256i{} : _mm256_set1_epi32(begin[row] * bias);
  }
  [[gnu::always_inline]] void add(const u8x64 (&codes)[1], const std::int8_t* left, int num_left) {
    const __m256i weights[2] = {(__m256i)codes[0].low, (__m256i)codes[0].high};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m256i quad = load_quad(left + row * kTileK);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        pairs[row][half] = _mm256_add_epi16(pairs[row][half], _mm256_maddubs_epi16(weights[half], quad));
        hold(pairs[row][half]);  // GCC 12 would add up a tree of all products, and spill them
        if (num_left % kQuads != 0) continue;
        sums[row][half] = add_pairs(sums[row][half], pairs[row][half]);
        pairs[row][half] = __m256i{};
      }
    }
  }
  [[gnu::always_inline]] f32x16 sum(int, int row) const {
    return {(f32x16::Half)_mm256_cvtepi32_ps(sums[row][0]), (f32x16::Half)_mm256_cvtepi32_ps(sums[row][1])};
  }
};

template <int kStrips, int kRows>
struct BlockDots<SignedCodes, kStrips, kRows> {
  __m256i sums[kRows][2] = {};

  [[gnu::always_inline]] BlockDots(const std::int32_t*, int) {}
  [[gnu::always_inline]] void add(const u8x64 (&codes)[1], const std::int8_t* left, int) {
    const __m256i weights[2] = {(__m256i)codes[0].low, (__m256i)codes[0].high};
    const __m256i magnitudes[2] = {_mm256_abs_epi8(weights[0]), _mm256_abs_epi8(weights[1])};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m256i quad = load_quad(left + row * kTileK);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitudes[half], _mm256_sign_epi8(quad, weights[half]));
        sums[row][half] = add_pairs(sums[row][half], pairs);
        hold(sums[row][half]);
      }
    }
  }
  [[gnu::always_inline]] f32x16 sum(int, int row) const {
    return {(f32x16::Half)_mm256_cvtepi32_ps(sums[row][0]), (f32x16::Half)_mm256_cvtepi32_ps(sums[row][1])};
  }
};

#endif
