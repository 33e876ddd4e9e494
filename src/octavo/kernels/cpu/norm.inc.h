// Normalization. Included inside namespace octavo::OCTAVO_LEVEL.

// Adds the residual to x; the sum is rounded, as later layers read it.
template <class Element>
static inline void add_row(const Element* x, const Element* residual, std::int64_t size, Element* total) {
  const std::int64_t num_whole = size / 16 * 16, rest = size - num_whole;
  for (std::int64_t i = 0; i < num_whole; i += 16) store_whole(total + i, load_whole(x + i) + load_whole(residual + i));
  if (rest)
    store_part(total + num_whole, load_part(x + num_whole, rest) + load_part(residual + num_whole, rest), rest);
}

template <class Element>
static inline float sum_of_squares(const Element* x, std::int64_t size) {
  const std::int64_t num_whole = size / 16 * 16, rest = size - num_whole;
  f32x16 squares = splat(0.0f);
  for (std::int64_t i = 0; i < num_whole; i += 16) {
    const f32x16 value = load_whole(x + i);
    squares += value * value;
  }
  if (rest) {
    const f32x16 value = load_part(x + num_whole, rest);
    squares += value * value;
  }
  return sum_of_lanes(squares);
}

// x / sqrt(mean(x^2) + eps) * (weight + offset) of one row (Zhang and Sennrich 2019, arXiv:1910.07467); x is total if
// there is a residual.
template <class Element>
static inline void normalize_row(const RowsArgs& args, std::int64_t row, Element* out) {
  const std::int64_t size = args.size, num_whole = size / 16 * 16, rest = size - num_whole;
  const Element *x = static_cast<const Element*>(args.x) + row * size, *weight = static_cast<const Element*>(args.fused.norm_weight);
  if (args.fused.residual) {
    Element* total = static_cast<Element*>(args.total) + row * size;
    add_row(x, static_cast<const Element*>(args.fused.residual) + row * size, size, total);
    x = total;
  }
  const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, size) / static_cast<float>(size) + args.fused.eps);
  const float offset = args.fused.norm_offset;
  const auto scale_all = [&](const auto& factors) {
    for (std::int64_t i = 0; i < num_whole; i += 16)
      store_whole(out + i, load_whole(x + i) * scale * factors(load_whole(weight + i)));
    if (rest)
      store_part(out + num_whole, load_part(x + num_whole, rest) * scale * factors(load_part(weight + num_whole, rest)), rest);
  };
  if (offset == 0.0f) return scale_all([](f32x16 weights) { return weights; });
  scale_all([&](f32x16 weights) { return weights + offset; });
}

template <class Element>
static void rms_norm(const NormArgs& args, Pool& pool) {
  const InPhase phase(pool.phases(), Phase::norms);
  const RowsArgs& rows = args.rows;
  // Rows per chunk: about 16 Ki elements, a few microseconds.
  const std::int64_t group = larger(1, (std::int64_t{1} << 14) / larger(1, rows.size));
  pool.run(ceil_div(rows.rows, group), [&](std::int64_t chunk) {
    for (std::int64_t row = chunk * group; row < smaller(rows.rows, (chunk + 1) * group); ++row)
      normalize_row(rows, row, static_cast<Element*>(args.out) + row * rows.size);
  });
}
