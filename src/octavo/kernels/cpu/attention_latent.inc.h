// One vector per token for all heads: its front is the value, all of it the key. Included inside namespace
// octavo::OCTAVO_LEVEL.
//
// The pool holds it once, row by row: [slots][E]. Tiles of keys and of values are built when read: a product by 16 heads
// or more takes several times as long.

// A query, or a token's vector: the front normalized if `norm` is not null, what is behind it rotated. `to` is [P],
// zeros after E.
template <class Element>
[[gnu::noinline]] static void make_latent(const AttentionArgs& args, const Element* from, const float* norm,
                                          std::int64_t token, Element* to) {
  const std::int64_t size = args.latent_size, num_pairs = args.angles.num_pairs;
  f32x16 factor = splat(1.0f);
  if (norm) {
    f32x16 squares = splat(0.0f);
    for (std::int64_t i = 0; i < size; i += 16) {
      const f32x16 values = load_some(from + i, smaller(16, size - i));
      squares += values * values;
    }
    factor = splat(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(size) + args.norm_eps));
  }
  for (std::int64_t i = 0; i < size; i += 16) {
    const std::int64_t count = smaller(16, size - i);
    f32x16 values = load_some(from + i, count);
    if (norm) values *= factor * load_some(norm + i, count);
    store_some(to + i, values, count);
  }
  alignas(64) float behind[kMaxHeadDim], turned[kMaxHeadDim];
  for (std::int64_t i = 0; i < num_pairs * 2; i += 16)
    store_f32(behind + i, load_some(from + size + i, smaller(16, num_pairs * 2 - i)));
  const float *cos = args.angles.cos + token * num_pairs, *sin = args.angles.sin + token * num_pairs;
  for (std::int64_t i = 0; i < num_pairs; ++i) {
    const std::int64_t first = args.rotates_pairs ? 2 * i : i, second = args.rotates_pairs ? first + 1 : i + num_pairs;
    turned[first] = behind[first] * cos[i] - behind[second] * sin[i];
    turned[second] = behind[second] * cos[i] + behind[first] * sin[i];
  }
  for (std::int64_t i = 0; i < num_pairs * 2; i += 16)
    store_some(to + size + i, load_f32(turned + i), smaller(16, num_pairs * 2 - i));
  for (std::int64_t i = args.head_dim; i < padded_head(args); ++i) to[i] = Element{0};
}

// Writes the vectors of some tokens to their slots.
template <class Element>
[[gnu::noinline]] static void write_latents(const AttentionArgs& args, std::int64_t first_token, std::int64_t end_token) {
  alignas(64) Element vector[kMaxHeadDim];
  for (std::int64_t token = first_token; token < end_token; ++token) {
    make_latent(args, static_cast<const Element*>(args.vectors) + token * args.head_dim, args.key_norm, token, vector);
    __builtin_memcpy(static_cast<Element*>(args.keys) + args.slots[token] * args.head_dim, vector,
                     static_cast<std::size_t>(args.head_dim) * sizeof(Element));
  }
}

// Builds a tile of keys or values: 16 positions at a time, in place where they are next to each other and need no
// padding. Positions past the context are zeros.
template <class Element>
[[gnu::noinline]] static void gather_latent_tile(const AttentionArgs& args, std::int64_t request, std::int64_t tile, Element* to,
                                      bool is_keys) {
  const std::int64_t size = args.head_dim, padded = padded_head(args), first = tile * kTilePositions;
  const std::int64_t count = smaller(kTilePositions, args.seq_lens[request] - first);
  const Element* pool = static_cast<const Element*>(args.keys);
  alignas(64) Element copies[16 * kMaxHeadDim];
  for (std::int64_t half = 0; half < kTilePositions; half += 16) {
    const Element* rows = copies;
    if (half + 16 <= count && args.block_size % 16 == 0 && size == padded) {
      rows = pool + slot_of(args, request, first + half) * size;
    } else {
      __builtin_memset(copies, 0, static_cast<std::size_t>(16 * padded) * sizeof(Element));
      for (std::int64_t at = half; at < smaller(half + 16, count); ++at)
        __builtin_memcpy(copies + (at - half) * padded, pool + slot_of(args, request, first + at) * size,
                         static_cast<std::size_t>(size) * sizeof(Element));
    }
    is_keys ? put_16_keys(to, half, rows, padded, padded) : put_16_values(to, half, rows, padded, padded_value(args));
  }
}
