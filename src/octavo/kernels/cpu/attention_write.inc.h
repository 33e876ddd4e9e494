// A step's keys and values into paged memory. Included inside namespace octavo::OCTAVO_LEVEL.

// One token's key and value [P] each, of one kv head, to their slot.
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

// Head by head: the tile that tokens share stays in the first-level cache.
template <class Element>
static inline void write_kv(const AttentionArgs& args, std::int64_t first_token, std::int64_t end_token) {
  const std::int64_t width = args.num_heads + 2 * args.num_kv_heads, size = args.head_dim;
  alignas(64) Element key[kMaxHeadDim], value[kMaxHeadDim] = {};
  const Element* qkv = static_cast<const Element*>(args.qkv);
  for (std::int64_t head = 0; head < args.num_kv_heads; ++head) {
    for (std::int64_t token = first_token; token < end_token; ++token) {
      const Element* of_head = qkv + (token * width + args.num_heads + head) * size;
      prefetch_head(args, of_head + width * size);  // the next token's
      make_head(args, of_head, args.key_norm, token, key);
      __builtin_memcpy(value, of_head + args.num_kv_heads * size, static_cast<std::size_t>(size) * sizeof(Element));
      if (args.has_int8_kv) {
        store_slot_int8(args, args.slots[token], head, key, value);
      } else {
        store_slot(args, args.slots[token], head, key, value);
      }
    }
  }
}
