// Products of integers by vectors, for a few rows. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Sums are exact in 32 bits, so that whoever adds them up in whatever order gets the same: 128 * 127 * k stays below 2^31
// up to k = 132,000. Where an instruction wants an unsigned side, weights are taken kBias8 or 8 too large, and sums begin
// with as much less: bias * (sum of the row's q).

static inline u8x64 load_line(const std::uint8_t* from) {
  return load<u8x64>(from);
}

#if defined(OCTAVO_HAS_AVX512_BF16)

constexpr std::int32_t kBias8 = 128;

// sum[output] += q of a row, 4 of k, times weights [16 outputs][4] that are 0 ... 255.
static inline i32x16 add_quad(i32x16 sum, u8x64 weights, std::uint32_t quad) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(static_cast<int>(quad)));
}
static inline i32x16 add_quad8(i32x16 sum, u8x64 weights, std::uint32_t quad) {
  return add_quad(sum, weights, quad);
}
static inline u8x64 with_bias8(u8x64 weights) { return weights ^ 0x80; }

#elif defined(__AVX2__)

constexpr std::int32_t kBias8 = 0;

// Pairs of products are added in 16 bits, and that saturates: 2 * 128 * 127 is just within.
static inline i32x16 add_pairs(i32x16 sum, const __m256i* magnitudes, const __m256i* values) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i low = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes[0], values[0]), ones);
  const __m256i high = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes[1], values[1]), ones);
  return {sum.low + (i32x16::Half)low, sum.high + (i32x16::Half)high};
}
static inline i32x16 add_quad(i32x16 sum, u8x64 weights, std::uint32_t quad) {
  const __m256i halves[2] = {(__m256i)weights.low, (__m256i)weights.high};
  const __m256i value = _mm256_set1_epi32(static_cast<int>(quad)), values[2] = {value, value};
  return add_pairs(sum, halves, values);
}
static inline i32x16 add_quad8(i32x16 sum, u8x64 weights, std::uint32_t quad) {
  const __m256i halves[2] = {(__m256i)weights.low, (__m256i)weights.high};
  const __m256i value = _mm256_set1_epi32(static_cast<int>(quad));
  const __m256i magnitudes[2] = {_mm256_abs_epi8(halves[0]), _mm256_abs_epi8(halves[1])};
  const __m256i values[2] = {_mm256_sign_epi8(value, halves[0]), _mm256_sign_epi8(value, halves[1])};
  return add_pairs(sum, magnitudes, values);
}
static inline u8x64 with_bias8(u8x64 weights) { return weights; }

#else

constexpr std::int32_t kBias8 = 0;

static inline i32x16 add_quad8(i32x16 sum, u8x64 weights, std::uint32_t quad) {
  const u32x16 words = (u32x16)weights;
  for (int k = 0; k < 4; ++k) {
    const i32x16 weight = (i32x16)(words << (24 - 8 * k)) >> 24;
    sum += weight * (static_cast<std::int32_t>(quad << (24 - 8 * k)) >> 24);
  }
  return sum;
}
static inline i32x16 add_quad(i32x16 sum, u8x64 weights, std::uint32_t quad) { return add_quad8(sum, weights, quad); }
static inline u8x64 with_bias8(u8x64 weights) { return weights; }

#endif

template <int kBits>
constexpr std::int32_t kBias = kBits == 8 ? kBias8 : 8;

static inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 sum) {
#if defined(OCTAVO_HAS_AVX512_BF16)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
  return a * b + sum;
#endif
}

// A map with integer weights, its rows quantised already.
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
  // What one scale for all of k makes of a sum.
  f32x16 scaled(i32x16 sum, std::int64_t panel, int half, std::int64_t row) const {
    const f32x16 product = multiply_add(convert<f32x16>(sum), load_f32(scales(panel, 0) + half * 16), splat(0.0f));
    return with_offset(product, panel, 0, half, row);
  }
  // Sums of floats go from group to group: sum += scale * q-sum, then += offset * (sum of the row's q).
  f32x16 with_offset(f32x16 sum, std::int64_t panel, std::int64_t group, int half, std::int64_t row) const {
    if (form().offsets == nullptr) return sum;
    const float* offsets = form().offsets + (panel * groups() + group) * 32 + half * 16;
    return multiply_add(load_f32(offsets), splat(static_cast<float>(rows.sums[row * groups() + group])), sum);
  }
};

// Weights that come from memory are asked for twice: far ahead into the second-level cache, which has room for many
// requests at once, and shortly before they are needed into the first.
constexpr std::int64_t kFarBytes = 16384, kNearBytes = 2048;

