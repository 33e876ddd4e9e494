// Products of integers by vectors of 32 bytes, for any number of rows. Included inside namespace octavo::OCTAVO_LEVEL,
// at the AVX2 level.
//
// vpmaddubsw wants an unsigned side and adds pairs of products in 16 bits, where they saturate. Of 8 bits, it takes |w|
// and the row's q with the sign of w: 2 * 128 * 127 is just within. Of 4 bits, weights are taken 8 too large, and pairs of
// a whole unit stay in 16 bits: 16 * 15 * 127 = 30,480.

constexpr std::int64_t kMostRowsTogether = 6;  // 12 sums, and what else a product needs, in 16 registers

static inline __m256i load_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// 4 of k of a row, in each of 8 outputs' places.
static inline __m256i load_quad(const std::int8_t* from) {
  std::int32_t quad;
  __builtin_memcpy(&quad, from, sizeof quad);
  return _mm256_set1_epi32(quad);
}

// Keeps the compiler from beginning with one row before it is done with the last: then sums would not fit into registers.
static inline void hold(__m256i& value) { asm volatile("" : "+x"(value)); }

static inline __m256i add_pairs(__m256i sum, __m256i pairs) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// sums[row][half of 16 outputs] += one unit of k, 8 quads, of rows that follow one another within a row tile.
template <int kRows>
static inline void add_bytes(__m256i (*sums)[2], const std::int8_t* left, const std::uint8_t* right) {
  for (std::int64_t quad = 0; quad < 8; ++quad) {
    const __m256i weights[2] = {load_bytes(right + quad * 64), load_bytes(right + quad * 64 + 32)};
    const __m256i magnitudes[2] = {_mm256_abs_epi8(weights[0]), _mm256_abs_epi8(weights[1])};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      __m256i q = load_quad(left + row * kTileK + quad * 4);
      hold(q);
#pragma GCC unroll 8
      for (int half = 0; half < 2; ++half) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitudes[half], _mm256_sign_epi8(q, weights[half]));
        sums[row][half] = add_pairs(sums[row][half], pairs);
        hold(sums[row][half]);
      }
    }
  }
}

// The same of nibbles.
template <int kRows>
static inline void add_nibbles(__m256i (*sums)[2], const std::int8_t* left, const std::uint8_t* right) {
  const __m256i low = _mm256_set1_epi8(0x0f);
  __m256i pairs[kRows][2] = {};
  for (std::int64_t line = 0; line < 4; ++line) {
#pragma GCC unroll 8
    for (int half = 0; half < 2; ++half) {
      const __m256i weights = load_bytes(right + line * 64 + half * 32);
      const __m256i first = _mm256_and_si256(weights, low), second = _mm256_and_si256(_mm256_srli_epi16(weights, 4), low);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const std::int8_t* q = left + row * kTileK + line * 8;
        const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(first, load_quad(q)),
                                              _mm256_maddubs_epi16(second, load_quad(q + 4)));
        pairs[row][half] = _mm256_add_epi16(pairs[row][half], both);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int half = 0; half < 2; ++half) sums[row][half] = add_pairs(sums[row][half], pairs[row][half]);
}

// What sums of a group begin with.
template <int kBits>
static inline __m256i begin_sum(const PanelBlock& block, std::int64_t row, int tile, int half, std::int64_t group) {
  if (block.k > 0 && !block.is_in_groups()) return load_bytes(block.result(row, tile) + half * 8);
  const IntegerProduct& product = block.product;
  return _mm256_set1_epi32(kBits == 8 ? 0 : -8 * product.rows.sums[row * product.groups() + group]);
}

// total += scale * sum (+ offset * sum of the row's q), or the sum as it is where there are no groups.
static inline void end_sum(__m256i sum, const PanelBlock& block, std::int64_t row, int tile, int half, std::int64_t group) {
  float* to = block.result(row, tile) + half * 8;
  if (!block.is_in_groups()) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), sum);
  const IntegerProduct& product = block.product;
  const Integers& form = product.form();
  const std::int64_t at = (block.panel * product.groups() + group) * 32 + tile * 16 + half * 8;
  __m256 total = group > 0 ? _mm256_loadu_ps(to) : _mm256_setzero_ps();
  total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(form.scales + at), total);
  if (form.offsets) {
    const float row_sum = static_cast<float>(product.rows.sums[row * product.groups() + group]);
    total = _mm256_fmadd_ps(_mm256_loadu_ps(form.offsets + at), _mm256_set1_ps(row_sum), total);
  }
  _mm256_storeu_ps(to, total);
}

// Rows of one row tile times one of the panel's two tiles.
template <int kBits, int kRows>
[[gnu::noinline]] static void multiply_block(const PanelBlock& block, std::int64_t row, int tile) {
  constexpr std::int64_t kRightTile = kTileBytes * kBits / 8;
  const std::int8_t* left = block.left(row);
  const std::uint8_t* right = block.right + tile * kRightTile;
  const std::int64_t per_group = block.units_per_group(), num_units = block.num_units();
  for (std::int64_t group = block.first_group(), unit = 0; unit < num_units; ++group) {
    __m256i sums[kRows][2];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int half = 0; half < 2; ++half) sums[i][half] = begin_sum<kBits>(block, row + i, tile, half, group);
    for (const std::int64_t end = smaller(num_units, unit + per_group); unit < end; ++unit) {
      block.fetch(unit);
      const std::int8_t* q = left + unit / 2 * kTileBytes + unit % 2 * kUnitK;
      const std::uint8_t* weights = right + unit / 2 * 2 * kRightTile + unit % 2 * (kRightTile / 2);
      kBits == 8 ? add_bytes<kRows>(sums, q, weights) : add_nibbles<kRows>(sums, q, weights);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int half = 0; half < 2; ++half) end_sum(sums[i][half], block, row + i, tile, half, group);
  }
}

template <int kBits>
static inline void multiply_rows(const PanelBlock& block, std::int64_t row, std::int64_t count, int tile) {
  switch (count) {
    case 1: return multiply_block<kBits, 1>(block, row, tile);
    case 2: return multiply_block<kBits, 2>(block, row, tile);
    case 3: return multiply_block<kBits, 3>(block, row, tile);
    case 4: return multiply_block<kBits, 4>(block, row, tile);
    case 5: return multiply_block<kBits, 5>(block, row, tile);
    default: return multiply_block<kBits, 6>(block, row, tile);
  }
}

// All rows, a few at a time: as equal in number as may be.
template <int kBits>
static inline void multiply_all_rows(PanelBlock& block) {
  std::int64_t num_passes = 0;
  for (std::int64_t row = block.first * 16; row < block.end; row += 16)
    num_passes += 2 * ceil_div(smaller(16, block.end - row), kMostRowsTogether);
  block.begin_ahead(num_passes);
  for (std::int64_t row = block.first * 16; row < block.end;) {
    const std::int64_t rest = smaller(block.end, (row / 16 + 1) * 16) - row;
    const std::int64_t count = ceil_div(rest, ceil_div(rest, kMostRowsTogether));
    for (int tile = 0; tile < 2; ++tile) {
      multiply_rows<kBits>(block, row, count, tile);
      block.end_pass();
    }
    row += count;
  }
}

static void multiply_panel_block(PanelBlock block) {
  const Integers& form = block.product.form();
  if (!form.is_nested) return form.bits == 8 ? multiply_all_rows<8>(block) : multiply_all_rows<4>(block);
  alignas(64) std::uint8_t expanded[kBlockTilesOfK * 2 * kTileBytes];
  expand_block(block, expanded);
  block.right = expanded;
  multiply_all_rows<8>(block);
}
