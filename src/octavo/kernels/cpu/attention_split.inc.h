// Long contexts whose spans are computed by several threads. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A span's contribution depends only on the span. It is written to scratch memory, and spans are joined in order, as if
// one thread had computed them all: splitting a context changes no bit.

constexpr std::int64_t kLeastSpansOfPart = 2;  // 512 positions; each part has fixed costs, such as its queries
constexpr std::int64_t kRowEnd = 16;           // floats of a row after those of its head

// Spans of the context, by absolute position.
struct SpanRange {
  std::int64_t begin, end;
};

static inline SpanRange spans_in_sight(const AttentionArgs& args, const RowBlock& rows) {
  const Sight first = sight(args, rows, 0), last = sight(args, rows, rows.rows_per_head - 1);
  return {first.first / kSpanPositions, last.last / kSpanPositions + 1};
}

// Which items of a step are split: of those that are not tall, the first, with the longest contexts, while one is more
// than a quarter of a thread's share of the work. A part is an eighth of that share.
class Split {
 public:
  Split(const AttentionArgs& args, const Work& work, Pool& pool) : args_(args), work_(work) {
    if (pool.num_threads() == 1) return;
    const std::int64_t per_block = work.num_items_of_short_block(), first = work.num_tall_blocks();
    std::int64_t all = 0, block = first;
    for (std::int64_t i = first; i < work.num_blocks(); ++i) all += num_spans(i) * per_block;
    spans_of_part_ = larger(kLeastSpansOfPart, ceil_div(all, pool.num_threads() * kChunksPerThread));
    for (; block < work.num_blocks(); ++block) {
      const std::int64_t spans = num_spans(block);
      if (spans <= spans_of_part_ || spans * 4 * pool.num_threads() <= all) break;
      max_spans_ = larger(max_spans_, spans);
      max_rows_ = larger(max_rows_, work.rows_per_head(block));
    }
    num_items_ = (block - first) * per_block;
    if (num_items_) kept_ = static_cast<float*>(pool.scratch().bytes(num_items_ * item_size() * sizeof(float)));
  }

  // Units of work for threads: whole items, and parts of split ones.
  std::int64_t num_chunks() const { return work_.num_items() + num_items_ * (parts_of_item() - 1); }

  // Some spans of an item, counted from the first visible one, or all of them.
  struct Chunk {
    std::int64_t item, first_span;
    bool is_part;
  };

  Chunk chunk(std::int64_t index) const {
    const std::int64_t part = index - first_item();
    if (part < 0) return {index, 0, false};
    if (part < num_items_ * parts_of_item())
      return {first_item() + part / parts_of_item(), part % parts_of_item() * spans_of_part_, true};
    return {index - num_items_ * (parts_of_item() - 1), 0, false};
  }

  // Items whose spans are to be joined once all chunks are done.
  std::int64_t num_items() const { return num_items_; }
  std::int64_t first_item() const { return work_.num_tall_items(); }

  SpanRange spans(const RowBlock& rows, const Chunk& chunk) const {
    const SpanRange all = spans_in_sight(args_, rows);
    return {all.begin + chunk.first_span, smaller(all.end, all.begin + chunk.first_span + spans_of_part_)};
  }

  // Saved for each span and row of an item: weighted sum of values [P], largest score, sum of weights.
  float* kept(std::int64_t item, const RowBlock& rows, std::int64_t row, std::int64_t span) const {
    const std::int64_t row_of_item = (rows.kv_head - work_.item(item).kv_head) * rows.rows_per_head + row;
    const std::int64_t place = (span - spans_in_sight(args_, rows).begin) * rows_of_item() + row_of_item;
    return kept_ + (item - first_item()) * item_size() + place * row_size();
  }

 private:
  std::int64_t num_spans(std::int64_t block) const {
    const SpanRange spans = spans_in_sight(args_, work_.rows(block, 0, 1));
    return spans.end - spans.begin;
  }
  std::int64_t parts_of_item() const { return ceil_div(max_spans_, spans_of_part_); }
  std::int64_t row_size() const { return padded_value(args_) + kRowEnd; }
  std::int64_t rows_of_item() const { return work_.heads_at_once() * max_rows_; }
  std::int64_t item_size() const { return max_spans_ * rows_of_item() * row_size(); }

  const AttentionArgs& args_;
  const Work& work_;
  std::int64_t num_items_ = 0, spans_of_part_ = 1, max_spans_ = 0, max_rows_ = 0;
  float* kept_ = nullptr;
};

template <class Element>
static inline void keep_row(const Workspace<Element>& work, std::int64_t row, std::int64_t padded, float* to) {
  for (std::int64_t i = 0; i * 16 < padded; ++i) store_f32(to + i * 16, load_f32(work.mixed + mixed_offset(row, i)));
  to[padded] = work.span_max[row];
  to[padded + 1] = work.span_sum[row];
}

template <class Element>
static inline void take_row(Workspace<Element>& work, std::int64_t row, std::int64_t padded, const float* from) {
  for (std::int64_t i = 0; i * 16 < padded; ++i) store_f32(work.mixed + mixed_offset(row, i), load_f32(from + i * 16));
  work.span_max[row] = from[padded];
  work.span_sum[row] = from[padded + 1];
}

template <class Element>
static inline void attend_part(const AttentionArgs& args, const Work& todo, const Split& split,
                               const Split::Chunk& chunk) {
  Workspace<Element> work;
  Work::Item left = todo.item(chunk.item);
  for (RowBlock rows; todo.take(left, rows);) {
    const SpanRange spans = split.spans(rows, chunk);
    if (spans.begin >= spans.end) continue;
    begin_rows(args, rows, work);
    for (std::int64_t span = spans.begin; span < spans.end; ++span) {
      attend_span(args, find_span<Element>(args, rows, span * kSpanTiles), work);
      for (std::int64_t row = 0; row < rows.num_rows(); ++row)
        keep_row(work, row, padded_value(args), split.kept(chunk.item, rows, row, span));
    }
    end_tiles();
  }
}

template <class Element>
static inline void join_parts(const AttentionArgs& args, const Work& todo, const Split& split, std::int64_t item) {
  Workspace<Element> work;
  Work::Item left = todo.item(item);
  for (RowBlock rows; todo.take(left, rows);) {
    const SpanRange spans = spans_in_sight(args, rows);
    work.states[0] = work.states[1] = {};
    for (std::int64_t span = spans.begin; span < spans.end; ++span) {
      for (std::int64_t row = 0; row < rows.num_rows(); ++row)
        take_row(work, row, padded_value(args), split.kept(item, rows, row, span));
      join_span(args, rows, work, span == spans.begin);
    }
    finish_rows(args, rows, work);
  }
}
