// Normalisation. Included inside namespace octavo::OCTAVO_LEVEL.

// x + residual, rounded as later layers read it, to `total`; then total / sqrt(mean(total^2) + eps) * weight to `out`.
static inline void normalise_row(const NormArgs& args, std::int64_t row) {
  const std::int64_t size = args.size, num_whole = size / 16, rest = size % 16;
  const bf16* x = args.x + row * size;
  if (args.residual) {
    const bf16* residual = args.residual + row * size;
    bf16* total = args.total + row * size;
    for (std::int64_t i = 0; i < num_whole; ++i) store_bf16(total + i * 16, load_bf16(x + i * 16) + load_bf16(residual + i * 16));
    if (rest) {
      const std::int64_t i = num_whole * 16;
      store_bf16_part(total + i, load_bf16_part(x + i, rest) + load_bf16_part(residual + i, rest), rest);
    }
    x = total;
  }
  f32x16 squares = splat(0.0f);
  for (std::int64_t i = 0; i < num_whole; ++i) {
    const f32x16 value = load_bf16(x + i * 16);
    squares += value * value;
  }
  if (rest) {
    const f32x16 value = load_bf16_part(x + num_whole * 16, rest);
    squares += value * value;
  }
  const float scale = 1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(size) + args.eps);
  bf16* out = args.out + row * size;
  for (std::int64_t i = 0; i < num_whole; ++i)
    store_bf16(out + i * 16, load_bf16(x + i * 16) * scale * load_bf16(args.weight + i * 16));
  if (rest) {
    const std::int64_t i = num_whole * 16;
    store_bf16_part(out + i, load_bf16_part(x + i, rest) * scale * load_bf16_part(args.weight + i, rest), rest);
  }
}

static void rms_norm(const NormArgs& args, Pool& pool) {
  // Rows of one chunk: about 16 Ki elements, a few microseconds.
  const std::int64_t group = larger(1, (std::int64_t{1} << 14) / larger(1, args.size));
  pool.run(ceil_div(args.rows, group), [&](std::int64_t chunk) {
    for (std::int64_t row = chunk * group; row < smaller(args.rows, (chunk + 1) * group); ++row)
      normalise_row(args, row);
  });
}
