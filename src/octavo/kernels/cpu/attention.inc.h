// Attention over paged memory. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A row's result has the same bits whatever else is in the step. Its context is taken in spans at absolute positions;
// within one, scores are products in one order, weights are summed lane by lane, and values are added position by
// position. Tiles that a row does not see add exact zeros, so blocks of rows may share them or leave them out.

template <class Element>
static inline void begin_rows(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work) {
  make_queries(args, rows, work.queries);
  // Rows of the second tile that are not there are computed all the same.
  if (rows.num_rows() > kTileRows) __builtin_memset(work.weights, 0, sizeof work.weights);
  work.states[0] = work.states[1] = {};
  begin_tiles(smaller(kTileRows, rows.rows_per_head));
}

template <class Element>
static inline void finish_rows(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work) {
  end_tiles();
  for (std::int64_t row = 0; row < rows.num_rows(); ++row)
    finish_row(args, rows, work, row, 1.0f / work.states[row / 16].sum[row % 16]);
}

// Takes row blocks until none are left: always the next one before the last is done, so that its keys are on their way.
template <class Element>
static void attend(const AttentionArgs& args, Work& todo) {
  Workspace<Element> work;
  Work::Claim claim;
  RowBlock rows;
  if (!todo.take(claim, rows)) return;
  Span span = find_span<Element>(args, rows, 0);
  for (bool is_done = false; !is_done;) {
    Span next = {};
    if (!span.is_last()) {
      next = find_span<Element>(args, span.rows, span.first_tile + span.num_tiles);
    } else if (todo.take(claim, rows)) {
      next = find_span<Element>(args, rows, 0);
    } else {
      is_done = true;
    }
    if (span.is_first()) begin_rows(args, span.rows, work);
    // A prompt's tiles are in caches already.
    const bool is_read_once = span.rows.num_rows() <= kTileRows;
    const std::int64_t num_steps = span.num_tiles * span.rows.num_heads * padded_head(args) / kPart;
    score_span(args, span, is_read_once ? Coming(span, span.values, num_steps) : Coming(), work);
    weigh_span(args, span, work);
    mix_span(args, span, is_read_once ? Coming(next, next.keys, num_steps) : Coming(), work);
    if (span.is_last()) finish_rows(args, span.rows, work);
    span = next;
  }
}

template <class Element>
static void attention_of(const AttentionArgs& args, Pool& pool) {
  const std::int64_t tokens = larger(1, smaller(16, args.num_tokens / (pool.num_threads() * kChunksPerThread)));
  // All keys and values are written before any is read: requests of one step may share blocks.
  pool.run(ceil_div(args.num_tokens, tokens), [&](std::int64_t chunk) {
    write_kv<Element>(args, chunk * tokens, smaller(args.num_tokens, (chunk + 1) * tokens));
  });
  Work todo(args, pool);
  pool.run(pool.num_threads(), [&](std::int64_t) { attend<Element>(args, todo); });
}

static void attention(const AttentionArgs& args, Pool& pool) {
  args.is_float32 ? attention_of<float>(args, pool) : attention_of<bf16>(args, pool);
}
