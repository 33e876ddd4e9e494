// Heads of queries, keys and values as they come from the projection: normalised, rotated.
// Included inside namespace octavo::OCTAVO_LEVEL.

static inline std::int64_t padded_head(const AttentionArgs& args) { return ceil_div(args.head_dim, kPart) * kPart; }

// The first `count` of 16, the others zeros.
static inline f32x16 load_some(const bf16* from, std::int64_t count) {
  return count == 16 ? load_bf16(from) : load_bf16_part(from, count);
}

static inline f32x16 load_some(const float* from, std::int64_t count) {
  if (count == 16) return load_f32(from);
  f32x16 result = {};
  __builtin_memcpy(&result, from, static_cast<std::size_t>(count) * sizeof(float));
  return result;
}

static inline void store_some(bf16* to, f32x16 value, std::int64_t count) {
  count == 16 ? store_bf16(to, value) : store_bf16_part(to, value, count);
}

static inline void store_some(float* to, f32x16 value, std::int64_t count) {
  __builtin_memcpy(to, &value, static_cast<std::size_t>(count) * sizeof(float));
}

template <class Element>
static inline void prefetch_head(const AttentionArgs& args, const Element* head) {
  for (std::int64_t i = 0; i < args.head_dim; i += 64 / static_cast<std::int64_t>(sizeof(Element)))
    __builtin_prefetch(head + i);
}

// One head, cut in halves whose elements are rotated in pairs: normalised where `norm` is not null, then turned.
// Su et al. 2021, arXiv:2104.09864; Zhang and Sennrich 2019, arXiv:1910.07467. `to` is [P], zeros behind E.
template <class Element>
static inline void make_head(const AttentionArgs& args, const Element* from, const float* norm, std::int64_t token,
                             Element* to) {
  constexpr std::int64_t kMaxVectors = kMaxHeadDim / 2 / 16;
  const std::int64_t half = args.head_dim / 2, num_vectors = ceil_div(half, 16);
  f32x16 first[kMaxVectors], second[kMaxVectors], squares = splat(0.0f);
  for (std::int64_t i = 0; i < num_vectors; ++i) {
    const std::int64_t count = smaller(16, half - i * 16);
    first[i] = load_some(from + i * 16, count);
    second[i] = load_some(from + half + i * 16, count);
    squares += first[i] * first[i];
    squares += second[i] * second[i];
  }
  if (norm) {
    const float mean = sum_of_lanes(squares) / static_cast<float>(args.head_dim);
    const float factor = 1.0f / __builtin_sqrtf(mean + args.norm_eps);
    for (std::int64_t i = 0; i < num_vectors; ++i) {
      const std::int64_t count = smaller(16, half - i * 16);
      first[i] *= factor * load_some(norm + i * 16, count);
      second[i] *= factor * load_some(norm + half + i * 16, count);
    }
  }
  for (std::int64_t i = half * 2; i < padded_head(args); ++i) to[i] = Element{0};
  for (std::int64_t i = 0; i < num_vectors; ++i) {
    const std::int64_t count = smaller(16, half - i * 16);
    const f32x16 cos = load_some(args.cos + token * half + i * 16, count);
    const f32x16 sin = load_some(args.sin + token * half + i * 16, count);
    store_some(to + i * 16, first[i] * cos - second[i] * sin, count);
    store_some(to + half + i * 16, second[i] * cos + first[i] * sin, count);
  }
}

static inline bool has_tiles(const AttentionArgs& args) { return args.block_size % kTilePositions == 0; }

// The tile that holds this slot, for one kv head; tiles of 32 positions lie one after the other in a pool.
static inline std::int64_t tile_index(const AttentionArgs& args, std::int64_t slot, std::int64_t kv_head) {
  const std::int64_t tiles_per_block = args.block_size / kTilePositions;
  const std::int64_t block = slot / args.block_size, tile = slot % args.block_size / kTilePositions;
  return (block * args.num_kv_heads + kv_head) * tiles_per_block + tile;
}
