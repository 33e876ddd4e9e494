// The parts of attention in bf16, in the layout of matrix tiles. Included from attention_parts.inc.h.

#if defined(OCTAVO_SIMPLE_PARTS)
#if defined(OCTAVO_HAS_AMX)

// One or two row tiles.
template <bool kIsDouble, class Right, class Next>
static inline void multiply_tiles(float* result, const bf16* left, std::int64_t row_tile_stride, std::int64_t num_k,
                                  const Right& right, const Next& next) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kIsDouble) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t k = 0; k < num_k; ++k) {
    const bf16 *part = right(k), *coming = next(k);
    for (int line = 0; line < 32; ++line) __builtin_prefetch(coming + line * 32);
    _tile_loadd(6, part, 64);
    _tile_loadd(4, left + k * kLeftElements, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, part + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kIsDouble) {
      _tile_loadd(5, left + row_tile_stride + k * kLeftElements, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, result, 64);
  _tile_stored(1, result + kResultElements, 64);
  if constexpr (kIsDouble) {
    _tile_stored(2, result + 2 * kResultElements, 64);
    _tile_stored(3, result + 3 * kResultElements, 64);
  }
}

// result = sum over k of left part k * right(k). next(k) is the operand needed soon after right(k), here or in the next
// product: it is prefetched into L1.
template <class Right, class Next>
static inline void multiply_parts(float* result, const bf16* left, std::int64_t row_tile_stride, std::int64_t num_rows,
                                  std::int64_t num_k, const Right& right, const Next& next) {
  if (num_rows > 16) {
    multiply_tiles<true>(result, left, row_tile_stride, num_k, right, next);
  } else {
    multiply_tiles<false>(result, left, row_tile_stride, num_k, right, next);
  }
}

#else

template <class Right, class Next>
static inline void multiply_parts(float* result, const bf16* left, std::int64_t row_tile_stride, std::int64_t num_rows,
                                  std::int64_t num_k, const Right& right, const Next&) {
  for (std::int64_t k = 0; k < num_k; ++k)
    multiply_tiles(result, left + k * kLeftElements, row_tile_stride, num_rows, right(k), 1, k > 0, {});
}

#endif
#endif

// Writes keys [16][`stride`] of 16 tokens to one half of a tile, and their values: whole cache lines at a time.
#if defined(OCTAVO_HAS_AVX512)

// Swaps element i of vector j with element j of vector i.
static inline void transpose(u32x16* rows) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int width = 8; width > 0; width /= 2) {
    // Swaps the off-diagonal squares of `width` x `width`.
    const i32x16 is_right = (lanes & width) != 0;
    const u32x16 upper = (u32x16)(is_right ? lanes + 16 - width : lanes);
    const u32x16 lower = (u32x16)(is_right ? lanes + 16 : lanes + width);
    for (int row = 0; row < 16; ++row) {
      if (row & width) continue;
      const u32x16 first = rows[row], second = rows[row + width];
#if defined(__clang__)
      rows[row] = (u32x16)_mm512_permutex2var_epi32((__m512i)first, (__m512i)upper, (__m512i)second);
      rows[row + width] = (u32x16)_mm512_permutex2var_epi32((__m512i)first, (__m512i)lower, (__m512i)second);
#else  // GCC finds shorter instructions
      rows[row] = __builtin_shuffle(first, second, upper);
      rows[row + width] = __builtin_shuffle(first, second, lower);
#endif
    }
  }
}

static inline void put_16_keys(bf16* tile, std::int64_t first, const bf16* keys, std::int64_t stride,
                               std::int64_t padded) {
  bf16* to = tile + first / 16 * kTileElements;
  for (std::int64_t part = 0; part < padded; part += kPart, to += kRightElements) {
    u32x16 rows[16];
    for (std::int64_t row = 0; row < 16; ++row) __builtin_memcpy(&rows[row], keys + row * stride + part, 64);
    transpose(rows);
    __builtin_memcpy(to, rows, sizeof rows);
  }
}

#else

// Interleaves words of two vectors: of the lower or of the upper half of each 16 bytes.
#if defined(__AVX2__)
static inline Words interleave_low(Words a, Words b) { return shuffle<0, 8, 1, 9, 4, 12, 5, 13>(a, b); }
static inline Words interleave_high(Words a, Words b) { return shuffle<2, 10, 3, 11, 6, 14, 7, 15>(a, b); }
#else
static inline Words interleave_low(Words a, Words b) { return shuffle<0, 4, 1, 5>(a, b); }
static inline Words interleave_high(Words a, Words b) { return shuffle<2, 6, 3, 7>(a, b); }
#endif

