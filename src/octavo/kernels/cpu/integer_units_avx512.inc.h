// Integer weights in the form that AVX-512 multiplies. Included inside namespace octavo::OCTAVO_LEVEL, at that level.
//
// vpdpbusd requires unsigned weights: 128 or 8 is added to them, and kBias * (sum of the row's q) is subtracted from the
// initial sums.

// Two quads of k of 16 outputs [2][16][4], unsigned.
struct Line {
  __m512i quads[2];
};

static inline __m512i load_bytes(const std::uint8_t* from) { return _mm512_loadu_si512(from); }
static inline __m512i with_bias8(__m512i weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(-128)); }

// How a unit of k of 16 outputs lies in the k tiles of a panel: 4 lines of two quads each.
//
// kMaxRows are multiplied by a unit at a time: 8 with both tiles of a panel, which takes fewer loads, or 16 with one,
// which expands less often. Up to kMaxRowsInOrder, a panel is read from front to back, for the hardware prefetcher: a
// Zen 4 core then reads 29 GB/s from memory, compared with 20 with prefetches of two tiles' lines in turn.
struct ByteUnit {
  static constexpr bool kMayBeInGroups = true;
  static constexpr int kMaxRows = 8, kMaxRowsInOrder = 4;
  static constexpr std::int32_t kBias = 128;
  const std::uint8_t* from;

  ByteUnit(const std::uint8_t* panel, std::int64_t unit, int tile)
      : from(panel + (unit / 2 * 2 + tile) * kTileBytes + unit % 2 * (kTileBytes / 2)) {}
  Line line(int i) const {
    return {{with_bias8(load_bytes(from + i * 128)), with_bias8(load_bytes(from + i * 128 + 64))}};
  }
};

struct NibbleUnit {
  static constexpr bool kMayBeInGroups = true;
  static constexpr int kMaxRows = 8, kMaxRowsInOrder = 0;
  static constexpr std::int32_t kBias = 8;
  const std::uint8_t* from;

  NibbleUnit(const std::uint8_t* panel, std::int64_t unit, int tile)
      : from(panel + (unit / 2 * 2 + tile) * (kTileBytes / 2) + unit % 2 * (kTileBytes / 4)) {}
  Line line(int i) const {
    const __m512i low = _mm512_set1_epi8(15), both = load_bytes(from + i * 64);
    return {{_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16(both, 4), low)}};
  }
};

struct TwoLevelUnit {
  static constexpr bool kMayBeInGroups = false;
  static constexpr int kMaxRows = 16, kMaxRowsInOrder = 0;
  static constexpr std::int32_t kBias = 128;
  const std::uint8_t* from;
  Multipliers multipliers;

  TwoLevelUnit(const std::uint8_t* panel, std::int64_t unit, int tile) {
    const std::uint8_t* k_tile = panel + unit / 2 * kTwoLevelBytes;
    from = k_tile + tile * kTwoLevelTileBytes + unit % 2 * (kTwoLevelTileBytes / 2);
    multipliers = load_multipliers(k_tile + 2 * kTwoLevelTileBytes + unit % 2 * 32 + tile * 16);
  }
  Line line(int i) const {
    const ExpandedLine expanded = expand_line(from + i * 64, multipliers);
    return {{with_bias8((__m512i)expanded.first), with_bias8((__m512i)expanded.second)}};
  }
};
