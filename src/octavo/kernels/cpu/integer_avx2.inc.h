// Products of integers by vectors of 32 bytes, for any number of rows. Included inside namespace octavo::OCTAVO_LEVEL,
// at the levels of AVX2. The product of a unit of k is in two files, with and without vpdpbusd; the sums are the same.

constexpr std::int64_t kMaxRowsTogether = 6;  // 12 sums and the operands of a product, in 16 registers

static inline __m256i load_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// 4 of k of a row, broadcast to 8 outputs.
static inline __m256i load_quad(const std::int8_t* from) {
  std::int32_t quad;
  __builtin_memcpy(&quad, from, sizeof quad);
  return _mm256_set1_epi32(quad);
}

#if defined(OCTAVO_HAS_VNNI)
#include "integer_avx2_vnni.inc.h"
#else
#include "integer_avx2_pairs.inc.h"
#endif

// What sums of a group begin with.
template <int kBits>
static inline __m256i begin_sum(const PanelBlock& block, std::int64_t row, int tile, int half, std::int64_t group) {
  if (block.k > 0 && !block.is_in_groups()) return load_bytes(block.result(row, tile) + half * 8);
  const IntegerProduct& product = block.product;
  return _mm256_set1_epi32(-(kBits == 8 ? kBias8 : 8) * product.rows.sums[row * product.groups() + group]);
}

// total += scale * sum (+ offset * sum of the row's q), or the plain sum if there are no groups.
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
template <class Dots, int kBits, int kRows>
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
      kBits == 8 ? add_bytes<Dots, kRows>(sums, q, weights) : add_nibbles<Dots, kRows>(sums, q, weights);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int half = 0; half < 2; ++half) end_sum(sums[i][half], block, row + i, tile, half, group);
  }
}

template <class Dots, int kBits>
static inline void multiply_rows(const PanelBlock& block, std::int64_t row, std::int64_t count, int tile) {
  switch (count) {
    case 1: return multiply_block<Dots, kBits, 1>(block, row, tile);
    case 2: return multiply_block<Dots, kBits, 2>(block, row, tile);
    case 3: return multiply_block<Dots, kBits, 3>(block, row, tile);
    case 4: return multiply_block<Dots, kBits, 4>(block, row, tile);
    case 5: return multiply_block<Dots, kBits, 5>(block, row, tile);
    default: return multiply_block<Dots, kBits, 6>(block, row, tile);
  }
}

// All rows, a few at a time, in parts that are as equal as possible.
template <class Dots, int kBits>
static inline void multiply_all_rows(PanelBlock& block) {
  std::int64_t num_passes = 0;
  for (std::int64_t row = block.first * 16; row < block.end; row += 16)
    num_passes += 2 * ceil_div(smaller(16, block.end - row), kMaxRowsTogether);
  block.begin_ahead(num_passes);
  for (std::int64_t row = block.first * 16; row < block.end;) {
    const std::int64_t rest = smaller(block.end, (row / 16 + 1) * 16) - row;
    const std::int64_t count = ceil_div(rest, ceil_div(rest, kMaxRowsTogether));
    for (int tile = 0; tile < 2; ++tile) {
      multiply_rows<Dots, kBits>(block, row, count, tile);
      block.end_pass();
    }
    row += count;
  }
}

template <class Dots>
static inline void multiply_panel_block_by(PanelBlock block) {
  const Integers& form = block.product.form();
  if (!form.is_two_level) return form.bits == 8 ? multiply_all_rows<Dots, 8>(block) : multiply_all_rows<Dots, 4>(block);
  alignas(64) std::uint8_t expanded[kBlockTilesOfK * 2 * kTileBytes];
  expand_block(block, expanded);
  block.right = expanded;
  multiply_all_rows<Dots, 8>(block);
}

static void multiply_panel_block(PanelBlock block) {
#if defined(OCTAVO_HAS_VNNI)
  has_avx_vnni() ? multiply_panel_block_by<VexDots>(block) : multiply_panel_block_by<EvexDots>(block);
#else
  multiply_panel_block_by<Maddubs>(block);
#endif
}
