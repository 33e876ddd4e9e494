// Two-level integers: 4-bit weights that encode 8-bit ones. Included inside namespace octavo::OCTAVO_LEVEL.
//
// i = (q * m + 4) >> 3, with q in -8 ... 7 for each weight, m in -127 ... 127 for each output and group of 32 k; i is in
// -127 ... 127, and w = scale * i. Products are those of 8 bits, exact over all of k, for any number of rows: the only
// cost of 4 bits is that tiles are expanded once before they are multiplied.
//
// A k tile is two tiles of nibbles, [8 lines][32 words], and a line of m [2 groups][32 outputs]. A line holds two quads of k
// of 16 outputs. Of the word 8 * b + j, nibble 0 is output 4 * b + j / 4 and nibble 1 the output two after it, both k = j % 4
// of the first quad; nibbles 2 and 3 are the same of the second. So two vectors of words, narrowed, are a line of bytes.

constexpr std::int64_t kTwoLevelGroup = 32, kTwoLevelTileBytes = 512, kTwoLevelBytes = 2 * kTwoLevelTileBytes + 64;

static inline std::int32_t two_level_value(std::int32_t q, std::int32_t m) { return (q * m + 4) >> 3; }

// m of 16 outputs, in the layout of their words: nibbles 0 and 2, and nibbles 1 and 3.
struct Multipliers {
  i16x32 even, odd;
};

// A line's two quads of k [16 outputs][4].
struct ExpandedLine {
  i8x64 first, second;
};

#if defined(OCTAVO_HAS_AVX512)

static inline Multipliers load_multipliers(const std::uint8_t* from) {
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m512i even = _mm512_set4_epi32(0x05040504, 0x05040504, 0x01000100, 0x01000100);
  const __m512i odd = _mm512_set4_epi32(0x0d0c0d0c, 0x0d0c0d0c, 0x09080908, 0x09080908);
  return {(i16x32)_mm512_shuffle_epi8(wide, even), (i16x32)_mm512_shuffle_epi8(wide, odd)};
}

static inline ExpandedLine expand_line(const std::uint8_t* from, const Multipliers& m) {
  const __m512i words = _mm512_loadu_si512(from), top = _mm512_set1_epi16(static_cast<short>(0xf000));
  const __m512i nibbles[4] = {_mm512_slli_epi16(words, 12), _mm512_and_si512(_mm512_slli_epi16(words, 8), top),
                              _mm512_and_si512(_mm512_slli_epi16(words, 4), top), _mm512_and_si512(words, top)};
  // (4096 * q * m + 2^14) >> 15
  const __m512i values[4] = {_mm512_mulhrs_epi16(nibbles[0], (__m512i)m.even), _mm512_mulhrs_epi16(nibbles[1], (__m512i)m.odd),
                             _mm512_mulhrs_epi16(nibbles[2], (__m512i)m.even), _mm512_mulhrs_epi16(nibbles[3], (__m512i)m.odd)};
  return {(i8x64)_mm512_packs_epi16(values[0], values[1]), (i8x64)_mm512_packs_epi16(values[2], values[3])};
}

#else

#if defined(__AVX2__)

static inline Multipliers load_multipliers(const std::uint8_t* from) {
  const __m256i even = _mm256_set_epi32(0x05040504, 0x05040504, 0x01000100, 0x01000100, 0x05040504, 0x05040504, 0x01000100, 0x01000100);
  const __m256i odd = _mm256_add_epi8(even, _mm256_set1_epi8(8));
  const __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m256i high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8)));
  using Half = i16x32::Half;
  return {{(Half)_mm256_shuffle_epi8(low, even), (Half)_mm256_shuffle_epi8(high, even)},
          {(Half)_mm256_shuffle_epi8(low, odd), (Half)_mm256_shuffle_epi8(high, odd)}};
}

// (4096 * q * m + 2^14) >> 15
static inline i16x32 two_level_values(i16x32 words, int shift, i16x32 m) {
  const i16x32 nibbles = (words << shift) & static_cast<std::int16_t>(0xf000);
  return {(i16x32::Half)_mm256_mulhrs_epi16((__m256i)nibbles.low, (__m256i)m.low),
          (i16x32::Half)_mm256_mulhrs_epi16((__m256i)nibbles.high, (__m256i)m.high)};
}

#else

static inline Multipliers load_multipliers(const std::uint8_t* from) {
  std::int16_t lanes[2][32];
  for (int word = 0; word < 32; ++word)
    for (int odd = 0; odd < 2; ++odd)
      lanes[odd][word] = static_cast<std::int8_t>(from[word / 8 * 4 + odd * 2 + word % 8 / 4]);
  return {load<i16x32>(lanes[0]), load<i16x32>(lanes[1])};
}

static inline i16x32 two_level_values(i16x32 words, int shift, i16x32 m) {
  return (((i16x32)((words << shift) & static_cast<std::int16_t>(0xf000)) >> 12) * m + 4) >> 3;
}

#endif

// Words 8 * b + j of both become bytes 16 * b + j and 16 * b + 8 + j.
static inline i8x64 narrow_words(i16x32 even, i16x32 odd) {
#if defined(__AVX2__)
  return {(i8x64::Half)_mm256_packs_epi16((__m256i)even.low, (__m256i)odd.low),
          (i8x64::Half)_mm256_packs_epi16((__m256i)even.high, (__m256i)odd.high)};
#else
  std::int8_t result[64];
  for (int word = 0; word < 32; ++word) {
    result[word / 8 * 16 + word % 8] = static_cast<std::int8_t>(even[word]);
    result[word / 8 * 16 + 8 + word % 8] = static_cast<std::int8_t>(odd[word]);
  }
  return load<i8x64>(result);
#endif
}

static inline ExpandedLine expand_line(const std::uint8_t* from, const Multipliers& m) {
  const i16x32 words = load<i16x32>(from);
  return {narrow_words(two_level_values(words, 12, m.even), two_level_values(words, 8, m.odd)),
          narrow_words(two_level_values(words, 4, m.even), two_level_values(words, 0, m.odd))};
}

#endif

// One k tile: [2 tiles][16 quads][16 outputs][4].
static inline void expand_two_level(const std::uint8_t* from, std::uint8_t* to) {
  for (std::int64_t tile = 0; tile < 2; ++tile) {
    for (std::int64_t group = 0; group < 2; ++group) {
      const Multipliers m = load_multipliers(from + 2 * kTwoLevelTileBytes + group * 32 + tile * 16);
      for (std::int64_t line = group * 4; line < group * 4 + 4; ++line) {
        const ExpandedLine expanded = expand_line(from + tile * kTwoLevelTileBytes + line * 64, m);
#if defined(OCTAVO_HAS_AVX512)
        __builtin_memcpy(to + tile * 1024 + line * 128, &expanded, sizeof expanded);
#else  // what is a pair of vectors would be copied through the stack
        store(to + tile * 1024 + line * 128, expanded.first);
        store(to + tile * 1024 + line * 128 + 64, expanded.second);
#endif
      }
    }
  }
}

// Puts 64 q of an output into its column of a tile of zeros.
static inline void put_two_level_column(std::uint8_t* tile, std::int64_t column, const std::int8_t* values) {
  for (std::int64_t k = 0; k < 64; ++k) {
    const std::int64_t word = column / 4 * 8 + column % 2 * 4 + k % 4, nibble = k / 4 % 2 * 2 + column % 4 / 2;
    tile[k / 8 * 64 + word * 2 + nibble / 2] |= static_cast<std::uint8_t>((values[k] & 15) << (nibble % 2 * 4));
  }
}
