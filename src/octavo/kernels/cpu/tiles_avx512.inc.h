// Products of tiles with vdpbf16ps, a pair of k of 16 columns at a time. Included from tiles.inc.h.
//
// Sums run over k pair by pair, in order of k, in registers or resumed from memory: the same bits for any number of
// rows.

using LeftElement = bf16;
constexpr bool kReadsWholeTiles = false;

static inline void begin_tiles(std::int64_t) {}
static inline void end_tiles() {}

constexpr std::int64_t kRowsTogether = 8;     // by 32 columns: 16 sums, enough to hide the latency of an addition
constexpr std::int64_t kRowsOfWholePanel = 8, kPassesOfMany = 1;  // all rows take all columns
constexpr std::int64_t kNearElements = 512;   // prefetch distance of weights from L2, 1 KiB
constexpr std::int64_t kFewElements = 1536;   // prefetch distance of weights into L2 for one or two rows, 3 KiB

// Prefetches line `i` of those due during k tile `k` into L2.
[[gnu::always_inline]] static inline void fetch_line(const Ahead& ahead, std::int64_t k, std::int64_t i) {
  if (i < ahead.lines) __builtin_prefetch(ahead.line(k * ahead.lines + i), 0, 2);
}

// A pair of k of some rows, 32 elements apart, times 16 columns.
template <int kRows>
[[gnu::always_inline]] static inline void add_pair(f32x16 (&sums)[kRows], const bf16* left, const bf16* right) {
  const __m512bh columns = (__m512bh)load<u32x16>(right);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const __m512bh factor = (__m512bh)_mm512_set1_epi32(load<std::int32_t>(left + row * 32));
    sums[row] = (f32x16)_mm512_dpbf16_ps((__m512)sums[row], factor, columns);
  }
}

// One k tile of weights from memory, line by line in address order, the only pattern hardware prefetchers follow well.
// With a row or two they keep up by themselves; software prefetches far ahead, or into L1, only take their place.
template <int kRows>
[[gnu::always_inline]] static inline void add_streamed_tile(f32x16 (&sums)[2][kRows], const bf16* left, const bf16* right,
                                                            const Ahead& ahead, std::int64_t k) {
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; ++tile, right += kTileElements) {
    for (int pair = 0; pair < 16; ++pair) {
      if constexpr (kRows > 2) {
        fetch_line(ahead, k, tile * 16 + pair);
        __builtin_prefetch(right + pair * 32 + kNearElements);
      } else {
        __builtin_prefetch(right + pair * 32 + kFewElements, 0, 2);
      }
      add_pair(sums[tile], left + pair * 2, right + pair * 32);
    }
  }
}

// One k tile of weights in a cache: alternates between the two right tiles.
template <int kRows>
[[gnu::always_inline]] static inline void add_cached_tile(f32x16 (&sums)[2][kRows], const bf16* left, const bf16* right,
                                                          const Ahead& ahead, std::int64_t k) {
  for (int pair = 0; pair < 16; ++pair) {
    fetch_line(ahead, k, pair);
    add_pair(sums[0], left + pair * 2, right + pair * 32);
    add_pair(sums[1], left + pair * 2, right + kTileElements + pair * 32);
  }
}

// Some rows of a left tile.
template <int kRows, bool kIsStreamed>
static void multiply_block(float* result, const bf16* left, const bf16* right, std::int64_t num_k, bool accumulates,
                           Ahead ahead) {
  const auto place = [&](int tile, int row) { return result + tile * kResultElements + row * 16; };
  f32x16 sums[2][kRows];
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; ++tile)
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) sums[tile][row] = accumulates ? load_f32(place(tile, row)) : splat(0.0f);
  for (std::int64_t k = 0; k < num_k; ++k, left += kTileElements, right += 2 * kTileElements) {
    if constexpr (kIsStreamed) {
      add_streamed_tile(sums, left, right, ahead, k);
    } else {
      add_cached_tile(sums, left, right, ahead, k);
    }
  }
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; ++tile)
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) store_f32(place(tile, row), sums[tile][row]);
}

using MultiplyBlock = void (*)(float*, const bf16*, const bf16*, std::int64_t, bool, Ahead);

template <bool kIsStreamed>
constexpr MultiplyBlock kMultiplyBlocks[kRowsTogether] = {
    multiply_block<1, kIsStreamed>, multiply_block<2, kIsStreamed>, multiply_block<3, kIsStreamed>,
    multiply_block<4, kIsStreamed>, multiply_block<5, kIsStreamed>, multiply_block<6, kIsStreamed>,
    multiply_block<7, kIsStreamed>, multiply_block<8, kIsStreamed>};

// Only the first rows stream the weights.
static inline MultiplyBlock choose_block(std::int64_t rows, bool /*is_whole*/, bool is_first) {
  return is_first ? kMultiplyBlocks<true>[rows - 1] : kMultiplyBlocks<false>[rows - 1];
}

#include "row_groups.inc.h"
