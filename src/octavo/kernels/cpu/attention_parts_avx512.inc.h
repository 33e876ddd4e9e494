// The products of attention with 64-byte vectors. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A step of a part is the operand of one 32-bit word of a left row: two k of 32 columns in bf16, one in float32, to
// which float16 is widened, and bf16 if there is no instruction for it.
// Bytes have the layout of bf16 and are widened to 16 bits; their left parts are integers, too
// (attention_integers.inc.h). Each sum adds its steps in order, in registers or resumed from memory, however rows and
// tiles are divided.

#if defined(OCTAVO_HAS_BF16)
template <class Element>
using Left = Element;
#else
template <class Element>
using Left = float;
#endif
template <class Element>
using ByteOrder = bf16;  // pairs of k for each column
constexpr bool kMultipliesBytes = true, kMultipliesIntegers = true;
constexpr int kSumPairs = 8;  // in registers: 8 rows by 32 columns, or fewer rows by more

constexpr std::int64_t kFarAhead = 8192;  // bytes past the next operand, for prefetching into L2

template <class Stored>
struct Step;

#if defined(OCTAVO_HAS_BF16)

template <>
struct Step<bf16> {
  static constexpr std::int64_t kCount = 16;
  static __m512 load(const bf16* part, std::int64_t step, std::int64_t half) {
    return _mm512_loadu_ps(part + half * kTileElements + step * 32);
  }
  static __m512 add(__m512 sum, __m512 left, __m512 right) {
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
  }
};

#else

template <>
struct Step<bf16> {
  static constexpr std::int64_t kCount = 32;
  static __m512 load(const bf16* part, std::int64_t step, std::int64_t half) {
    const __m512i pairs = _mm512_loadu_si512(part + half * kTileElements + step / 2 * 32);
    const __m512i shifted = _mm512_sll_epi32(pairs, _mm_cvtsi64_si128(step % 2 ? 0 : 16));  // even k: lower half
    return (__m512)_mm512_and_si512(shifted, _mm512_set1_epi32(-0x10000));
  }
  static __m512 add(__m512 sum, __m512 left, __m512 right) { return _mm512_fmadd_ps(left, right, sum); }
};

#endif

template <>
struct Step<f16> {
  static constexpr std::int64_t kCount = 32;
  static __m512 load(const f16* part, std::int64_t step, std::int64_t half) {
    return (__m512)widen_lanes(part + step * kPart + half * 16);
  }
  static __m512 add(__m512 sum, __m512 left, __m512 right) { return _mm512_fmadd_ps(left, right, sum); }
};

template <>
struct Step<float> {
  static constexpr std::int64_t kCount = 32;
  static __m512 load(const float* part, std::int64_t step, std::int64_t half) {
    return _mm512_loadu_ps(part + step * kPart + half * 16);
  }
  static __m512 add(__m512 sum, __m512 left, __m512 right) { return _mm512_fmadd_ps(left, right, sum); }
};

