// Expands chunks of weights in blocks to bytes and float32 scales. Included inside namespace octavo::OCTAVO_LEVEL.
// Layouts: blocks.h.

constexpr std::int64_t kGroupBytes = kBlockGroup * kStripOutputs;

// An expanded chunk of a panel: codes of each strip [groups][8 quads][16 outputs][4] with the type's bias added, and
// scales of all 32 outputs for each group and each half of it.
struct ExpandedChunk {
  alignas(64) std::uint8_t room[2][kChunkGroups * kGroupBytes];
  const std::uint8_t* values[2];  // `room`, or the weight itself
  alignas(64) float scales[kChunkGroups][2][32];
  alignas(64) float offsets[kChunkGroups][2][32];
};

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

static inline u8x64 looked_up(u8x64 codes) {
#if defined(OCTAVO_HAS_AVX512)
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values)));
  return (u8x64)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values)));
  return {(u8x64::Half)_mm256_shuffle_epi8(table, (__m256i)codes.low), (u8x64::Half)_mm256_shuffle_epi8(table, (__m256i)codes.high)};
#else
  std::uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = static_cast<std::uint8_t>(kIq4Values[codes[i]]);
  return load<u8x64>(bytes);
#endif
}

template <int kBits, bool kIsTable, int... kQuad>
[[gnu::always_inline]] static inline void expand_group(const std::uint8_t* planes, std::uint8_t added, std::uint8_t* to, Numbers<kQuad...>) {
  const auto put = [&](u8x64 codes, int quad) { store(to + quad * 64, (kIsTable ? looked_up(codes) : codes) + added); };
  (put(codes_of<kBits, kQuad>(planes), kQuad), ...);
}

// The codes of `num_groups` groups of a strip, with `more` added to each.
template <int kBits, bool kIsTable = false>
static inline void expand_codes(const std::uint8_t* from, std::int64_t num_groups, int more, bool fetches_far,
                                std::uint8_t* to) {
  constexpr std::int64_t kPlaneBytes = kBits * 64;
  const std::uint8_t added = static_cast<std::uint8_t>(more);
  for (std::int64_t group = 0; group < num_groups; ++group, from += kPlaneBytes, to += kGroupBytes) {
    for (std::int64_t line = 0; line < kPlaneBytes; line += 64)
      fetches_far ? prefetch_line(from + line) : prefetch_near(from + line);
    expand_group<kBits, kIsTable>(from, added, to, Numbers<0, 1, 2, 3, 4, 5, 6, 7>{});
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

// Scales of a strip, `num_subs` of each group, to `to` [groups][2][32]; `sign` is -1 if they are subtracted.
static inline void expand_scales(const BlockTraits& traits, const std::uint8_t* outer, const std::uint8_t* inner, std::int64_t num_groups,
                                 std::int64_t span, std::int64_t num_subs, float sign, float (*to)[2][32]) {
  for (std::int64_t group = 0; group < num_groups; ++group) {
    for (std::int64_t half = 0; half < num_subs; ++half) {
      if (traits.is_two_level) {
        const std::int64_t sub = traits.sub == 16 ? group * 2 + half : group;
        store_f32(to[group][half], load_halves(outer + group / span * 32) * load_small_integers(inner + sub * 16) * sign);
      } else {
        store_f32(to[group][half], load_halves(outer + group * 32));
      }
    }
  }
}

static inline bool is_expanded(const BlockTraits& traits) { return traits.bits < 8 || bias_of(traits) != traits.zero; }

static inline void expand_codes_of_strip(const BlockTraits& traits, const std::uint8_t* from, std::int64_t num_groups, int strip,
                                         bool fetches_far, ExpandedChunk& to) {
  std::uint8_t* values = to.room[strip];
  to.values[strip] = values;
  const int more = bias_of(traits) - traits.zero;
  switch (traits.bits) {
    case 2: return expand_codes<2>(from, num_groups, more, fetches_far, values);
    case 3: return expand_codes<3>(from, num_groups, more, fetches_far, values);
    case 5: return expand_codes<5>(from, num_groups, more, fetches_far, values);
    case 6: return expand_codes<6>(from, num_groups, more, fetches_far, values);
    case 8:
      if (is_expanded(traits)) return expand_codes<8>(from, num_groups, more, fetches_far, values);
      to.values[strip] = from;
      return;
    default:
      return traits.is_table ? expand_codes<4, true>(from, num_groups, more, fetches_far, values)
                             : expand_codes<4>(from, num_groups, more, fetches_far, values);
  }
}

// A strip of a chunk. `fetches_far`: also prefetch what follows.
static inline void expand_strip(const BlockPanel& panel, std::int64_t index, int strip, bool fetches_far, ExpandedChunk& to) {
  const BlockTraits& traits = panel.strips[strip];
  const std::int64_t num_groups = panel.groups_of(index);
  const std::uint8_t* from = panel.chunk(index, strip);
  expand_codes_of_strip(traits, from, num_groups, strip, fetches_far, to);
  const std::uint8_t* scales = from + num_groups * traits.group_bytes();
  if (fetches_far)
    for (std::int64_t line = 0; line < traits.scale_bytes(num_groups, panel.span); line += 64) prefetch_line(scales + line);
  const std::int64_t outer_bytes = (traits.is_two_level ? ceil_div(num_groups, panel.span) : num_groups) * 32;
  const std::int64_t inner_bytes = num_groups * traits.num_subs() * 16;
  const std::uint8_t* inner = scales + outer_bytes * (traits.has_offsets ? 2 : 1);
  const auto at_strip = [&](float (*of_panel)[2][32]) { return reinterpret_cast<float(*)[2][32]>(&of_panel[0][0][strip * 16]); };
  expand_scales(traits, scales, inner, num_groups, panel.span, panel.num_subs(), 1.0f, at_strip(to.scales));
  if (traits.has_offsets)
    return expand_scales(traits, scales + outer_bytes, inner + inner_bytes, num_groups, panel.span, panel.num_subs(), -1.0f, at_strip(to.offsets));
  if (!panel.has_offsets()) return;
  for (std::int64_t group = 0; group < num_groups; ++group)
    for (int half = 0; half < 2; ++half) store_f32(&to.offsets[group][half][strip * 16], splat(0.0f));
}
