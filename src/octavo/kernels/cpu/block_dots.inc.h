// Sums of products with bytes of a chunk. Included inside namespace octavo::OCTAVO_LEVEL.
//
// BlockDots: sums of kRows rows, which follow one another in a row tile, by kBlockStrips strips of 16 outputs. `Way` tells
// two encodings of one instruction apart where a level has both.

#if defined(OCTAVO_HAS_AVX2) && !defined(OCTAVO_HAS_VNNI)
typedef Maddubs AnyWay;
#elif !defined(OCTAVO_HAS_AVX2)
struct AnyWay {};
#endif

#if defined(OCTAVO_HAS_AVX512)

constexpr int kMaxBlockRows = 8, kBlockStrips = 2;

typedef std::int32_t BlockQuad __attribute__((may_alias));

template <class Way, int kRows>
struct BlockDots {
  __m512i sums[kBlockStrips][kRows];

  [[gnu::always_inline]] void begin(int row, std::int32_t value) { sums[0][row] = sums[1][row] = _mm512_set1_epi32(value); }
  // 4 of k of both strips. Not by intrinsics: GCC 12 would load those of many rows at once, and spill sums.
  [[gnu::always_inline]] void add(const std::uint8_t* right, const std::uint8_t* other, const std::int8_t* left) {
    const __m512i first = _mm512_loadu_si512(right), second = _mm512_loadu_si512(other);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      __m512i quad;
      asm volatile("vpbroadcastd %1, %0" : "=v"(quad) : "m"(*reinterpret_cast<const BlockQuad*>(left + row * kTileK)));
      sums[0][row] = _mm512_dpbusd_epi32(sums[0][row], first, quad);
      sums[1][row] = _mm512_dpbusd_epi32(sums[1][row], second, quad);
    }
  }
  [[gnu::always_inline]] f32x16 sum(int strip, int row) const { return (f32x16)_mm512_cvtepi32_ps(sums[strip][row]); }
};

#elif defined(__AVX2__)

constexpr int kMaxBlockRows = 4, kBlockStrips = 1;

template <class Way, int kRows>
struct BlockDots {
  __m256i sums[kRows][2];

  [[gnu::always_inline]] void begin(int row, std::int32_t value) { sums[row][0] = sums[row][1] = _mm256_set1_epi32(value); }
  [[gnu::always_inline]] void add(const std::uint8_t* right, const std::uint8_t*, const std::int8_t* left) {
    const __m256i* weights = reinterpret_cast<const __m256i*>(right);
    const __m256i halves[2] = {_mm256_loadu_si256(weights), _mm256_loadu_si256(weights + 1)};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      std::int32_t four;
      __builtin_memcpy(&four, left + row * kTileK, sizeof four);
      const __m256i quad = _mm256_set1_epi32(four);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) add_quad(sums[row][half], halves[half], quad);
    }
  }
  [[gnu::always_inline]] f32x16 sum(int, int row) const {
    return {(f32x16::Half)_mm256_cvtepi32_ps(sums[row][0]), (f32x16::Half)_mm256_cvtepi32_ps(sums[row][1])};
  }

 private:
  [[gnu::always_inline]] static void add_quad(__m256i& sum, __m256i weights, __m256i quad) {
#if defined(OCTAVO_HAS_VNNI)
    Way::add(sum, weights, quad);
#else
    // Of signed weights, |w| and the row's q with the sign of w: 2 * 128 * 127 is just within 16 bits.
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(quad, weights));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
  }
};

#else

constexpr int kMaxBlockRows = 2, kBlockStrips = 1;

template <class Way, int kRows>
struct BlockDots {
  i32x16 sums[kRows];

  void begin(int row, std::int32_t value) { sums[row] = i32x16{} + value; }
  void add(const std::uint8_t* right, const std::uint8_t*, const std::int8_t* left) {
    const u8x64 weights = load<u8x64>(right);
    for (int row = 0; row < kRows; ++row) {
      std::uint32_t quad;
      __builtin_memcpy(&quad, left + row * kTileK, sizeof quad);
      sums[row] = add_quad8(sums[row], weights, quad);
    }
  }
  f32x16 sum(int, int row) const { return convert<f32x16>(sums[row]); }
};

#endif
