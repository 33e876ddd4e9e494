// Codes and scales of weights in blocks, from the bytes that store them. Included inside namespace octavo::OCTAVO_LEVEL.
// Layouts: blocks.h.

template <BlockType kType>
struct OfType {
  static constexpr BlockType type = kType;
  static constexpr BlockTraits traits = traits_of(kType);
};

// Calls visit(OfType) for a type that is known at run time.
template <class Visit>
static inline void with_type(BlockType type, const Visit& visit) {
  switch (type) {
    case BlockType::q4_0: return visit(OfType<BlockType::q4_0>{});
    case BlockType::q4_1: return visit(OfType<BlockType::q4_1>{});
    case BlockType::q5_0: return visit(OfType<BlockType::q5_0>{});
    case BlockType::q5_1: return visit(OfType<BlockType::q5_1>{});
    case BlockType::q8_0: return visit(OfType<BlockType::q8_0>{});
    case BlockType::q2_k: return visit(OfType<BlockType::q2_k>{});
    case BlockType::q3_k: return visit(OfType<BlockType::q3_k>{});
    case BlockType::q4_k: return visit(OfType<BlockType::q4_k>{});
    case BlockType::q5_k: return visit(OfType<BlockType::q5_k>{});
    case BlockType::q6_k: return visit(OfType<BlockType::q6_k>{});
    case BlockType::iq4_nl: return visit(OfType<BlockType::iq4_nl>{});
    case BlockType::iq4_xs: return visit(OfType<BlockType::iq4_xs>{});
    case BlockType::mxfp4: return visit(OfType<BlockType::mxfp4>{});
  }
}

static inline u8x64 shifted_right(u8x64 bytes, int count, std::uint8_t mask) { return (u8x64)((u16x32)bytes >> count) & mask; }
static inline u8x64 shifted_left(u8x64 bytes, int count, std::uint8_t mask) { return (u8x64)((u16x32)bytes << count) & mask; }

// Bits [first, first + kCount) of codes, from the field of a quad.
template <int kCount, int kQuadOfLine, int kFirst>
[[gnu::always_inline]] static inline u8x64 field_of(u8x64 line) {
  constexpr int shift = kQuadOfLine * kCount - kFirst;
  constexpr std::uint8_t mask = ((1 << kCount) - 1) << kFirst;
  if constexpr (shift == 0) {
    return line & mask;
  } else if constexpr (shift > 0) {
    return shifted_right(line, shift, mask);
  } else {
    return shifted_left(line, -shift, mask);
  }
}

// Codes of a quad of the 8 of a group.
template <int kBits, int kQuad>
[[gnu::always_inline]] static inline u8x64 codes_of(const std::uint8_t* planes) {
  if constexpr (kBits == 8) {
    return load<u8x64>(planes + kQuad * 64);
  } else {
    constexpr int kLow = kBits >= 4 ? 4 : 2, kHigh = kBits - kLow, kPerLine = 8 / kLow;
    u8x64 codes = field_of<kLow, kQuad % kPerLine, 0>(load<u8x64>(planes + kQuad / kPerLine * 64));
    if constexpr (kHigh > 0) {
      constexpr int kHighPerLine = 8 / kHigh;
      codes |= field_of<kHigh, kQuad % kHighPerLine, kLow>(load<u8x64>(planes + kLow * 64 + kQuad / kHighPerLine * 64));
    }
    return codes;
  }
}

struct CodeTable {
  alignas(16) std::uint8_t values[16];
};

template <BlockType kType, int kAdded>
constexpr CodeTable make_table() {
  CodeTable table = {};
  for (int i = 0; i < 16; ++i) table.values[i] = static_cast<std::uint8_t>(table_of(kType)[i] + kAdded);
  return table;
}
template <BlockType kType, int kAdded>
static constexpr CodeTable kTable = make_table<kType, kAdded>();

// What codes stand for in a type's table, plus kAdded.
template <BlockType kType, int kAdded>
[[gnu::always_inline]] static inline u8x64 looked_up(u8x64 codes) {
#if defined(__AVX2__)
  const __m128i values = _mm_load_si128(reinterpret_cast<const __m128i*>(kTable<kType, kAdded>.values));
#endif
#if defined(OCTAVO_HAS_AVX512)
  return (u8x64)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(values);
  return {(u8x64::Half)_mm256_shuffle_epi8(table, (__m256i)codes.low), (u8x64::Half)_mm256_shuffle_epi8(table, (__m256i)codes.high)};
#else
  std::uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = kTable<kType, kAdded>.values[codes[i]];
  return load<u8x64>(bytes);
#endif
}

// The codes of a quad, or what they stand for in a table, minus the type's zero, plus kBias: 0 ... 255, or -128 ... 127.
template <class Of, int kBias, int kQuad>
[[gnu::always_inline]] static inline u8x64 biased_codes(const std::uint8_t* planes) {
  const u8x64 codes = codes_of<Of::traits.bits, kQuad>(planes);
  constexpr int kAdded = kBias - Of::traits.zero;
  if constexpr (Of::traits.is_table) {
    return looked_up<Of::type, kAdded>(codes);
  } else if constexpr (kAdded == 0) {
    return codes;
  } else {
    return codes + static_cast<std::uint8_t>(kAdded);
  }
}

