// Sums of products with bytes of a chunk. Included inside namespace octavo::OCTAVO_LEVEL.
//
// BlockDots(begin, bias): sums of kRows consecutive rows of a row tile, by kBlockStrips strips of 16 outputs.
// They start from `begin` of each row, times `bias` where the bias differs by type. `Way` says how codes are multiplied
// if a level has several ways.

#if !defined(__AVX2__) || defined(OCTAVO_HAS_AVX512)

struct OneWay {};

template <class Multiply>
static inline void with_way(const BlockTraits&, const Multiply& multiply) { multiply(OneWay{}); }

#endif

#if defined(OCTAVO_HAS_AVX512)

constexpr int kBlockStrips = 2;

// Sums and totals of all rows are in registers: with more rows, those of halves or offsets would not be.
template <class Way, int kSubs, bool kHasOffsets>
constexpr int kMaxBlockRows = kSubs == 1 && !kHasOffsets ? 8 : 6;

typedef std::int32_t BlockQuad __attribute__((may_alias));

// Not by intrinsics: GCC 12 would load many rows at once and spill sums.
[[gnu::always_inline]] static inline __m512i broadcast_quad(const void* from) {
  __m512i quad;
  asm volatile("vpbroadcastd %1, %0" : "=v"(quad) : "m"(*static_cast<const BlockQuad*>(from)));
  return quad;
}

template <class Way, int kRows>
struct BlockDots {
  __m512i sums[kBlockStrips][kRows];

  [[gnu::always_inline]] BlockDots(const std::int32_t* begin, int) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) sums[0][row] = sums[1][row] = broadcast_quad(begin + row);
  }
  // 4 of k of both strips; `num_left` more follow.
  [[gnu::always_inline]] void add(const std::uint8_t* right, const std::uint8_t* other, const std::int8_t* left, int /*num_left*/) {
    const __m512i first = _mm512_loadu_si512(right), second = _mm512_loadu_si512(other);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m512i quad = broadcast_quad(left + row * kTileK);
      sums[0][row] = _mm512_dpbusd_epi32(sums[0][row], first, quad);
      sums[1][row] = _mm512_dpbusd_epi32(sums[1][row], second, quad);
    }
  }
  [[gnu::always_inline]] f32x16 sum(int strip, int row) const { return (f32x16)_mm512_cvtepi32_ps(sums[strip][row]); }
};

#elif defined(__AVX2__)
#include "block_dots_avx2.inc.h"
#else

constexpr int kBlockStrips = 1;
template <class Way, int kSubs, bool kHasOffsets>
constexpr int kMaxBlockRows = 2;

template <class Way, int kRows>
struct BlockDots {
  i32x16 sums[kRows] = {};

  BlockDots(const std::int32_t*, int) {}
  void add(const std::uint8_t* right, const std::uint8_t*, const std::int8_t* left, int) {
    const u8x64 weights = load<u8x64>(right);
    for (int row = 0; row < kRows; ++row) {
      std::uint32_t quad;
      __builtin_memcpy(&quad, left + row * kTileK, sizeof quad);
      sums[row] = add_quad8(sums[row], weights, quad);
    }
  }
  f32x16 sum(int, int row) const { return convert<f32x16>(sums[row]); }
};

#endif
