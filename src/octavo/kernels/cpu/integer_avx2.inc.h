// Products of integers by vectors of 32 bytes, for any number of rows. Included inside namespace octavo::OCTAVO_LEVEL,
// at the levels of AVX2. The product of a unit of k is in two files, with and without vpdpbusd; the sums are the same.

constexpr std::int64_t kMaxRowsTogether = 6;  // 12 sums and the operands of a product, in 16 registers
constexpr std::int64_t kRowAheadBytes = 4096;  // prefetch distance of weights read front to back, for one row

static inline __m256i load_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// 4 of k of a row, broadcast to 8 outputs.
static inline __m256i load_quad(const std::int8_t* from) {
  std::int32_t quad;
  __builtin_memcpy(&quad, from, sizeof quad);
  return _mm256_set1_epi32(quad);
}

// 4 of k of a row as words, broadcast to 4 outputs.
static inline __m256i load_words(const std::int16_t* from) {
  std::int64_t words;
  __builtin_memcpy(&words, from, sizeof words);
  return _mm256_set1_epi64x(words);
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

// One row times two-level weights. Their values are multiplied as the words that they come out as, q of the row widened
// to words: what expands bytes for many rows, packing, storing and loading them again, would take longer than memory.
template <class Dots>
[[gnu::noinline]] static void multiply_two_level_row(const PanelBlock& block) {
  const std::int8_t* left = block.left(block.first * 16);
  const __m256i top = _mm256_set1_epi16(static_cast<short>(0xf000));
  __m256i sums[2][2][2] = {};  // [tile][half of 16 outputs][even or odd nibbles]
  for (std::int64_t k = 0; k < block.count; ++k, left += kTileBytes) {
    alignas(32) std::int16_t q[kTileK];
    for (std::int64_t i = 0; i < kTileK; i += 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(q + i),
                         _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(left + i))));
    const std::uint8_t* k_tile = block.right + k * kTwoLevelBytes;
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; ++tile) {
      for (std::int64_t group = 0; group < 2; ++group) {
        const Multipliers m = load_multipliers(k_tile + 2 * kTwoLevelTileBytes + group * 32 + tile * 16);
        for (std::int64_t line = group * 4; line < group * 4 + 4; ++line) {
          const __m256i first = load_words(q + line * 8), second = load_words(q + line * 8 + 4);
          const std::uint8_t* from = k_tile + tile * kTwoLevelTileBytes + line * 64;
          __builtin_prefetch(from + kRowAheadBytes, 0, 2);
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            const __m256i words = load_bytes(from + half * 32);
            const __m256i even = (__m256i)(half ? m.even.high : m.even.low), odd = (__m256i)(half ? m.odd.high : m.odd.low);
            __m256i* of_half = sums[tile][half];
            const auto add = [&](int parity, __m256i nibbles, __m256i factors, __m256i of_row) {
              Dots::add_words(of_half[parity], _mm256_mulhrs_epi16(nibbles, factors), of_row);
            };
            add(0, _mm256_slli_epi16(words, 12), even, first);
            add(1, _mm256_and_si256(_mm256_slli_epi16(words, 8), top), odd, first);
            add(0, _mm256_and_si256(_mm256_slli_epi16(words, 4), top), even, second);
            add(1, _mm256_and_si256(words, top), odd, second);
          }
        }
      }
    }
  }
  for (int tile = 0; tile < 2; ++tile)
    for (int half = 0; half < 2; ++half) {
      __m256i* to = reinterpret_cast<__m256i*>(block.result(block.first * 16, tile) + half * 8);
      const __m256i sum = _mm256_hadd_epi32(sums[tile][half][0], sums[tile][half][1]);
      _mm256_storeu_si256(to, block.k ? _mm256_add_epi32(sum, _mm256_loadu_si256(to)) : sum);
    }
}

template <class Dots>
static inline void multiply_panel_block_by(PanelBlock block) {
  const Integers& form = block.product.form();
  if (form.is_two_level && block.end - block.first * 16 == 1) return multiply_two_level_row<Dots>(block);
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
