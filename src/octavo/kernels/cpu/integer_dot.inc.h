// Products of integers by vectors, for a few rows. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Where an instruction requires an unsigned operand, kBias8 or 8 is added to weights, and bias * (sum of the row's q) is
// subtracted from the initial sums.

static inline u8x64 load_line(const std::uint8_t* from) {
  return load<u8x64>(from);
}

#if defined(OCTAVO_HAS_AVX512)

constexpr std::int32_t kBias8 = 128;

// sum[output] += q of a row, 4 of k, times weights [16 outputs][4] that are 0 ... 255.
static inline i32x16 add_quad(i32x16 sum, u8x64 weights, std::uint32_t quad) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(static_cast<int>(quad)));
}
static inline i32x16 add_quad8(i32x16 sum, u8x64 weights, std::uint32_t quad) {
  return add_quad(sum, weights, quad);
}
static inline u8x64 with_bias8(u8x64 weights) { return weights ^ 0x80; }

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

// Some rows times one panel: results [rows][2][16], whose rows are `stride` vectors apart.
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

// The same for two-level integers: results are scale * sum over all of k.
template <int kRows>
static inline void multiply_two_level_panel(const IntegerProduct& product, std::int64_t row, std::int64_t panel,
                                         f32x16* results, std::int64_t stride) {
  const std::int8_t* left = product.rows.left + row / 16 * product.num_k() * kTileBytes + row % 16 * kTileK;
  const std::uint8_t* right = product.panel(panel);
  i32x16 sums[kRows][2];
  for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = i32x16{} - kBias8 * product.rows.sums[row + i];
  for (std::int64_t k = 0; k < product.num_k(); ++k, right += kTwoLevelBytes, left += kTileBytes) {
    prefetch_line(right + 2 * kTwoLevelTileBytes);
    for (int tile = 0; tile < 2; ++tile) {
      for (std::int64_t line = 0; line < 8; ++line) {
        const std::uint8_t* from = right + tile * kTwoLevelTileBytes + line * 64;
        prefetch_line(from);
        const Multipliers m = load_multipliers(right + 2 * kTwoLevelTileBytes + line / 4 * 32 + tile * 16);
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