static inline f32x16 load_halves(const std::uint8_t* from) {
#if defined(OCTAVO_HAS_AVX512)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  const __m128i* halves = reinterpret_cast<const __m128i*>(from);
  return {(f32x16::Half)_mm256_cvtph_ps(_mm_loadu_si128(halves)), (f32x16::Half)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
  float lanes[16];
  for (int lane = 0; lane < 16; ++lane) {
    std::uint16_t half;
    __builtin_memcpy(&half, from + lane * 2, sizeof half);
    // The exponent is moved up; all numbers, subnormal ones included, are then off by one factor.
    const std::uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
    const bool is_finite = (half & 0x7c00u) != 0x7c00u;
    const std::uint32_t bits = is_finite ? magnitude : magnitude | 0x7f800000u;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    if (is_finite) value *= 0x1p112f;
    lanes[lane] = sign ? -value : value;
  }
  return load_f32(lanes);
#endif
}

static inline f32x16 load_small_integers(const std::uint8_t* from) {
#if defined(OCTAVO_HAS_AVX512)
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  const auto eight = [](const std::uint8_t* at) {
    return (f32x16::Half)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
  };
  return {eight(from), eight(from + 8)};
#else
  float lanes[16];
  for (int lane = 0; lane < 16; ++lane) lanes[lane] = static_cast<float>(static_cast<std::int8_t>(from[lane]));
  return load_f32(lanes);
#endif
}

// Half of the powers of two of E8M0, whose exponents have a bias of 127; the least two are subnormal numbers.
static inline f32x16 load_exponents(const std::uint8_t* from) {
#if defined(OCTAVO_HAS_AVX512)
  const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), one = _mm512_set1_epi32(1);
  const __m512i least = _mm512_slli_epi32(_mm512_add_epi32(_mm512_min_epi32(exponents, one), one), 21);
  return (f32x16)_mm512_max_epi32(least, _mm512_slli_epi32(_mm512_sub_epi32(exponents, one), 23));
#elif defined(__AVX2__)
  const auto eight = [](const std::uint8_t* at) {
    const __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))), one = _mm256_set1_epi32(1);
    const __m256i least = _mm256_slli_epi32(_mm256_add_epi32(_mm256_min_epi32(exponents, one), one), 21);
    return (f32x16::Half)_mm256_max_epi32(least, _mm256_slli_epi32(_mm256_sub_epi32(exponents, one), 23));
  };
  return {eight(from), eight(from + 8)};
#else
  float lanes[16];
  for (int lane = 0; lane < 16; ++lane) {
    const std::uint32_t bits = from[lane] < 2 ? 0x200000u << from[lane] : (from[lane] - 1u) << 23;
    __builtin_memcpy(&lanes[lane], &bits, sizeof bits);
  }
  return load_f32(lanes);
#endif
}

// Scales and offsets of a strip of a chunk, by group and half of a group.
template <class Of>
struct ScalesOfStrip {
  static constexpr BlockTraits kTraits = Of::traits;

  const std::uint8_t *scales, *offsets;  // of groups: float16 or exponents, or int8 in two-level types
  int shift = 0;                         // of a group's number to that of its span
  alignas(64) float spans[kTraits.is_two_level ? 1 + kTraits.has_offsets : 0][kChunkGroups][kStripOutputs];  // scales, -offsets

  ScalesOfStrip(const std::uint8_t* from, std::int64_t num_groups, std::int64_t span) {
    constexpr std::int64_t kBytes = kTraits.is_two_level ? kTraits.num_subs() * 16 : kTraits.one_level_bytes();
    if constexpr (kTraits.is_two_level) {
      shift = __builtin_ctzll(static_cast<unsigned long long>(span));
      const std::int64_t num_spans = (num_groups + span - 1) >> shift;
      for (std::int64_t i = 0; i < num_spans; ++i) store_f32(spans[0][i], load_halves(from + i * 32));
      if constexpr (kTraits.has_offsets)
        for (std::int64_t i = 0; i < num_spans; ++i) store_f32(spans[1][i], -load_halves(from + (num_spans + i) * 32));
      from += num_spans * 32 * (1 + kTraits.has_offsets);
    }
    scales = from, offsets = from + num_groups * kBytes;
  }

  [[gnu::always_inline]] f32x16 scale(std::int64_t group, int half) const { return at<0>(scales, group, half); }
  [[gnu::always_inline]] f32x16 offset(std::int64_t group, int half) const { return at<1>(offsets, group, half); }

 private:
  template <int kKind>
  [[gnu::always_inline]] f32x16 at(const std::uint8_t* from, std::int64_t group, int half) const {
    if constexpr (kTraits.has_exponents) {
      return load_exponents(from + group * 16);
    } else if constexpr (!kTraits.is_two_level) {
      return load_halves(from + group * 32);
    } else {
      const std::int64_t sub = kTraits.sub == 16 ? group * 2 + half : group;
      return load_f32(spans[kKind][group >> shift]) * load_small_integers(from + sub * 16);
    }
  }
};
