// Queries, and the weights of a span's positions computed from scores. Included inside namespace octavo::OCTAVO_LEVEL.

constexpr std::int64_t kMaxParts = kMaxHeadDim / kPart;
// A thread's working memory for one row block.
template <class Element>
struct Workspace {
  alignas(64) Left<Element> queries[2 * kMaxParts * kLeftElements];   // [row tiles][parts] left parts
  alignas(64) Left<Element> weights[2 * kSpanTiles * kLeftElements];  // [row tiles][tiles] left parts
  alignas(64) float scores[kSpanTiles * 2 * kPairElements];     // [tiles] results
  alignas(64) float mixed[kMaxParts * 2 * kPairElements];       // [parts] results: of this span
  alignas(64) float mixed_alone[kMaxParts * 2 * kPairElements]; // the same, for rows computed one by one
  alignas(64) float total[kMaxParts * 2 * kPairElements];       // [parts] results: of all spans so far
  alignas(64) Element tiles[kSpanPositions * kMaxHeadDim];      // gathered, of one kv head
  alignas(64) Element cleaned[kSpanPositions * kMaxHeadDim];    // copies of tiles that not all rows see
  alignas(64) float key_scales[kTileRows * kSpanPositions];     // [kv heads][positions], of int8 keys
  alignas(64) float value_scales[kTileRows * kSpanPositions];
  f32x16 lanes[kMaxRowsOfBlock] = {};  // of each row: per-lane maximum of scores, then sum of weights
  alignas(64) float bases[kMaxRowsOfBlock], old_shares[kMaxRowsOfBlock], new_shares[kMaxRowsOfBlock];
  alignas(64) float span_max[kMaxRowsOfBlock] = {}, span_sum[kMaxRowsOfBlock] = {};  // of this span, for joining
  alignas(64) float query_scales[kMaxRowsOfBlock], weight_scales[kMaxRowsOfBlock];  // for integer products
  RowStates states[2];  // of each row tile
};

static inline std::int64_t out_offset(const AttentionArgs& args, const RowBlock& rows, std::int64_t row) {
  return (rows.token(row) * args.num_heads + rows.query_head(row)) * value_size(args);
}

// Writes elements of a query to a left part.
template <class Element>
static inline void put_query(float* to, const Element* query) {
  for (std::int64_t i = 0; i < kPart; i += 16) store_f32(to + i, load_whole(query + i));
}
static inline void put_query(bf16* to, const bf16* query) { __builtin_memcpy(to, query, kPart * sizeof *to); }

template <class Element>
static inline void make_queries(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work) {
  const std::int64_t width = args.width(), num_parts = padded_head(args) / kPart;
  const std::int64_t num_rows = rows.num_rows(), num_row_tiles = ceil_div(num_rows, kTileRows);
  const Element* qkv = static_cast<const Element*>(args.qkv);
  // Rows are far apart, which defeats the hardware prefetcher.
  for (std::int64_t row = 0; row < num_rows; ++row) {
    prefetch_head(args, qkv + (rows.token(row) * width + rows.query_head(row)) * args.head_dim);
    prefetch_head(args, static_cast<const Element*>(args.out) + out_offset(args, rows, row));
  }
  const std::size_t num_bytes = static_cast<std::size_t>(num_parts * kPart) * sizeof(Element);
  alignas(64) Element query[kMaxHeadDim];
  __builtin_memset(query, 0, num_bytes);
  for (std::int64_t row = 0; row < num_row_tiles * kTileRows; ++row) {
    if (row < num_rows) {
      const std::int64_t token = rows.token(row), at = (token * width + rows.query_head(row)) * args.head_dim;
      args.latent_size ? make_latent(args, qkv + at, nullptr, token, query)
                       : make_head(args, args.query_angles, qkv + at, args.query_norm, token, query);
    } else {
      __builtin_memset(query, 0, num_bytes);
    }
    if constexpr (kMultipliesIntegers) {
      if (args.has_int8_kv) {
        work.query_scales[row] = round_row(query, num_parts * kPart, left_row(work.queries, num_parts, row));
        continue;
      }
    }
    Left<Element>* to = work.queries + row / kTileRows * num_parts * kLeftElements + row % kTileRows * kPart;
    for (std::int64_t part = 0; part < num_parts; ++part) put_query(to + part * kLeftElements, query + part * kPart);
  }
}

// Lane i of a vector of scores is position `start` + i; masked ones become -inf.
static inline f32x16 hide(f32x16 scores, std::int64_t start, Sight seen) {
  const i32x16 lanes = lane_numbers();
  const std::int32_t first = static_cast<std::int32_t>(smaller(16, larger(-1, seen.first - start)));
  const std::int32_t last = static_cast<std::int32_t>(smaller(16, larger(-1, seen.last - start)));
  const i32x16 is_seen = (lanes >= first) & (lanes <= last);
#if defined(OCTAVO_HAS_AVX512)
  return is_seen ? scores : splat(kNothing);
#else
  return select(is_seen, scores, splat(kNothing));
#endif
}

template <class Element>
static inline float* scores_of(Workspace<Element>& work, std::int64_t row, std::int64_t tile, std::int64_t half) {
  return work.scores + (tile * 2 + row / 16) * kPairElements + half * kResultElements + row % 16 * 16;
}

// Scales of a row's kv head over the span, or null.
template <class Element>
static inline const float* scales_of(const AttentionArgs& args, const Span& span, const float* scales,
                                     std::int64_t row) {
  return args.has_int8_kv ? scales + row / span.rows.rows_per_head * kSpanPositions : nullptr;
}

