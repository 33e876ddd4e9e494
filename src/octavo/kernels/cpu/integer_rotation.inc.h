// Rotations: blocks of 64 of k times a Hadamard matrix over 8. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A fast Walsh-Hadamard transform: `rotated` of kernels/quantization.py says why, and in which order. Every element is
// sums and differences of two at a time, so that vectors of any size give the same bits.

template <int... kNumbers>
struct Numbers {};
#if defined(OCTAVO_HAS_AVX512)
typedef Numbers<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> RegisterLanes;
#elif defined(__AVX2__)
typedef Numbers<0, 1, 2, 3, 4, 5, 6, 7> RegisterLanes;
#else
typedef Numbers<0, 1, 2, 3> RegisterLanes;
#endif

template <int kStep, int... kLane>
[[gnu::always_inline]] static inline Register add_lanes(Register x, Numbers<kLane...>) {
  // x times 1 or -1 is exact, so that a fused sum is the plain one.
  return shuffle<(kLane ^ kStep)...>(x, x) + x * Register{(kLane & kStep ? -1.0f : 1.0f)...};
}

// Lanes i and i + kStep, for each i without that bit, become their sum and their difference.
template <int kStep, class V>
[[gnu::always_inline]] static inline V add_lanes(V x) {
  if constexpr (!kIsPair<V>) {
    return add_lanes<kStep>(x, RegisterLanes{});
  } else if constexpr (sizeof(x.low) == kStep * sizeof(float)) {
    return {x.low + x.high, x.low - x.high};
  } else {
    return {add_lanes<kStep>(x.low), add_lanes<kStep>(x.high)};
  }
}

[[gnu::always_inline]] static inline void add_vectors(f32x16& a, f32x16& b) {
  const f32x16 sum = a + b;
  b = a - b;
  a = sum;
}

[[gnu::always_inline]] static inline void rotate_block(f32x16 (&x)[4]) {
  for (f32x16& vector : x) vector = add_lanes<8>(add_lanes<4>(add_lanes<2>(add_lanes<1>(vector))));
  add_vectors(x[0], x[1]), add_vectors(x[2], x[3]);
  add_vectors(x[0], x[2]), add_vectors(x[1], x[3]);
  for (f32x16& vector : x) vector = vector * 0.125f;
}