template <>
struct Step<std::int8_t> {
  static constexpr std::int64_t kCount = 16;
  static __m512 load(const std::int8_t* part, std::int64_t step, std::int64_t half) {
    const std::int8_t* from = part + half * kTileElements + step * 32;
    return (__m512)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static __m512 add(__m512 sum, __m512 left, __m512 right) {
    return (__m512)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
  }
};

// A left part: [16 rows][steps] words.
template <class Stored>
constexpr std::int64_t kLeftBytes = kTileRows * Step<Stored>::kCount * 4;

// `kRows` rows of one left tile times `kTiles` tiles of 32 columns, with contiguous results: for tile t, the sum over k
// of left part k * right(t, k) (+ result). If kFetches, kTiles parts from next(k) on are prefetched into L1, line by
// line, and lines far ahead of them into L2. Not inlined: there is one copy for each number of rows.
template <int kRows, int kTiles, bool kFetches, class Stored, class Right, class Next>
[[gnu::noinline]] static void multiply_rows(float* result, const char* left, std::int64_t num_k, bool accumulates,
                                            const Right& right, const Next& next) {
  constexpr std::int64_t kSteps = Step<Stored>::kCount;
  constexpr std::int64_t kLines = kTiles * kRightElements * sizeof(Stored) / 64 / kSteps;  // to fetch in each step
  const auto place = [&](int row, int i) {
    return result + i / 2 * 2 * kPairElements + i % 2 * kResultElements + row * 16;
  };
  __m512 sums[kRows][2 * kTiles];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kTiles; ++i)
      sums[row][i] = accumulates ? _mm512_loadu_ps(place(row, i)) : _mm512_setzero_ps();
  for (std::int64_t k = 0; k < num_k; ++k, left += kLeftBytes<Stored>) {
    const Stored* parts[kTiles];
#pragma GCC unroll 8
    for (int tile = 0; tile < kTiles; ++tile) parts[tile] = right(tile, k);
    const char* coming = kFetches ? reinterpret_cast<const char*>(next(k)) : nullptr;
#pragma GCC unroll 1
    for (std::int64_t step = 0; step < kSteps; ++step) {
#pragma GCC unroll 8
      for (std::int64_t line = 0; kFetches && line < kLines; ++line) {
        const char* address = coming + (step * kLines + line) * 64;
        __builtin_prefetch(address);
        __builtin_prefetch(address + kFarAhead, 0, 2);
      }
      __m512 words[kRows];
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        float word;
        __builtin_memcpy(&word, left + (row * kSteps + step) * 4, sizeof word);
        words[row] = _mm512_set1_ps(word);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kTiles; ++i) {
        const __m512 columns = Step<Stored>::load(parts[i / 2], step, i % 2);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) sums[row][i] = Step<Stored>::add(sums[row][i], words[row], columns);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kTiles; ++i) _mm512_storeu_ps(place(row, i), sums[row][i]);
}

// How many of the remaining tiles to multiply at once if rows are few: each sum has a latency of six cycles per step.
static inline std::int64_t tiles_together(std::int64_t num_rows, std::int64_t num_tiles) {
  std::int64_t count = num_rows <= 2 ? 4 : num_rows <= 4 ? 2 : 1;
  while (count > num_tiles) count /= 2;
  return count;
}

template <int kTiles, bool kFetches, class Stored, int kRows = kSumPairs / kTiles, class... Others>
static inline void multiply_some_rows(std::int64_t num_rows, const Others&... others) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_some_rows<kTiles, kFetches, Stored, kRows - 1>(num_rows, others...);
  }
  multiply_rows<kRows, kTiles, kFetches, Stored>(others...);
}

template <bool kFetches, class Stored, class... Others>
static inline void multiply_some_tiles(std::int64_t num_tiles, std::int64_t num_rows, const Others&... others) {
  switch (num_tiles) {
    case 4: return multiply_some_rows<4, kFetches, Stored>(num_rows, others...);
    case 2: return multiply_some_rows<2, kFetches, Stored>(num_rows, others...);
    default: return multiply_some_rows<1, kFetches, Stored>(num_rows, others...);
  }
}

// Rows of one kv head: left parts [row tiles][k]; the rows lie within one row tile, or start at the first of two.
struct LeftRows {
  const char* parts;
  std::int64_t row_tile_stride, first_row, num_rows;  // the stride in bytes
};

// All rows times some tiles, as above; the first rows prefetch.
template <class Stored, class Right, class Next>
static inline void multiply_parts(float* results, LeftRows left, std::int64_t num_tiles, std::int64_t num_k,
                                  bool accumulates, const Right& right, const Next& next) {
  const std::int64_t end_row = left.first_row + left.num_rows;
  for (std::int64_t row = left.first_row, count; row < end_row; row += count) {
    const std::int64_t tile = row / kTileRows, at = row % kTileRows;
    count = smaller(kSumPairs, smaller(kTileRows - at, end_row - row));
    float* result = results + tile * kPairElements + at * 16;
    const char* from = left.parts + tile * left.row_tile_stride + at * Step<Stored>::kCount * 4;
    if (row == left.first_row) {
      multiply_some_tiles<true, Stored>(num_tiles, count, result, from, num_k, accumulates, right, next);
    } else {
      multiply_some_tiles<false, Stored>(num_tiles, count, result, from, num_k, accumulates, right, next);
    }
  }
}
