// Multiply-adds of float32 rows and columns. Included inside namespace octavo::OCTAVO_LEVEL, with AVX2 or AVX-512.

// Intrinsics: for `load` and operators, GCC 12 emits code that keeps sums in memory.
#if defined(OCTAVO_HAS_AVX512)
static inline Register load_sum(const float* from) { return (Register)_mm512_loadu_ps(from); }
static inline void add_products(Register& sum, const float* factor, Register values) {
  sum = (Register)_mm512_fmadd_ps(_mm512_set1_ps(*factor), (__m512)values, (__m512)sum);
}
#else
static inline Register load_sum(const float* from) { return (Register)_mm256_loadu_ps(from); }
static inline void add_products(Register& sum, const float* factor, Register values) {
  sum = (Register)_mm256_fmadd_ps(_mm256_broadcast_ss(factor), (__m256)values, (__m256)sum);
}
#endif

// One k of some rows, 32 elements apart, times some vectors of columns.
template <int kRows, int kVectors>
static inline void add_k(Register (&sums)[kRows][kVectors], const float* left, const Register (&columns)[kVectors]) {
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) add_products(sums[row][vector], left + row * 32, columns[vector]);
}
