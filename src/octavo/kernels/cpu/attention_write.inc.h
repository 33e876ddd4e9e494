// Writes a step's keys and values to paged memory. Included inside namespace octavo::OCTAVO_LEVEL.

constexpr std::int64_t kRunSlots = 16;

// Writes one token's key and value, [P] each, of one kv head to their slot.
template <class Element>
static inline void store_slot(const AttentionArgs& args, std::int64_t slot, std::int64_t head, const Element* key,
                              const Element* value) {
  const std::int64_t padded = padded_head(args);
  if (has_tiles(args)) {
    const std::int64_t tile = tile_index(args, slot, head) * kTilePositions * padded, at = slot % kTilePositions;
    put_key(static_cast<Element*>(args.keys) + tile, at, key, padded);
    put_value(static_cast<Element*>(args.values) + tile, at, value, padded);
  } else {
    const std::int64_t offset = (slot * args.num_kv_heads + head) * padded;
    const std::size_t size = static_cast<std::size_t>(padded) * sizeof(Element);
    __builtin_memcpy(static_cast<Element*>(args.keys) + offset, key, size);
    __builtin_memcpy(static_cast<Element*>(args.values) + offset, value, size);
  }
}

// Whether this token's slot starts a run of slots written together: up to 16 of a tile.
static inline bool begins_run(const AttentionArgs& args, std::int64_t token) {
  return token == 0 || args.slots[token] % kRunSlots == 0 || args.slots[token] != args.slots[token - 1] + 1;
}

// Copies one value, normalized if the layer does that.
template <class Element>
static inline void make_value(const AttentionArgs& args, const Element* from, Element* to) {
  const std::int64_t size = args.head_dim;
  if (!args.normalizes_values) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(size) * sizeof(Element));
    return;
  }
  f32x16 squares = splat(0.0f);
  for (std::int64_t i = 0; i < size; i += 16) {
    const f32x16 part = load_some(from + i, smaller(16, size - i));
    squares += part * part;
  }
  const f32x16 factor = splat(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(size) + args.norm_eps));
  for (std::int64_t i = 0; i < size; i += 16) {
    const std::int64_t count = smaller(16, size - i);
    store_some(to + i, load_some(from + i, count) * factor, count);
  }
}

// Writes the tokens of one run, for one kv head.
template <class Element>
static inline void write_run(const AttentionArgs& args, std::int64_t first_token, std::int64_t end_token,
                             std::int64_t head) {
  const std::int64_t width = args.width(), size = args.head_dim, count = end_token - first_token;
  const std::int64_t padded = padded_head(args), slot = args.slots[first_token];
  alignas(64) Element keys[kRunSlots * kMaxHeadDim], values[kRunSlots * kMaxHeadDim];
  const Element* from = static_cast<const Element*>(args.qkv) + (first_token * width + args.num_heads + head) * size;
  for (std::int64_t at = 0; at < count; ++at, from += width * size) {
    Element *key = keys + at * padded, *value = values + at * padded;
    make_head(args, args.angles, from, args.key_norm, first_token + at, key);
    make_value(args, args.num_parts == 3 ? from + args.num_kv_heads * size : from, value);
    for (std::int64_t i = size; i < padded; ++i) value[i] = Element{0};
  }
  if (count == kRunSlots && has_tiles(args) && !args.has_int8_kv) {
    const std::int64_t tile = tile_index(args, slot, head) * kTilePositions * padded, first = slot % kTilePositions;
    put_16_keys(static_cast<Element*>(args.keys) + tile, first, keys, padded, padded);
    put_16_values(static_cast<Element*>(args.values) + tile, first, values, padded, padded);
    return;
  }
  for (std::int64_t at = 0; at < count; ++at) {
    const Element *key = keys + at * padded, *value = values + at * padded;
    args.has_int8_kv ? store_slot_int8(args, slot + at, head, key, value) : store_slot(args, slot + at, head, key, value);
  }
}

// Prefetches a run's keys and values, which are far apart.
template <class Element>
static inline void prefetch_run(const AttentionArgs& args, std::int64_t first_token, std::int64_t end_token,
                                std::int64_t head) {
  const std::int64_t width = args.width();
  const Element* qkv = static_cast<const Element*>(args.qkv);
  for (std::int64_t token = first_token; token < end_token; ++token) {
    const Element* key = qkv + (token * width + args.num_heads + head) * args.head_dim;
    prefetch_head(args, key);
    prefetch_head(args, key + args.num_kv_heads * args.head_dim);
  }
}

// Writes the runs that start among these tokens.
template <class Element>
static inline void write_kv(const AttentionArgs& args, std::int64_t first_token, std::int64_t end_token) {
  for (std::int64_t token = first_token; token < end_token;) {
    std::int64_t end = token + 1;
    while (end < args.num_tokens && !begins_run(args, end)) ++end;
    if (begins_run(args, token)) {
      prefetch_run<Element>(args, token, end, 0);
      for (std::int64_t head = 0; head < args.num_kv_heads; ++head) {
        if (head + 1 < args.num_kv_heads) prefetch_run<Element>(args, token, end, head + 1);
        write_run<Element>(args, token, end, head);
      }
    }
    token = end;
  }
}
