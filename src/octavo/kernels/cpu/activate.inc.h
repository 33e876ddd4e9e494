// An activation by itself, of gates and ups that adapters have changed; and what is computed of rows element by element.
// Included inside namespace octavo::OCTAVO_LEVEL.

// out [I] = gated(x[0 ... I), x[I ... 2 * I)), or ungated(x); the same bits as the epilogues of linears.
static inline void activate_row(const Activation& activation, const Element* x, std::int64_t size, Element* out) {
  for (std::int64_t i = 0; i < size; i += 16) {
    const std::int64_t count = smaller(16, size - i);
    const f32x16 first = load_some(x + i, count);
    const f32x16 value = activation.is_gated() ? gated(activation, first, load_some(x + size + i, count))
                                               : ungated(activation, first);
    store_some(out + i, value, count);
  }
}

// Calls `compute` for each row, in parallel, a few microseconds of them at a time.
template <class Compute>
static inline void for_rows(const RowsArgs& rows, Pool& pool, const Compute& compute) {
  const std::int64_t group = larger(1, (std::int64_t{1} << 13) / larger(1, rows.size));
  pool.run(ceil_div(rows.rows, group), [&](std::int64_t chunk) {
    for (std::int64_t row = chunk * group; row < smaller(rows.rows, (chunk + 1) * group); ++row) compute(row);
  });
}

static void activate(const ActivateArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  const Activation& activation = rows.fused.activation;
  const std::int64_t size = activation.is_gated() ? rows.size / 2 : rows.size;
  for_rows(rows, pool, [&](std::int64_t row) {
    activate_row(activation, static_cast<const Element*>(rows.x) + row * rows.size, size,
                 static_cast<Element*>(args.out) + row * size);
  });
}

static void gated_product(const GatedProductArgs& args, Pool& pool) {
  const std::int64_t size = args.rows.size;
  for_rows(args.rows, pool, [&](std::int64_t row) {
    const Element *gates = static_cast<const Element*>(args.rows.x) + row * size,
                  *factors = static_cast<const Element*>(args.factors) + row * args.stride;
    Element* out = static_cast<Element*>(args.out) + row * size;
    for (std::int64_t i = 0; i < size; i += 16) {
      const std::int64_t count = smaller(16, size - i);
      store_some(out + i, gated(args.rows.fused.activation, load_some(gates + i, count), load_some(factors + i, count)), count);
    }
  });
}

static void scaled_sum(const ScaledSumArgs& args, Pool& pool) {
  const std::int64_t size = args.rows.size;
  for_rows(args.rows, pool, [&](std::int64_t row) {
    const Element *x = static_cast<const Element*>(args.rows.x) + row * size, *residual = nullptr;
    Element* out = static_cast<Element*>(args.out) + row * size;
    if (args.rows.fused.residual) residual = static_cast<const Element*>(args.rows.fused.residual) + row * size;
    for (std::int64_t i = 0; i < size; i += 16) {
      const std::int64_t count = smaller(16, size - i);
      if (residual) store_some(out + i, load_some(x + i, count) + load_some(residual + i, count), count);
      store_some(out + i, load_some(residual ? out + i : x + i, count) * args.scale, count);
    }
  });
}