// Multiplies a row's scores by their keys' scales, in place; integer sums become floats.
template <class Element>
static inline void scale_scores(const Workspace<Element>& work, std::int64_t row, float* scores, const float* scales) {
  if constexpr (kMultipliesIntegers) {
    scale_sums(scores, load_f32(scales) * work.query_scales[row]);
  } else {
    store_f32(scores, load_f32(scores) * load_f32(scales));
  }
}

// Soft cap (Gemma 2, arXiv:2408.00118): scores become fractions of the cap, -1 ... 1. Not inlined: other layers pay
// nothing for it.
template <class Element>
[[gnu::noinline]] static void cap_scores(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  const float factor = args.scale / args.soft_cap;
  for (std::int64_t row = 0; row < span.rows.num_rows(); ++row) {
    const float* scales = scales_of<Element>(args, span, work.key_scales, row);
    for (std::int64_t i = 0; i < span.num_tiles * 2; ++i) {
      float* scores = scores_of(work, row, i / 2, i % 2);
      if (scales) scale_scores(work, row, scores, scales + i * 16);
      store_f32(scores, hyperbolic_tangent(load_f32(scores) * factor));
    }
  }
}

// Masks a row's scores and finds the largest of the rest.
template <class Element>
static inline f32x16 max_of_scores(const AttentionArgs& args, const Span& span, Workspace<Element>& work,
                                   std::int64_t row) {
  const Sight seen = sight(args, span.rows, row);
  const float* scales = args.soft_cap != 0.0f ? nullptr : scales_of<Element>(args, span, work.key_scales, row);
  f32x16 max = splat(kNothing);
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    for (std::int64_t half = 0; half < 2; ++half) {
      float* scores = scores_of(work, row, i, half);
      if (scales) scale_scores(work, row, scores, scales + i * kTilePositions + half * 16);
      if (!span.is_seen_by_all[i]) {
        const std::int64_t start = (span.first_tile + i) * kTilePositions + half * 16;
        store_f32(scores, hide(load_f32(scores), start, seen));
      }
      max = greater(load_f32(scores), max);
    }
  }
  return max;
}

// Zero weights ignore their scale, which may be uninitialized or a NaN that only other rows see.
static inline f32x16 scaled(f32x16 weight, const float* scales) {
  const f32x16 product = weight * load_f32(scales);
  return select(weight == 0.0f, weight, product);
}

// One row's scores to weights, tiles `stride` apart; returns their sum before rounding.
template <class Element, class Weight>
static inline f32x16 weigh_row(float factor, const Span& span, Workspace<Element>& work, std::int64_t row,
                               const float* scales, Weight* weights, std::int64_t stride) {
  const f32x16 base = splat(work.bases[row]);
  f32x16 sum = splat(0.0f);
  for (std::int64_t i = 0; i < span.num_tiles; ++i) {
    const float* scores = scores_of(work, row, i, 0);
    f32x16 first = weight_of(Element{}, (load_f32(scores) - base) * factor);
    f32x16 second = weight_of(Element{}, (load_f32(scores + kResultElements) - base) * factor);
    sum += first;
    sum += second;
    if (scales) {
      first = scaled(first, scales + i * kTilePositions);
      second = scaled(second, scales + i * kTilePositions + 16);
    }
    store_both(weights + i * stride, first, second);
  }
  return sum;
}

// As above, to the location that products read.
template <class Element>
static inline f32x16 weigh_row(const AttentionArgs& args, const Span& span, float factor, Workspace<Element>& work,
                               std::int64_t row) {
  const float* scales = scales_of<Element>(args, span, work.value_scales, row);
  if constexpr (kMultipliesIntegers) {
    if (args.has_int8_kv) {
      alignas(64) float weights[kSpanPositions];
      const f32x16 sum = weigh_row(factor, span, work, row, scales, weights, kTilePositions);
      work.weight_scales[row] =
          round_row(weights, span.num_tiles * kTilePositions, left_row(work.weights, kSpanTiles, row));
      return sum;
    }
  }
  Left<Element>* weights = work.weights + row / 16 * kSpanTiles * kLeftElements + row % 16 * kPart;
  return weigh_row(factor, span, work, row, scales, weights, kLeftElements);
}

template <class Element>
static inline void weigh_span(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  const float factor = (args.soft_cap != 0.0f ? args.soft_cap : args.scale) * kLog2E;
  const std::int64_t num_rows = span.rows.num_rows();
  for (std::int64_t head = 0; args.has_int8_kv && head < span.rows.num_heads; ++head) {
    find_scales(args, span, true, head, work.key_scales + head * kSpanPositions);
    find_scales(args, span, false, head, work.value_scales + head * kSpanPositions);
  }
  if (args.soft_cap != 0.0f) cap_scores(args, span, work);
  for (std::int64_t row = 0; row < num_rows; ++row) work.lanes[row] = max_of_scores(args, span, work, row);
  for (std::int64_t tile = 0; tile * 16 < num_rows; ++tile) {
    const f32x16 max = max_of_each(work.lanes + tile * 16);
    store_f32(work.bases + tile * 16, select(max == kNothing, splat(0.0f), max));
    for (std::int64_t row = tile * 16; row < smaller(num_rows, tile * 16 + 16); ++row)
      work.lanes[row] = weigh_row(args, span, factor, work, row);
    store_f32(work.span_max + tile * 16, max * factor);
    store_f32(work.span_sum + tile * 16, sum_of_each(work.lanes + tile * 16));
  }
}
