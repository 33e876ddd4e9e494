// The products of attention by AVX2. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Left parts are float32, so that elements are broadcast directly from memory. Right parts are read from the pool as
// elements or bytes, and widened in registers, of which there are 16: sums of 6 rows x 16 columns, or of 2 rows x
// 32. Each sum adds its k in order, however rows are divided.

template <class Element>
using Left = float;
template <class Element>
using ByteOrder = float;  // eight columns of one k are widened at once
constexpr bool kMultipliesBytes = true, kMultipliesIntegers = false;

// As for bf16: see tiles_widened.inc.h.
template <bool kIsOdd>
static inline Register load_columns(const std::int8_t* part, std::int64_t pair, std::int64_t vector) {
  const std::int8_t* from = part + (pair * 2 + kIsOdd) * kPart + vector * 8;
  return (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
template <bool kIsOdd>
static inline Register load_columns(const float* part, std::int64_t pair, std::int64_t vector) {
  return load<Register>(part + (pair * 2 + kIsOdd) * kPart + vector * 8);
}
template <bool kIsOdd>
static inline Register load_columns(const f16* part, std::int64_t pair, std::int64_t vector) {
  return widen_lanes(part + (pair * 2 + kIsOdd) * kPart + vector * 8);
}

// The same part, from columns 16 * half on.
template <class Element>
static inline const Element* from_half(const Element* part, int half) {
  return part + half * 16;
}
static inline const bf16* from_half(const bf16* part, int half) { return part + half * kTileElements; }

// `kRows` rows of one left tile times one half or both halves of all parts, with or without prefetching. Not inlined:
// otherwise GCC 12 spills sums of 6 rows to memory, and a prompt takes half as long again.
template <int kRows, int kVectors, bool kFetches, class Right, class Next>
[[gnu::noinline]] static void multiply_columns(float* result, const float* left, std::int64_t num_k, int half, const Right& right,
                                    const Next& next) {
  Register sums[kRows][kVectors], columns[kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) sums[row][vector] = Register{};
  for (std::int64_t k = 0; k < num_k; ++k, left += kLeftElements) {
    const auto *part = from_half(right(k), half), *coming = kFetches ? next(k) : nullptr;
    for (std::int64_t pair = 0; pair < kPart / 2; ++pair) {
      for (std::size_t line = 0; kFetches && line < sizeof *part; ++line)  // the lines of a pair of k
        __builtin_prefetch(reinterpret_cast<const char*>(coming + pair * 2 * kPart) + line * 64);
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; ++vector) columns[vector] = load_columns<false>(part, pair, vector);
      add_k(sums, left + pair * 2, columns);
      // Otherwise GCC 12 loads a pair only once and runs out of registers; with 6 rows this is not needed.
      if constexpr (kRows <= 4) asm volatile("" ::: "memory");
#pragma GCC unroll 8
      for (int vector = 0; vector < kVectors; ++vector) columns[vector] = load_columns<true>(part, pair, vector);
      add_k(sums, left + pair * 2 + 1, columns);
    }
  }
  result += half * kResultElements;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector)
      store(result + vector / 2 * kResultElements + row * 16 + vector % 2 * 8, sums[row][vector]);
}

template <int kRows, bool kFetches, class Right, class Next>
static inline void multiply_rows(float* result, const float* left, std::int64_t num_k, const Right& right,
                                 const Next& next) {
  if constexpr (kRows <= 2) {
    multiply_columns<kRows, 4, kFetches>(result, left, num_k, 0, right, next);
  } else {
    multiply_columns<kRows, 2, kFetches>(result, left, num_k, 0, right, next);
    multiply_columns<kRows, 2, false>(result, left, num_k, 1, right, next);
  }
}

// Up to 8 rows of one left tile, with prefetching; beyond that 6 at a time, without: they are bound by compute.
template <class Right, class Next>
static inline std::int64_t multiply_some_rows(float* result, const float* left, std::int64_t num_rows,
                                              std::int64_t num_k, const Right& right, const Next& next) {
  if (num_rows > 8) return multiply_rows<6, false>(result, left, num_k, right, next), 6;
  if (num_rows > 4) return multiply_rows<4, false>(result, left, num_k, right, next), 4;
  switch (num_rows) {
    case 1: return multiply_rows<1, true>(result, left, num_k, right, next), 1;
    case 2: return multiply_rows<2, true>(result, left, num_k, right, next), 2;
    case 3: return multiply_rows<3, true>(result, left, num_k, right, next), 3;
    default: return multiply_rows<4, true>(result, left, num_k, right, next), 4;
  }
}

template <class Right, class Next>
static inline void multiply_parts(float* result, const float* left, std::int64_t row_tile_stride, std::int64_t num_rows,
                                  std::int64_t num_k, const Right& right, const Next& next) {
  for (std::int64_t row = 0; row < num_rows;) {
    const std::int64_t tile = row / 16, at = row % 16;
    row += multiply_some_rows(result + tile * 2 * kResultElements + at * 16, left + tile * row_tile_stride + at * kPart,
                              smaller(16 - at, num_rows - row), num_k, right, next);
  }
}
