// Vectors of elements of any dtype, as float32. Included inside namespace octavo::OCTAVO_LEVEL, after the conversions.

// All 16, or the first `count` of 16 and zeros.
static inline f32x16 load_whole(const bf16* from) { return load_bf16(from); }
static inline f32x16 load_whole(const f16* from) { return load_f16(from); }
static inline f32x16 load_whole(const float* from) { return load_f32(from); }

static inline f32x16 load_part(const bf16* from, std::int64_t count) { return load_bf16_part(from, count); }
static inline f32x16 load_part(const f16* from, std::int64_t count) {
  f16 part[16] = {};
  __builtin_memcpy(part, from, static_cast<std::size_t>(count) * sizeof(f16));
  return load_f16(part);
}
static inline f32x16 load_part(const float* from, std::int64_t count) {
  f32x16 result = {};
  __builtin_memcpy(&result, from, static_cast<std::size_t>(count) * sizeof(float));
  return result;
}

static inline void store_whole(bf16* to, f32x16 value) { store_bf16(to, value); }
static inline void store_whole(f16* to, f32x16 value) { store(to, narrow(f16{}, value)); }
static inline void store_whole(float* to, f32x16 value) { store_f32(to, value); }

static inline void store_part(bf16* to, f32x16 value, std::int64_t count) { store_bf16_part(to, value, count); }
static inline void store_part(f16* to, f32x16 value, std::int64_t count) {
  const u16x16 half = narrow(f16{}, value);
  __builtin_memcpy(to, &half, static_cast<std::size_t>(count) * sizeof(f16));
}
static inline void store_part(float* to, f32x16 value, std::int64_t count) {
  __builtin_memcpy(to, &value, static_cast<std::size_t>(count) * sizeof(float));
}

// `count` is 16 in most calls.
template <class Element>
static inline f32x16 load_some(const Element* from, std::int64_t count) {
  return count == 16 ? load_whole(from) : load_part(from, count);
}

template <class Element>
static inline void store_some(Element* to, f32x16 value, std::int64_t count) {
  count == 16 ? store_whole(to, value) : store_part(to, value, count);
}
static inline void store_some(float* to, f32x16 value, std::int64_t count) { store_part(to, value, count); }

// As results are stored and read again; and a whole cache line of results.
static inline f32x16 rounded(bf16, f32x16 value) { return rounded(value); }
static inline f32x16 rounded(f16, f32x16 value) {
  f16 half[16];
  store_whole(half, value);
  return load_whole(half);
}
static inline u16x32 narrow_both(bf16, f32x16 first, f32x16 second) { return narrow_both(first, second); }
static inline u16x32 narrow_both(f16, f32x16 first, f32x16 second) {
  return side_by_side(narrow(f16{}, first), narrow(f16{}, second));
}
