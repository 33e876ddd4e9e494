// Linear layers with integer weights. Included inside namespace octavo::OCTAVO_LEVEL.
//
// out = row scale * (sum over groups, in order, of scale * exact sum) + bias: the same for any number of rows and any
// multiplying unit. `Element`: of the activations, bf16 or f16.

template <class Element>
constexpr bool kIsFloat16 = std::is_same_v<Element, f16>;

template <class Element>
static void integer_linear(const LinearArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const Integers& form = args.packed.integers;
  void* memory = pool.scratch().bytes(integer_rows_bytes(rows.rows, rows.size, num_row_sums(form, rows.size)));
  const IntegerRows quantized = place_integer_rows(memory, rows.rows, rows.size);
  quantize_rows<Element>(rows, form, quantized, pool);
  multiply({quantized, rows.rows, rows.size, args.packed,
            {args.output, args.packed.out_size, args.out, nullptr, rows.fused.activation, nullptr, kIsFloat16<Element>}},
           pool);
}

template <class Element>
static void integer_argmax(const ArgmaxArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const Integers& form = args.packed.integers;
  const std::size_t size = integer_rows_bytes(rows.rows, rows.size, num_row_sums(form, rows.size));
  char* memory = static_cast<char*>(pool.scratch().bytes(size + max_groups(pool) * rows.rows * sizeof(Leader)));
  Leader* leaders = reinterpret_cast<Leader*>(memory + size);
  begin_leaders(leaders, rows.rows, pool);
  const IntegerRows quantized = place_integer_rows(memory, rows.rows, rows.size);
  quantize_rows<Element>(rows, form, quantized, pool);
  const Destination to = {Output::float32, args.packed.out_size, nullptr, nullptr, {}, leaders};
  multiply({quantized, rows.rows, rows.size, args.packed, to}, pool);
  join_leaders(leaders, rows.rows, pool, args.out);
}

// The activations between the two linears are quantized row by row: a row's scale is known only when the whole row has
// been computed.
template <class Element>
static void integer_mlp(const MlpArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const std::int64_t middle_size = args.up.out_size;
  const Integers &first = args.up.integers, &second = args.down.integers;
  const std::size_t size = integer_rows_bytes(rows.rows, rows.size, num_row_sums(first, rows.size));
  const std::size_t next_size = integer_rows_bytes(rows.rows, middle_size, num_row_sums(second, middle_size));
  const std::size_t middle_bytes = static_cast<std::size_t>(rows.rows * middle_size) * sizeof(Element);
  std::int8_t* memory = static_cast<std::int8_t*>(pool.scratch().bytes(size + next_size + middle_bytes));
  Element* middle = reinterpret_cast<Element*>(memory + size + next_size);
  const IntegerRows quantized = place_integer_rows(memory, rows.rows, rows.size);
  quantize_rows<Element>(rows, first, quantized, pool);
  const Activation& activation = rows.fused.activation;
  multiply({quantized, rows.rows, rows.size, args.up,
            {activated_output(activation), middle_size, middle, nullptr, activation, nullptr, kIsFloat16<Element>}},
           pool);
  const IntegerRows next = place_integer_rows(memory + size, rows.rows, middle_size);
  quantize_rows<Element>({middle, rows.rows, middle_size}, second, next, pool);
  multiply({next, rows.rows, middle_size, args.down,
            {Output::plain, args.down.out_size, args.out, nullptr, {}, nullptr, kIsFloat16<Element>}},
           pool);
}
