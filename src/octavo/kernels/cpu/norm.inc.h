// Normalisation. Included inside namespace octavo::OCTAVO_LEVEL.

// Adds a residual to x; the sum is rounded as later layers read it.
static inline void add_row(const bf16* x, const bf16* residual, std::int64_t size, bf16* total) {
  const std::int64_t num_whole = size / 16 * 16, rest = size - num_whole;
  for (std::int64_t i = 0; i < num_whole; i += 16) store_bf16(total + i, load_bf16(x + i) + load_bf16(residual + i));
  if (rest)
    store_bf16_part(total + num_whole, load_bf16_part(x + num_whole, rest) + load_bf16_part(residual + num_whole, rest),
                    rest);
}

static inline float sum_of_squares(const bf16* x, std::int64_t size) {
  const std::int64_t num_whole = size / 16 * 16, rest = size - num_whole;
  f32x16 squares = splat(0.0f);
  for (std::int64_t i = 0; i < num_whole; i += 16) {
    const f32x16 value = load_bf16(x + i);
    squares += value * value;
  }
  if (rest) {
    const f32x16 value = load_bf16_part(x + num_whole, rest);
    squares += value * value;
  }
  return sum_of_lanes(squares);
}

// x / sqrt(mean(x^2) + eps) * weight of one row (Zhang and Sennrich 2019, arXiv:1910.07467), x being total where there
// is a residual.
static inline void normalise_row(const RowsArgs& args, std::int64_t row, bf16* out) {
  const std::int64_t size = args.size, num_whole = size / 16 * 16, rest = size - num_whole;
  const bf16* x = args.x + row * size;
  if (args.residual) {
    bf16* total = args.total + row * size;
    add_row(x, args.residual + row * size, size, total);
    x = total;
  }
  const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, size) / static_cast<float>(size) + args.eps);
  for (std::int64_t i = 0; i < num_whole; i += 16)
    store_bf16(out + i, load_bf16(x + i) * scale * load_bf16(args.norm_weight + i));
  if (rest)
    store_bf16_part(out + num_whole,
                    load_bf16_part(x + num_whole, rest) * scale * load_bf16_part(args.norm_weight + num_whole, rest),
                    rest);
}

static void rms_norm(const NormArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  // Rows of one chunk: about 16 Ki elements, a few microseconds.
  const std::int64_t group = larger(1, (std::int64_t{1} << 14) / larger(1, rows.size));
  pool.run(ceil_div(rows.rows, group), [&](std::int64_t chunk) {
    for (std::int64_t row = chunk * group; row < smaller(rows.rows, (chunk + 1) * group); ++row)
      normalise_row(rows, row, args.out + row * rows.size);
  });
}
