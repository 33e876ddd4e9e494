// One row block: its spans, one after another, and their joined result. Included inside namespace octavo::OCTAVO_LEVEL.

template <class Element>
static inline void begin_rows(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work) {
  make_queries(args, rows, work);
  // Missing rows of the second tile are computed as well.
  if (rows.num_rows() > kTileRows && rows.num_rows() < kMaxRowsOfBlock) __builtin_memset(work.weights, 0, sizeof work.weights);
  work.states[0] = work.states[1] = {};
  begin_tiles(smaller(kTileRows, rows.rows_per_head));
}

// A sink is an extra score of its head without a value: its weight is added to the sum of weights only. Not inlined
// either: other layers pay nothing for it.
[[gnu::noinline]] static void join_sinks(const AttentionArgs& args, const RowBlock& rows, RowStates* states) {
  for (std::int64_t tile = 0; tile * 16 < rows.num_rows(); ++tile) {
    alignas(64) float sinks[16] = {};
    for (std::int64_t row = tile * 16; row < smaller(rows.num_rows(), tile * 16 + 16); ++row)
      sinks[row % 16] = args.sinks[rows.query_head(row)] * kLog2E;
    const Shares shares = join(states[tile], load_f32(sinks), splat(1.0f));
    states[tile].sum = states[tile].sum / shares.old_share;
  }
}

template <class Element>
static inline void finish_rows(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work) {
  if (args.sinks) join_sinks(args, rows, work.states);
  for (std::int64_t row = 0; row < rows.num_rows(); ++row)
    finish_row(args, rows, work, row, 1.0f / work.states[row / 16].sum[row % 16]);
}

// A span's contribution to its rows, which depends only on the span. Not inlined, so that there is one copy of this
// code: in a second one the compiler might contract other products into FMAs.
template <class Element>
[[gnu::noinline]] static void attend_span(const AttentionArgs& args, const Span& span, Workspace<Element>& work) {
  score_span(args, span, work);
  weigh_span(args, span, work);
  mix_span(args, span, work);
}

// Joins a span to the previous ones. Not inlined for the same reason.
template <class Element>
[[gnu::noinline]] static void join_span(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work,
                                        bool is_first) {
  for (std::int64_t tile = 0; tile * 16 < rows.num_rows(); ++tile) {
    const Shares shares =
        join(work.states[tile], load_f32(work.span_max + tile * 16), load_f32(work.span_sum + tile * 16));
    store_f32(work.old_shares + tile * 16, shares.old_share);
    store_f32(work.new_shares + tile * 16, shares.new_share);
  }
  for (std::int64_t row = 0; row < rows.num_rows(); ++row) add_mixed(work, row, padded_value(args) / kPart, is_first);
}

template <class Element>
static inline void attend_rows(const AttentionArgs& args, const RowBlock& rows, Workspace<Element>& work) {
  begin_rows(args, rows, work);
  Span span = find_span<Element>(args, rows, 0);
  for (;;) {
    attend_span(args, span, work);
    join_span(args, rows, work, span.is_first());
    if (span.is_last()) break;
    span = find_span<Element>(args, rows, span.first_tile + span.num_tiles);
  }
  end_tiles();
  finish_rows(args, rows, work);
}

template <class Element>
static inline void attend_item(const AttentionArgs& args, const Work& todo, std::int64_t item) {
  Workspace<Element> work;
  Work::Item left = todo.item(item);
  for (RowBlock rows; todo.take(left, rows);) attend_rows(args, rows, work);
}
