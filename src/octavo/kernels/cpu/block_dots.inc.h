// Sums of products with bytes of a chunk. Included inside namespace octavo::OCTAVO_LEVEL.
//
// BlockDots(begin, bias): sums of kRows consecutive rows of a row tile, by kStrips strips of 16 outputs. They start from
// `begin` of each row, which is for codes with a bias of kBeginFactor, brought to those of `bias`. `Way` says how codes
// are multiplied if a level has several ways.

#if !defined(__AVX2__) || defined(OCTAVO_HAS_AVX512)

struct OneWay {};

template <class Of, class Multiply>
static inline void with_way(const Multiply& multiply) { multiply(OneWay{}); }

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

template <class Way, int kStrips, int kRows>
struct BlockDots {
  __m512i sums[kStrips][kRows];

  [[gnu::always_inline]] BlockDots(const std::int32_t* begin, int bias) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m512i of_row = bias == 0 ? __m512i{} : (__m512i)with_bias((i32x16)broadcast_quad(begin + row), bias);
#pragma GCC unroll 2
      for (int strip = 0; strip < kStrips; ++strip) sums[strip][row] = of_row;
    }
  }
  // 4 of k of all strips; `num_left` more follow.
  [[gnu::always_inline]] void add(const u8x64 (&codes)[kStrips], const std::int8_t* left, int /*num_left*/) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m512i quad = broadcast_quad(left + row * kTileK);
#pragma GCC unroll 2
      for (int strip = 0; strip < kStrips; ++strip)
        sums[strip][row] = _mm512_dpbusd_epi32(sums[strip][row], (__m512i)codes[strip], quad);
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

template <class Way, int kStrips, int kRows>
struct BlockDots {
  i32x16 sums[kRows] = {};

  BlockDots(const std::int32_t*, int) {}
  void add(const u8x64 (&codes)[1], const std::int8_t* left, int) {
    for (int row = 0; row < kRows; ++row) {
      std::uint32_t quad;
      __builtin_memcpy(&quad, left + row * kTileK, sizeof quad);
      sums[row] = add_quad8(sums[row], codes[0], quad);
    }
  }
  f32x16 sum(int, int row) const { return convert<f32x16>(sums[row]); }
};

#endif
