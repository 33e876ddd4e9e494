// Keys and values stored as int8: each token's head is bytes times one float32 scale. Included inside namespace
// octavo::OCTAVO_LEVEL.
//
// Elements are integers up to 127, exact in any dtype. They are multiplied unscaled; a key's scale is applied to its scores,
// a value's to its weights. A tile is [P / 32] parts of bytes, in the order in which this level multiplies by them, then
// [32] scales; in blocks without tiles, a slot is P bytes and a scale.

constexpr std::int64_t kScaleBytes = sizeof(float);

static inline std::int64_t stored_head(const AttentionArgs& args) { return padded_head(args) + kScaleBytes; }

// Index of a byte in a part: that of the element which products read there.
template <class Element>
static inline std::int64_t byte_index(std::int64_t k, std::int64_t column) {
  return right_index(ByteOrder<Element>{}, k, column);
}

// Quantizes a head [P] to bytes and returns their scale. If not finite: zero bytes and a NaN scale.
template <class Element>
static inline float quantize(const Element* head, std::int64_t padded, std::int8_t* to) {
  f32x16 most = splat(0.0f), bad = splat(0.0f);
  for (std::int64_t i = 0; i < padded; i += 16) {
    const f32x16 value = load_some(head + i, 16);
    most = greater(select(value > 0.0f, value, -value), most);
    bad += value - value;  // NaN if one is not finite
  }
#if !defined(OCTAVO_HAS_AVX512)
  if (padded <= 0) __builtin_unreachable();  // or GCC 12 warns about this case
#endif
  const float max = max_of_lanes(most), is_bad = sum_of_lanes(bad);
  if (max == 0.0f || is_bad != is_bad) {
    __builtin_memset(to, 0, static_cast<std::size_t>(padded));
    return is_bad;
  }
  const float scale = max / 127.0f;
  for (std::int64_t i = 0; i < padded; i += 16) {
#if defined(OCTAVO_HAS_AVX512) && !defined(OCTAVO_HAS_AMX)
    round_to_bytes(load_some(head + i, 16) / scale, to + i);
#else
    const f32x16 rounded = load_some(head + i, 16) / scale + 12582912.0f;  // to the nearest, in the lowest bits
    for (int lane = 0; lane < 16; ++lane) to[i + lane] = static_cast<std::int8_t>(((i32x16)rounded)[lane]);
#endif
  }
  return scale;
}

static inline void put_scale(std::int8_t* to, float scale) { __builtin_memcpy(to, &scale, sizeof scale); }

// Writes one token's key and value, [P] each, of one kv head to their slot.
template <class Element>
static inline void store_slot_int8(const AttentionArgs& args, std::int64_t slot, std::int64_t head, const Element* key,
                                   const Element* value) {
  const std::int64_t padded = padded_head(args), at = slot % kTilePositions;
  alignas(64) std::int8_t key_bytes[kMaxHeadDim], value_bytes[kMaxHeadDim];
  const float key_scale = quantize(key, padded, key_bytes), value_scale = quantize(value, padded, value_bytes);
  std::int8_t* keys = static_cast<std::int8_t*>(args.keys);
  std::int8_t* values = static_cast<std::int8_t*>(args.values);
  if (!has_tiles(args)) {
    const std::int64_t offset = (slot * args.num_kv_heads + head) * stored_head(args);
    __builtin_memcpy(keys + offset, key_bytes, static_cast<std::size_t>(padded));
    __builtin_memcpy(values + offset, value_bytes, static_cast<std::size_t>(padded));
    put_scale(keys + offset + padded, key_scale);
    put_scale(values + offset + padded, value_scale);
    return;
  }
  const std::int64_t offset = tile_index(args, slot, head) * kTilePositions * stored_head(args);
#if defined(OCTAVO_HAS_AVX512) && !defined(OCTAVO_HAS_AMX)
  put_key(keys + offset, at, key_bytes, padded);
  put_value(values + offset, at, value_bytes, padded);
#else
  for (std::int64_t i = 0; i < padded; ++i) {
    const std::int64_t part = offset + i / kPart * kRightElements;
    keys[part + byte_index<Element>(i % kPart, at)] = key_bytes[i];
    values[part + byte_index<Element>(at, i % kPart)] = value_bytes[i];
  }
#endif
  put_scale(keys + offset + kTilePositions * padded + at * kScaleBytes, key_scale);
  put_scale(values + offset + kTilePositions * padded + at * kScaleBytes, value_scale);
}

// `count` bytes, a multiple of 32, as elements; integers up to 127 are exact in all types.
static inline void widen_bytes(const std::int8_t* from, std::int64_t count, bf16* to) {
#if defined(OCTAVO_HAS_AVX512)
  for (std::int64_t i = 0; i < count; i += 32) {
    const __m512i first = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    const __m512i second = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + 16)));
    const u16x32 both = narrow_both((f32x16)_mm512_cvtepi32_ps(first), (f32x16)_mm512_cvtepi32_ps(second));
    __builtin_memcpy(to + i, &both, sizeof both);
  }
#else
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = from[i];
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    to[i] = static_cast<bf16>(bits >> 16);
  }
#endif
}

static inline void widen_bytes(const std::int8_t* from, std::int64_t count, f16* to) {
  for (std::int64_t i = 0; i < count; i += 16) {
    float values[16];
    for (int lane = 0; lane < 16; ++lane) values[lane] = from[i + lane];
    store_whole(to + i, load_f32(values));
  }
}

static inline void widen_bytes(const std::int8_t* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}
