// The products of attention by AVX2. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Left parts are float32, so that an element is broadcast straight from memory. Right parts are taken as they lie in
// the pool, as bf16, float32 or bytes, and widened in registers, of which there are 16: sums of 4 rows x 16 columns, or
// of 2 rows x 32. Each sum takes its k one after the other, however rows are cut.

template <class Element>
using Left = float;
constexpr bool kMultipliesBytes = true;

// As of bf16: see tiles_avx2.inc.h.
template <bool kIsOdd>
static inline __m256 load_columns(const std::int8_t* part, std::int64_t pair, std::int64_t vector) {
  const std::int8_t* from = part + (pair * 2 + kIsOdd) * kPart + vector * 8;
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
template <bool kIsOdd>
static inline __m256 load_columns(const float* part, std::int64_t pair, std::int64_t vector) {
  return _mm256_loadu_ps(part + (pair * 2 + kIsOdd) * kPart + vector * 8);
}

// `kRows` rows of one left tile, times columns 8 * first_vector ... of all parts; asks for what comes next, or not.
template <int kRows, int kVectors, class Right, class Next>
static inline void multiply_columns(float* result, const float* left, std::int64_t num_k, std::int64_t first_vector,
                                    const Right& right, const Next& next, bool fetches) {
  __m256 sums[kRows][kVectors], columns[kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) sums[row][vector] = _mm256_setzero_ps();
  for (std::int64_t k = 0; k < num_k; ++k, left += kLeftElements) {
    const auto *part = right(k), *coming = fetches ? next(k) : part;
    for (std::int64_t pair = 0; pair < kPart / 2; ++pair) {
      for (std::size_t line = 0; line < sizeof *part; ++line)  // as many as a pair of k has
        __builtin_prefetch(reinterpret_cast<const char*>(coming + pair * 2 * kPart) + line * 64);
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; ++vector)
        columns[vector] = load_columns<false>(part, pair, first_vector + vector);
      add_k(sums, left + pair * 2, columns);
      asm volatile("" ::: "memory");  // or GCC loads a pair but once, and has no registers left for sums
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; ++vector)
        columns[vector] = load_columns<true>(part, pair, first_vector + vector);
      add_k(sums, left + pair * 2 + 1, columns);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) {
      const std::int64_t at = first_vector + vector;
      _mm256_storeu_ps(result + at / 2 * kResultElements + row * 16 + at % 2 * 8, sums[row][vector]);
    }
}

template <int kRows, class Right, class Next>
static inline void multiply_rows(float* result, const float* left, std::int64_t num_k, const Right& right,
                                 const Next& next, bool fetches) {
  if constexpr (kRows <= 2) {
    multiply_columns<kRows, 4>(result, left, num_k, 0, right, next, fetches);
  } else {
    multiply_columns<kRows, 2>(result, left, num_k, 0, right, next, fetches);
    multiply_columns<kRows, 2>(result, left, num_k, 2, right, next, false);
  }
}

template <class Right, class Next>
static inline void multiply_parts(float* result, const float* left, std::int64_t row_tile_stride, std::int64_t num_rows,
                                  std::int64_t num_k, const Right& right, const Next& next) {
  for (std::int64_t row = 0; row < num_rows; row += 4) {
    float* to = result + row / 16 * 2 * kResultElements + row % 16 * 16;
    const float* from = left + row / 16 * row_tile_stride + row % 16 * kPart;
    switch (smaller(4, num_rows - row)) {
      case 1: multiply_rows<1>(to, from, num_k, right, next, row == 0); break;
      case 2: multiply_rows<2>(to, from, num_k, right, next, row == 0); break;
      case 3: multiply_rows<3>(to, from, num_k, right, next, row == 0); break;
      default: multiply_rows<4>(to, from, num_k, right, next, row == 0);
    }
  }
}
