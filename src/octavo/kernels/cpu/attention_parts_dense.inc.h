// The parts of attention in float16 and float32, row by row. Included from attention_parts.inc.h.

#if defined(OCTAVO_SIMPLE_PARTS)

// Rows `row` ... of a result: all k in order, in registers.
template <int kRows, class Right>
static inline void multiply_rows(float* result, const float* left, std::int64_t num_k, const Right& right) {
  f32x16 sums[kRows][2] = {};
  for (std::int64_t part = 0; part < num_k; ++part) {
    const Element* columns = right(part);
    for (std::int64_t k = 0; k < kPart; ++k) {
      const f32x16 first = load_whole(columns + k * kPart), second = load_whole(columns + k * kPart + 16);
      for (int row = 0; row < kRows; ++row) {
        const float factor = left[part * kLeftElements + row * kPart + k];
        sums[row][0] += factor * first;
        sums[row][1] += factor * second;
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    store_f32(result + row * 16, sums[row][0]);
    store_f32(result + kResultElements + row * 16, sums[row][1]);
  }
}

template <class Right, class Next>
static inline void multiply_parts(float* result, const float* left, std::int64_t row_tile_stride, std::int64_t num_rows,
                                  std::int64_t num_k, const Right& right, const Next&) {
  for (std::int64_t row = 0; row < num_rows;) {
    float* to = result + row / 16 * 2 * kResultElements + row % 16 * 16;
    const float* from = left + row / 16 * row_tile_stride + row % 16 * kPart;
    if (num_rows - row >= kRowsAtOnce && row % 16 + kRowsAtOnce <= 16) {
      multiply_rows<kRowsAtOnce>(to, from, num_k, right);
      row += kRowsAtOnce;
    } else {
      multiply_rows<1>(to, from, num_k, right);
      ++row;
    }
  }
}

#endif

static inline void put_key(Element* tile, std::int64_t at, const Element* key, std::int64_t padded) {
  for (std::int64_t i = 0; i < padded; ++i) tile[i * kPart + at] = key[i];
}

static inline void put_value(Element* tile, std::int64_t at, const Element* value, std::int64_t padded) {
  for (std::int64_t part = 0; part < padded / kPart; ++part)
    __builtin_memcpy(tile + part * kRightElements + at * kPart, value + part * kPart, kPart * sizeof(Element));
}

static inline void put_16_keys(Element* tile, std::int64_t first, const Element* keys, std::int64_t stride,
                               std::int64_t padded) {
  for (std::int64_t i = 0; i < padded; ++i)
    for (std::int64_t row = 0; row < 16; ++row) tile[i * kPart + first + row] = keys[row * stride + i];
}

static inline void put_16_values(Element* tile, std::int64_t first, const Element* values, std::int64_t stride,
                                 std::int64_t padded) {
  for (std::int64_t row = 0; row < 16; ++row) put_value(tile, first + row, values + row * stride, padded);
}

// Whether all of a tile's values are finite: then zero weights cancel them.
static inline bool is_finite(const f16* values, std::int64_t count) {
  u16x16 any = {};
  for (std::int64_t i = 0; i < count; i += 16) any |= (u16x16)((load<u16x16>(values + i) & 0x7c00) == 0x7c00);
  std::uint64_t words[4];
  __builtin_memcpy(words, &any, sizeof words);
  return (words[0] | words[1] | words[2] | words[3]) == 0;
}

static inline bool is_finite(const float* values, std::int64_t count) {
  i32x16 any = {};
  for (std::int64_t i = 0; i < count; i += 16) {
    const u32x16 bits = (u32x16)load_f32(values + i);
    any |= (i32x16)((bits & 0x7f800000) == 0x7f800000);
  }
  std::uint64_t words[8], joined = 0;
  __builtin_memcpy(words, &any, sizeof words);
  for (const std::uint64_t word : words) joined |= word;
  return joined == 0;
}
