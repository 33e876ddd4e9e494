// The product of a linear layer with integer weights. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Sums are exact in 32 bits, so their order does not matter: 128 * 127 * k stays below 2^31 up to k = 132,000.

static inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 sum) {
#if defined(OCTAVO_HAS_AVX512)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
  return a * b + sum;
#endif
}

// A linear layer with integer weights, and its quantized input.
struct IntegerProduct {
  IntegerRows rows;
  std::int64_t num_rows, in_size;
  PackedWeight packed;
  Destination to;

  const Integers& form() const { return packed.integers; }
  std::int64_t num_k() const { return num_k_tiles(in_size); }
  std::int64_t groups() const { return num_groups(form(), in_size); }
  std::int64_t units_per_group() const { return form().group_size ? form().group_size / kUnitK : num_k() * 2; }
  const std::uint8_t* panel(std::int64_t index) const {
    return form().values + index * panel_bytes(form(), in_size);
  }
  const float* scales(std::int64_t panel, std::int64_t group) const {
    return form().scales + (panel * groups() + group) * 32;
  }
  // Applies the scale if there is one for all of k.
  f32x16 scaled(i32x16 sum, std::int64_t panel, int half, std::int64_t row) const {
    const f32x16 product = multiply_add(convert<f32x16>(sum), load_f32(scales(panel, 0) + half * 16), splat(0.0f));
    return with_offset(product, panel, 0, half, row);
  }
  // Sums over groups are floats: sum += scale * q-sum, then += offset * (sum of the row's q).
  f32x16 with_offset(f32x16 sum, std::int64_t panel, std::int64_t group, int half, std::int64_t row) const {
    if (form().offsets == nullptr) return sum;
    const float* offsets = form().offsets + (panel * groups() + group) * 32 + half * 16;
    return multiply_add(load_f32(offsets), splat(static_cast<float>(rows.sums[row * groups() + group])), sum);
  }
};

// Weights in memory are prefetched twice: far ahead into the second-level cache, which handles many requests at once, and
// shortly before use into the first.
constexpr std::int64_t kFarBytes = 16384, kNearBytes = 2048;

static inline void prefetch_near(const std::uint8_t* from) { __builtin_prefetch(from + kNearBytes); }
static inline void prefetch_line(const std::uint8_t* from) {
  __builtin_prefetch(from + kFarBytes, 0, 2);
  prefetch_near(from);
}
