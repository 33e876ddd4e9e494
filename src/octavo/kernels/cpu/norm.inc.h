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

template <class Element>
static inline float sum_of_row(const Element* x, std::int64_t size) {
  f32x16 sums = splat(0.0f);
  for (std::int64_t i = 0; i < size; i += 16) sums += load_some(x + i, smaller(16, size - i));
  return sum_of_lanes(sums);
}

// (x - mean) / sqrt(variance + eps) * (weight + offset) + bias of one row (Ba et al. 2016, arXiv:1607.06450).
template <class Element>
[[gnu::noinline]] static void center_row(const Fused& fused, const Element* x, std::int64_t size, Element* out) {
  const Element *weight = static_cast<const Element*>(fused.norm_weight), *bias = static_cast<const Element*>(fused.norm_bias);
  const float count = static_cast<float>(size), mean = sum_of_row(x, size) / count;
  const i32x16 lanes = lane_numbers();
  f32x16 squares = splat(0.0f);
  for (std::int64_t i = 0; i < size; i += 16) {
    const f32x16 distance = load_some(x + i, smaller(16, size - i)) - mean;
    squares += select(lanes < static_cast<std::int32_t>(smaller(16, size - i)), distance * distance, splat(0.0f));
  }
  const float scale = 1.0f / __builtin_sqrtf(sum_of_lanes(squares) / count + fused.eps);
  for (std::int64_t i = 0; i < size; i += 16) {
    const std::int64_t part = smaller(16, size - i);
    f32x16 values = (load_some(x + i, part) - mean) * scale * (load_some(weight + i, part) + fused.norm_offset);
    if (bias) values += load_some(bias + i, part);
    store_some(out + i, values, part);
  }
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
  if (args.fused.is_centered) return center_row(args.fused, x, size, out);
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

// Calls `compute` for each row, in parallel: about 16 Ki elements, a few microseconds, at a time.
template <class Compute>
static inline void for_normed_rows(const RowsArgs& rows, Pool& pool, const Compute& compute) {
  const InPhase phase(pool.phases(), Phase::norms);
  const std::int64_t group = larger(1, (std::int64_t{1} << 14) / larger(1, rows.size));
  pool.run(ceil_div(rows.rows, group), [&](std::int64_t chunk) {
    for (std::int64_t row = chunk * group; row < smaller(rows.rows, (chunk + 1) * group); ++row) compute(row);
  });
}

template <class Element>
static void part_squares(const PartNormsArgs& args, Pool& pool) {
  for_normed_rows(args.rows, pool, [&](std::int64_t row) {
    const Element* x = static_cast<const Element*>(args.rows.x) + row * args.rows.size;
    float* squares = args.squares + row * PartNormsArgs::kMaxParts;
    for (std::int64_t part = 0; part < PartNormsArgs::kMaxParts; ++part) {
      squares[part] = part < args.num_parts ? sum_of_squares(x, args.sizes[part]) : 0.0f;
      x += args.sizes[part];
    }
  });
}

template <class Element>
static void scale_parts(const PartNormsArgs& args, Pool& pool) {
  for_normed_rows(args.rows, pool, [&](std::int64_t row) {
    Element* x = static_cast<Element*>(const_cast<void*>(args.rows.x)) + row * args.rows.size;
    for (std::int64_t part = 0; part < PartNormsArgs::kMaxParts; ++part) {
      const std::int64_t size = args.sizes[part];
      const float mean = args.squares[row * PartNormsArgs::kMaxParts + part] / args.totals[part];
      const float scale = 1.0f / __builtin_sqrtf(mean + args.eps);
      for (std::int64_t i = 0; i < size; i += 16) {
        const std::int64_t count = smaller(16, size - i);
        store_some(x + i, load_some(x + i, count) * scale * load_some(args.weights[part] + i, count), count);
      }
      x += size;
    }
  });
}

template <class Element>
static void rms_norm(const NormArgs& args, Pool& pool) {
  for_normed_rows(args.rows, pool, [&](std::int64_t row) {
    normalize_row(args.rows, row, static_cast<Element*>(args.out) + row * args.rows.size);
  });
}
