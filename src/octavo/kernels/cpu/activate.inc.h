// An activation by itself: of gates and ups that adapters have changed. Included inside namespace octavo::OCTAVO_LEVEL.

// out [I] = gated(x[0 ... I), x[I ... 2 * I)), or squared(x); the same bits as the epilogues of linears.
static inline void activate_row(const Activation& activation, const Element* x, std::int64_t size, Element* out) {
  for (std::int64_t i = 0; i < size; i += 16) {
    const std::int64_t count = smaller(16, size - i);
    const f32x16 first = load_some(x + i, count);
    const f32x16 value = activation.kind == ActivationKind::relu2 ? squared(first)
                                                                  : gated(activation, first, load_some(x + size + i, count));
    store_some(out + i, value, count);
  }
}

static void activate(const ActivateArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  const Activation& activation = rows.fused.activation;
  const std::int64_t size = activation.kind == ActivationKind::relu2 ? rows.size : rows.size / 2;
  const std::int64_t group = larger(1, (std::int64_t{1} << 13) / larger(1, rows.size));  // a few microseconds
  pool.run(ceil_div(rows.rows, group), [&](std::int64_t chunk) {
    for (std::int64_t row = chunk * group; row < smaller(rows.rows, (chunk + 1) * group); ++row)
      activate_row(activation, static_cast<const Element*>(args.rows.x) + row * rows.size, size,
                   static_cast<Element*>(args.out) + row * size);
  });
}
