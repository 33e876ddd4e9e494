// Heads of queries, keys and values from the projection: normalized, rotated.
// Included inside namespace octavo::OCTAVO_LEVEL.

static inline std::int64_t padded_head(const AttentionArgs& args) { return ceil_div(args.head_dim, kPart) * kPart; }

// Of a value.
static inline std::int64_t value_size(const AttentionArgs& args) { return args.latent_size ? args.latent_size : args.head_dim; }
static inline std::int64_t padded_value(const AttentionArgs& args) { return ceil_div(value_size(args), kPart) * kPart; }

static inline void store_both(bf16* to, f32x16 first, f32x16 second) {
  store(to, narrow_both(first, second));
}

static inline void store_both(f16* to, f32x16 first, f32x16 second) {
  store(to, narrow_both(f16{}, first, second));
}

static inline void store_both(float* to, f32x16 first, f32x16 second) {
  store_f32(to, first);
  store_f32(to + 16, second);
}

template <class Element>
static inline void prefetch_head(const AttentionArgs& args, const Element* head) {
  for (std::int64_t i = 0; i < args.head_dim; i += 64 / static_cast<std::int64_t>(sizeof(Element)))
    __builtin_prefetch(head + i);
}

// Half of a head in registers: `kVectors` whole vectors, or any number up to kMost.
template <int kVectors>
struct HeadHalf {
  static constexpr std::int64_t kMost = kVectors ? kVectors : kMaxHeadDim / 2 / 16;
  std::int64_t size;

  std::int64_t num_vectors() const { return kVectors ? kVectors : ceil_div(size, 16); }
  std::int64_t count(std::int64_t vector) const { return kVectors ? 16 : smaller(16, size - vector * 16); }
};

template <int kVectors, class Element>
static inline void make_head_of(HeadHalf<kVectors> half, const AttentionArgs& args, const RotaryTable& angles,
                                const Element* from, const float* norm, std::int64_t token, Element* to) {
  const float* cos = angles.cos + token * half.size;
  const float* sin = angles.sin + token * half.size;
  f32x16 first[HeadHalf<kVectors>::kMost], second[HeadHalf<kVectors>::kMost], squares = splat(0.0f);
  for (std::int64_t i = 0; i < half.num_vectors(); ++i) {
    first[i] = load_some(from + i * 16, half.count(i));
    second[i] = load_some(from + half.size + i * 16, half.count(i));
    squares += first[i] * first[i];
    squares += second[i] * second[i];
  }
  if (norm) {
    const float mean = sum_of_lanes(squares) / static_cast<float>(args.head_dim);
    const float factor = 1.0f / __builtin_sqrtf(mean + args.norm_eps);
    for (std::int64_t i = 0; i < half.num_vectors(); ++i) {
      first[i] *= factor * load_some(norm + i * 16, half.count(i));
      second[i] *= factor * load_some(norm + half.size + i * 16, half.count(i));
    }
  }
  for (std::int64_t i = 0; i < half.num_vectors(); ++i) {
    const f32x16 across = load_some(cos + i * 16, half.count(i)), along = load_some(sin + i * 16, half.count(i));
    store_some(to + i * 16, first[i] * across - second[i] * along, half.count(i));
    store_some(to + half.size + i * 16, second[i] * across + first[i] * along, half.count(i));
  }
}

// head [E] times its factor and `norm`.
static inline void normalize_head(const AttentionArgs& args, const float* norm, float* head) {
  const std::int64_t size = args.head_dim;
  f32x16 squares = splat(0.0f);
  for (std::int64_t i = 0; i < size; i += 16) {
    const f32x16 values = load_some(head + i, smaller(16, size - i));
    squares += values * values;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(size) + args.norm_eps);
  for (std::int64_t i = 0; i < size; i += 16)
    store_f32(head + i, load_f32(head + i) * (factor * load_some(norm + i, smaller(16, size - i))));
}

// The same for partial or no rotation, of adjacent pairs, or before the norm. Not inlined: other layers pay nothing for
// it. First elements of pairs stay before all second ones: keys and queries agree.
template <class Element>
[[gnu::noinline]] static void make_head_otherwise(const AttentionArgs& args, const RotaryTable& angles, const Element* from,
                                                  const float* norm, std::int64_t token, Element* to) {
  const std::int64_t size = args.head_dim, num_pairs = angles.num_pairs;
  alignas(64) float head[kMaxHeadDim], halves[kMaxHeadDim];
  for (std::int64_t i = 0; i < size; i += 16) store_f32(head + i, load_some(from + i, smaller(16, size - i)));
  if (norm && !args.norms_behind) normalize_head(args, norm, head);
  if (args.rotates_pairs) {
    for (std::int64_t i = 0; i < num_pairs; ++i) halves[i] = head[2 * i], halves[num_pairs + i] = head[2 * i + 1];
    __builtin_memcpy(head, halves, static_cast<std::size_t>(num_pairs) * 2 * sizeof(float));
  }
  for (std::int64_t i = 0; i < num_pairs; i += 16) {
    const std::int64_t count = smaller(16, num_pairs - i), at = token * num_pairs + i;
    const f32x16 across = load_some(angles.cos + at, count), along = load_some(angles.sin + at, count);
    const f32x16 first = load_some(head + i, count), second = load_some(head + num_pairs + i, count);
    store_some(halves + i, first * across - second * along, count);
    store_some(halves + num_pairs + i, second * across + first * along, count);
  }
  __builtin_memcpy(head, halves, static_cast<std::size_t>(num_pairs) * 2 * sizeof(float));
  if (norm && args.norms_behind) normalize_head(args, norm, head);
  for (std::int64_t i = 0; i < size; i += 16)
    store_some(to + i, load_some(head + i, smaller(16, size - i)), smaller(16, size - i));
}

// One head, in two halves whose elements are rotated in pairs: normalized if `norm` is not null, then rotated.
// Su et al. 2021, arXiv:2104.09864; Zhang and Sennrich 2019, arXiv:1910.07467. `to` is [P], zeros after E.
template <class Element>
static inline void make_head(const AttentionArgs& args, const RotaryTable& angles, const Element* from, const float* norm,
                             std::int64_t token, Element* to) {
  const std::int64_t half = args.head_dim / 2;
  const bool is_usual = angles.num_pairs == half && !args.rotates_pairs && !args.norms_behind;
  if (half == 64 && is_usual) return make_head_of(HeadHalf<4>{half}, args, angles, from, norm, token, to);
  for (std::int64_t i = args.head_dim; i < padded_head(args); ++i) to[i] = Element{0};
  if (!is_usual) return make_head_otherwise(args, angles, from, norm, token, to);
  if (half == 32) return make_head_of(HeadHalf<2>{half}, args, angles, from, norm, token, to);
  make_head_of(HeadHalf<0>{half}, args, angles, from, norm, token, to);
}

static inline bool has_tiles(const AttentionArgs& args) {
  return !args.latent_size && args.block_size % kTilePositions == 0;
}

// The tile of this slot, for one kv head; tiles of 32 positions are contiguous in a pool.
static inline std::int64_t tile_index(const AttentionArgs& args, std::int64_t slot, std::int64_t kv_head) {
  const std::int64_t tiles_per_block = args.block_size / kTilePositions;
  const std::int64_t block = slot / args.block_size, tile = slot % args.block_size / kTilePositions;
  return (block * args.num_kv_heads + kv_head) * tiles_per_block + tile;
}