static inline void prefetch_line(const std::uint8_t* from) {
  __builtin_prefetch(from + kFarBytes, 0, 2);
  __builtin_prefetch(from + kNearBytes);
}

// Adds up one unit of k, 8 quads, of rows that follow one another within a row tile.
template <int kBits, int kRows>
static inline void add_unit(i32x16 (*sums)[2], const std::int8_t* left, const std::uint8_t* right) {
  constexpr std::int64_t kRightTile = kTileBytes * kBits / 8;
  for (std::int64_t line = 0; line < kBits; ++line) {
    for (int tile = 0; tile < 2; ++tile) {
      const std::uint8_t* from = right + tile * kRightTile + line * 64;
      const u8x64 weights = load_line(from);
      prefetch_line(from);
      for (int row = 0; row < kRows; ++row) {
        std::uint32_t quads[2];
        __builtin_memcpy(quads, left + row * kTileK + line * 32 / kBits, sizeof(std::uint32_t) * 8 / kBits);
        if constexpr (kBits == 8) {
          sums[row][tile] = add_quad8(sums[row][tile], with_bias8(weights), quads[0]);
        } else {
          sums[row][tile] = add_quad(sums[row][tile], weights & 0x0f, quads[0]);
          sums[row][tile] = add_quad(sums[row][tile], weights >> 4, quads[1]);
        }
      }
    }
  }
}

// Some rows times one panel: results [rows][2][16], to go on with at `stride` vectors from row to row.
template <int kBits, int kRows>
static inline void multiply_panel(const IntegerProduct& product, std::int64_t row, std::int64_t panel, f32x16* results,
                                  std::int64_t stride) {
  const std::int64_t groups = product.groups(), units_per_group = product.units_per_group();
  const std::int8_t* left = product.rows.left + row / 16 * product.num_k() * kTileBytes + row % 16 * kTileK;
  const std::uint8_t* right = product.panel(panel);
  f32x16 totals[kRows][2] = {};
  for (std::int64_t group = 0, unit = 0; group < groups; ++group) {
    i32x16 sums[kRows][2];
    for (int i = 0; i < kRows; ++i)
      sums[i][0] = sums[i][1] = i32x16{} - kBias<kBits> * product.rows.sums[(row + i) * groups + group];
    const std::int64_t end = smaller(product.num_k() * 2, unit + units_per_group);
    for (; unit < end; ++unit)
      add_unit<kBits, kRows>(sums, left + unit / 2 * kTileBytes + unit % 2 * kUnitK,
                             right + (unit / 2 * 4 + unit % 2) * kTileBytes * kBits / 16);
    for (int half = 0; half < 2; ++half) {
      const f32x16 scale = load_f32(product.scales(panel, group) + half * 16);
      for (int i = 0; i < kRows; ++i) {
        totals[i][half] = multiply_add(convert<f32x16>(sums[i][half]), scale, totals[i][half]);
        totals[i][half] = product.with_offset(totals[i][half], panel, group, half, row + i);
      }
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) results[i * stride + half] = totals[i][half];
}

// The same of nested integers: results are scale * sum over all of k.
template <int kRows>
static inline void multiply_nested_panel(const IntegerProduct& product, std::int64_t row, std::int64_t panel,
                                         f32x16* results, std::int64_t stride) {
  const std::int8_t* left = product.rows.left + row / 16 * product.num_k() * kTileBytes + row % 16 * kTileK;
  const std::uint8_t* right = product.panel(panel);
  i32x16 sums[kRows][2];
  for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = i32x16{} - kBias8 * product.rows.sums[row + i];
  for (std::int64_t k = 0; k < product.num_k(); ++k, right += kNestedBytes, left += kTileBytes) {
    prefetch_line(right + 2 * kNestedTileBytes);
    for (int tile = 0; tile < 2; ++tile) {
      for (std::int64_t line = 0; line < 8; ++line) {
        const std::uint8_t* from = right + tile * kNestedTileBytes + line * 64;
        prefetch_line(from);
        const Multipliers m = load_multipliers(right + 2 * kNestedTileBytes + line / 4 * 32 + tile * 16);
        const ExpandedLine expanded = expand_line(from, m);
        for (int i = 0; i < kRows; ++i) {
          std::uint32_t quads[2];
          __builtin_memcpy(quads, left + i * kTileK + line * 8, sizeof quads);
          sums[i][tile] = add_quad8(sums[i][tile], with_bias8((u8x64)expanded.first), quads[0]);
          sums[i][tile] = add_quad8(sums[i][tile], with_bias8((u8x64)expanded.second), quads[1]);
        }
      }
    }
  }
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < kRows; ++i) results[i * stride + half] = product.scaled(sums[i][half], panel, half, row + i);
}
