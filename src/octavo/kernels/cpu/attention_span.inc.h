// Spans of a context, and the locations of their keys and values. Included inside namespace
// octavo::OCTAVO_LEVEL.

constexpr std::int64_t kSpanTiles = 8;  // 256 positions
constexpr std::int64_t kSpanPositions = kSpanTiles * kTilePositions;

// Some tiles of one context, for all kv heads of the rows. Pointers are null if the pool is not tiled.
struct Span {
  RowBlock rows;
  std::int64_t first_tile, num_tiles, begin_tile, end_tile;  // of the span, and of all that is visible to its rows
  const char* keys[kSpanTiles];                              // of the first head
  const char* values[kSpanTiles];
  std::int64_t head_stride, tile_bytes;
  bool is_seen_by_all[kSpanTiles];

  bool is_first() const { return first_tile == begin_tile; }
  bool is_last() const { return first_tile + num_tiles == end_tile; }
};

static inline std::int64_t slot_of(const AttentionArgs& args, std::int64_t request, std::int64_t position) {
  const std::int32_t block = args.block_table[request * args.num_blocks_per_request + position / args.block_size];
  return block * args.block_size + position % args.block_size;
}

// Bytes of one position of one head in the pool.
template <class Element>
static inline std::int64_t slot_bytes(const AttentionArgs& args) {
  return args.has_int8_kv ? stored_head(args) : padded_head(args) * static_cast<std::int64_t>(sizeof(Element));
}

// The span starting at this tile: up to the next multiple of kSpanTiles, or to the last visible tile.
template <class Element>
static inline Span find_span(const AttentionArgs& args, const RowBlock& rows, std::int64_t first_tile) {
  const Sight first = sight(args, rows, 0), last = sight(args, rows, rows.rows_per_head - 1);
  Span span = {};
  span.rows = rows;
  span.begin_tile = first.first / kTilePositions;
  span.end_tile = last.last / kTilePositions + 1;
  span.first_tile = larger(first_tile, span.begin_tile);
  span.num_tiles = smaller(span.end_tile, (span.first_tile / kSpanTiles + 1) * kSpanTiles) - span.first_tile;
  span.tile_bytes = kTilePositions * slot_bytes<Element>(args);
  span.head_stride = args.block_size / kTilePositions * span.tile_bytes;
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    const std::int64_t start = (span.first_tile + i) * kTilePositions;
    span.is_seen_by_all[i] = start >= last.first && start + kTilePositions - 1 <= first.last;
    if (!has_tiles(args)) continue;
    const std::int64_t tile = tile_index(args, slot_of(args, rows.request, start), rows.kv_head);
    span.keys[i] = static_cast<const char*>(args.keys) + tile * span.tile_bytes;
    span.values[i] = static_cast<const char*>(args.values) + tile * span.tile_bytes;
  }
  return span;
}

// Keys or values of one kv head over a span, in the layout that products read.
template <class Element>
struct Tiles {
  const Element* of[kSpanTiles];
};

#include "attention_latent.inc.h"

// Gathers a tile from contiguous slots of untiled blocks. Positions past the context are zeros.
template <class Element>
static inline void gather_tile(const AttentionArgs& args, const RowBlock& rows, const char* pool, std::int64_t head,
                               std::int64_t tile, Element* to, bool is_keys) {
  if constexpr (!std::is_same_v<Element, std::int8_t>)
    if (args.latent_size) return gather_latent_tile(args, rows.request, tile, to, is_keys);
  const std::int64_t padded = padded_head(args), first = tile * kTilePositions;
  const std::int64_t count = smaller(kTilePositions, args.seq_lens[rows.request] - first);
  __builtin_memset(to, 0, static_cast<std::size_t>(kTilePositions * padded) * sizeof(Element));
  alignas(64) Element widened[kMaxHeadDim];
  for (std::int64_t at = 0; at < count; ++at) {
    const std::int64_t slot = slot_of(args, rows.request, first + at);
    const char* from = pool + (slot * args.num_kv_heads + rows.kv_head + head) * slot_bytes<Element>(args);
    const Element* elements = reinterpret_cast<const Element*>(from);
    if (args.has_int8_kv) {
      widen_bytes(reinterpret_cast<const std::int8_t*>(from), padded, widened);
      elements = widened;
    }
    is_keys ? put_key(to, at, elements, padded) : put_value(to, at, elements, padded);
  }
}

// Directly in the pool.
template <class Element>
static inline Tiles<Element> stored_tiles(const Span& span, bool is_keys, std::int64_t head) {
  Tiles<Element> tiles;
  for (std::int64_t i = 0; i < span.num_tiles; ++i)
    tiles.of[i] = reinterpret_cast<const Element*>((is_keys ? span.keys : span.values)[i] + head * span.head_stride);
  return tiles;
}

// Whether products read bytes directly from the pool.
static inline bool multiplies_bytes(const AttentionArgs& args) {
  return kMultipliesBytes && args.has_int8_kv && has_tiles(args);
}

// `work` receives tiles that the pool stores in another format.
template <class Element>
static inline Tiles<Element> tiles_of(const AttentionArgs& args, const Span& span, bool is_keys, std::int64_t head,
                                      Element* work) {
  Tiles<Element> tiles;
  const std::int64_t size = kTilePositions * (is_keys ? padded_head(args) : padded_value(args));
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    Element* to = work + i * size;
    tiles.of[i] = to;
    if (!has_tiles(args)) {
      const void* pool = is_keys ? args.keys : args.values;
      gather_tile(args, span.rows, static_cast<const char*>(pool), head, span.first_tile + i, to, is_keys);
      continue;
    }
    const char* from = (is_keys ? span.keys : span.values)[i] + head * span.head_stride;
    if (args.has_int8_kv) {
      widen_bytes(reinterpret_cast<const std::int8_t*>(from), size, to);
    } else {
      tiles.of[i] = reinterpret_cast<const Element*>(from);
    }
  }
  return tiles;
}

// Scales of one kv head's keys or values over a span; if slots are gathered, zeros past the context.
static inline void find_scales(const AttentionArgs& args, const Span& span, bool is_keys, std::int64_t head,
                               float* scales) {
  const std::int64_t padded = padded_head(args), stored = stored_head(args);
  const char* pool = static_cast<const char*>(is_keys ? args.keys : args.values);
  for (std::int64_t i = 0; i < span.num_tiles; ++i, scales += kTilePositions) {
    if (has_tiles(args)) {
      const char* tile = (is_keys ? span.keys : span.values)[i] + head * span.head_stride;
      __builtin_memcpy(scales, tile + kTilePositions * padded, kTilePositions * kScaleBytes);
      continue;
    }
    const std::int64_t first = (span.first_tile + i) * kTilePositions;
    const std::int64_t count = smaller(kTilePositions, args.seq_lens[span.rows.request] - first);
    __builtin_memset(scales, 0, kTilePositions * kScaleBytes);
    for (std::int64_t at = 0; at < count; ++at) {
      const std::int64_t slot = slot_of(args, span.rows.request, first + at);
      const char* from = pool + (slot * args.num_kv_heads + span.rows.kv_head + head) * stored;
      __builtin_memcpy(scales + at, from + padded, kScaleBytes);
    }
  }
}
