// Rotations of whole blocks of 64 of k, and of whole rows. Included inside namespace octavo::OCTAVO_LEVEL.
//
// kernels/quantization.py explains why, and defines the order. Every element is a series of sums and differences, so vectors
// of any size give the same bits.

// 64 integers of k by 16 rows (left) or 16 outputs (right) are a tile of 1 KiB; a unit is half of that in k.
constexpr std::int64_t kTileK = 64, kUnitK = 32, kTileBytes = 1024;

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
  // x times 1 or -1 is exact, so fusing the sum changes nothing.
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

// Blocks of `step` of k, four at a time: pairs become sums and differences, then pairs of these.
static inline void mix_fours(float* x, std::int64_t size, std::int64_t step) {
  for (std::int64_t block = 0; block < size; block += 4 * step)
    for (float* at = x + block; at < x + block + step; at += 16) {
      f32x16 of[4] = {load_f32(at), load_f32(at + step), load_f32(at + 2 * step), load_f32(at + 3 * step)};
      add_vectors(of[0], of[1]), add_vectors(of[2], of[3]);
      add_vectors(of[0], of[2]), add_vectors(of[1], of[3]);
      for (int i = 0; i < 4; ++i) store_f32(at + i * step, of[i]);
    }
}

static inline void mix_pairs(float* x, std::int64_t size, std::int64_t step) {
  for (std::int64_t block = 0; block < size; block += 2 * step)
    for (float* at = x + block; at < x + block + step; at += 16) {
      f32x16 first = load_f32(at), second = load_f32(at + step);
      add_vectors(first, second);
      store_f32(at, first), store_f32(at + step, second);
    }
}

// Each of three becomes twice their sum minus three times itself: without products, which the compiler might fuse.
static inline void mix_threes(float* x, std::int64_t size, std::int64_t step) {
  for (std::int64_t block = 0; block < size; block += 3 * step)
    for (float* at = x + block; at < x + block + step; at += 16) {
      const f32x16 of[3] = {load_f32(at), load_f32(at + step), load_f32(at + 2 * step)};
      const f32x16 sum = of[0] + of[1] + of[2], twice = sum + sum;
      for (int i = 0; i < 3; ++i) store_f32(at + i * step, twice - (of[i] + of[i] + of[i]));
    }
}

// Mixes the whole blocks of a row of floats in place; each has been rotated by itself.
static inline void mix_blocks(float* x, std::int64_t in_size) {
  const std::int64_t size = in_size / kTileK * kTileK;
  if (size == 0) return;
  std::int64_t step = kTileK;
  for (; size / step % 4 == 0; step *= 4) mix_fours(x, size, step);
  for (; size / step % 2 == 0; step *= 2) mix_pairs(x, size, step);
  double length = __builtin_sqrt(static_cast<double>(step / kTileK));
  for (; size / step % 3 == 0; step *= 3, length *= 3.0) mix_threes(x, size, step);
  const float scale = static_cast<float>(1.0 / length);
  for (float* at = x; at < x + size; at += 16) store_f32(at, load_f32(at) * scale);
}