// Transposes 16 x 16 words: rows `stride` elements apart to contiguous rows. Squares of 4 x 4 at a time, as many below
// each other as a register holds.
static inline void transpose(const bf16* from, std::int64_t stride, bf16* to) {
  constexpr std::int64_t kRows = sizeof(Words) / 4;
  for (std::int64_t row = 0; row < 16; row += kRows) {
    for (std::int64_t column = 0; column < 16; column += 4) {
      Words rows[4];
      for (std::int64_t i = 0; i < 4; ++i) {
        const bf16* at = from + (row + i) * stride + column * 2;
#if defined(__AVX2__)
        const __m128i* below = reinterpret_cast<const __m128i*>(at + 4 * stride);
        rows[i] = (Words)_mm256_loadu2_m128i(below, reinterpret_cast<const __m128i*>(at));
#else
        rows[i] = load<Words>(at);
#endif
      }
      const Words even[2] = {interleave_low(rows[0], rows[2]), interleave_high(rows[0], rows[2])};
      const Words odd[2] = {interleave_low(rows[1], rows[3]), interleave_high(rows[1], rows[3])};
      for (std::int64_t i = 0; i < 4; ++i) {
        const Words turned = i % 2 ? interleave_high(even[i / 2], odd[i / 2]) : interleave_low(even[i / 2], odd[i / 2]);
        store(to + (column + i) * 32 + row * 2, turned);
      }
    }
  }
}

static inline void put_16_keys(bf16* tile, std::int64_t first, const bf16* keys, std::int64_t stride,
                               std::int64_t padded) {
  bf16* to = tile + first / 16 * kTileElements;
  for (std::int64_t part = 0; part < padded; part += kPart, to += kRightElements) transpose(keys + part, stride, to);
}

#endif

// Writes a token's key [P] to position `at` of a tile.
static inline void put_key(bf16* tile, std::int64_t at, const bf16* key, std::int64_t padded) {
  bf16* to = tile + at / 16 * kTileElements + at % 16 * 2;
  for (std::int64_t part = 0; part < padded; part += kPart, to += kRightElements)
    for (std::int64_t pair = 0; pair < 16; ++pair) __builtin_memcpy(to + pair * 32, key + part + pair * 2, 4);
}

// Writes a token's value [P] to position `at` of a tile. The other value of its pair may be written concurrently.
static inline void put_value(bf16* tile, std::int64_t at, const bf16* value, std::int64_t padded) {
  bf16* to = tile + at / 2 * 32;
  for (std::int64_t i = 0; i < padded; i += 16, to += kTileElements) {
#if defined(OCTAVO_HAS_AVX512)
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + i)));
    if (at % 2 == 0) {
      _mm512_mask_storeu_epi16(to, 0x55555555, wide);
    } else {
      _mm512_mask_storeu_epi16(to, 0xaaaaaaaa, _mm512_slli_epi32(wide, 16));
    }
#else
    for (std::int64_t lane = 0; lane < 16; ++lane) to[lane * 2 + at % 2] = value[i + lane];
#endif
  }
}

static inline void put_16_values(bf16* tile, std::int64_t first, const bf16* values, std::int64_t stride,
                                 std::int64_t padded) {
  bf16* to = tile + first / 2 * 32;
  for (std::int64_t i = 0; i < padded; i += 16, to += kTileElements) {
    for (std::int64_t pair = 0; pair < 8; ++pair) {
      const u16x16 even = load<u16x16>(values + 2 * pair * stride + i);
      const u16x16 odd = load<u16x16>(values + (2 * pair + 1) * stride + i);
      store(to + pair * 32, (u32x16)widen(odd) | (u32x16)widen(even) >> 16);
    }
  }
}

// Whether all of a tile's values are finite: then zero weights cancel them.
static inline bool is_finite(const bf16* values, std::int64_t count) {
  u16x16 any = {};
  for (std::int64_t i = 0; i < count; i += 16) {
    const u16x16 half = load<u16x16>(values + i);
    any |= (u16x16)((half & 0x7f80) == 0x7f80);
  }
  std::uint64_t words[4];
  __builtin_memcpy(words, &any, sizeof words);
  return (words[0] | words[1] | words[2] | words[3]) == 0;
}
