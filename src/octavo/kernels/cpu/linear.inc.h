// Linear layers and fused ops built on them. Included inside namespace octavo::OCTAVO_LEVEL.

static inline std::int64_t left_elements(std::int64_t rows, std::int64_t size) {
  return ceil_div(rows, 16) * ceil_div(size, 32) * kTileElements;
}

static void linear(const LinearArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  LeftElement* left = static_cast<LeftElement*>(pool.scratch().bytes(left_elements(rows.rows, rows.size) * sizeof(LeftElement)));
  pack_rows(rows, left, pool);
  multiply({left, rows.rows, ceil_div(rows.size, 32), args.packed,
            {args.output, args.packed.out_size, args.out, nullptr, rows.fused.activation}},
           pool);
}

// The most panel groups a product is cut into; each keeps argmax candidates for all rows, merged at the end.
static inline std::int64_t max_groups(const Pool& pool) { return 2 * pool.num_threads() * kChunksPerThread; }

static inline void begin_leaders(Leader* leaders, std::int64_t rows, const Pool& pool) {
  for (std::int64_t i = 0; i < max_groups(pool) * rows; ++i) leaders[i] = Leader();
}

static inline void join_leaders(const Leader* leaders, std::int64_t rows, const Pool& pool, Argmax* out) {
  for (std::int64_t row = 0; row < rows; ++row) {
    out[row] = leaders[row].argmax();
    for (std::int64_t group = 1; group < max_groups(pool); ++group) {
      const Argmax other = leaders[group * rows + row].argmax();
      if (leads(other, out[row])) out[row] = other;
    }
  }
}

static void argmax(const ArgmaxArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const std::int64_t left_bytes = left_elements(rows.rows, rows.size) * sizeof(LeftElement);
  char* memory = static_cast<char*>(pool.scratch().bytes(left_bytes + max_groups(pool) * rows.rows * sizeof(Leader)));
  LeftElement* left = reinterpret_cast<LeftElement*>(memory);
  Leader* leaders = reinterpret_cast<Leader*>(memory + left_bytes);
  begin_leaders(leaders, rows.rows, pool);
  pack_rows(rows, left, pool);
  const Destination to = {Output::float32, args.packed.out_size, nullptr, nullptr, {}, leaders};
  multiply({left, rows.rows, ceil_div(rows.size, 32), args.packed, to}, pool);
  join_leaders(leaders, rows.rows, pool, args.out);
}

// down(activation(up(x))). The intermediate stays in tile layout.
static void mlp(const MlpArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const std::int64_t middle_size = args.up.out_size, size = left_elements(rows.rows, rows.size);
  const std::int64_t num_elements = size + left_elements(rows.rows, middle_size);
  LeftElement* left = static_cast<LeftElement*>(pool.scratch().bytes(num_elements * sizeof(LeftElement)));
  LeftElement* middle = left + size;
  pack_rows(rows, left, pool);
  const Activation& activation = rows.fused.activation;
  multiply({left, rows.rows, ceil_div(rows.size, 32), args.up,
            {activated_output(activation), middle_size, nullptr, middle, activation}},
           pool);
  multiply({middle, rows.rows, ceil_div(middle_size, 32), args.down, {Output::plain, args.down.out_size, args.out, nullptr}}, pool);
}
