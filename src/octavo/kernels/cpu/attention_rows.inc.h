// Which rows are computed together, and the order in which threads process them. Included inside namespace
// octavo::OCTAVO_LEVEL.

// Rows of one request: some of one kv head, or, if few, the same ones of several. Row r is of kv head
// kv_head + r / rows_per_head. Positions are in the context.
struct RowBlock {
  std::int64_t request, kv_head, num_heads, first_row, rows_per_head, group_size, first_token, first_position;

  std::int64_t num_rows() const { return num_heads * rows_per_head; }
  std::int64_t token_in_step(std::int64_t row) const { return (first_row + row % rows_per_head) / group_size; }
  std::int64_t token(std::int64_t row) const { return first_token + token_in_step(row); }
  std::int64_t position(std::int64_t row) const { return first_position + token_in_step(row); }
  std::int64_t query_head(std::int64_t row) const {
    return (kv_head + row / rows_per_head) * group_size + (first_row + row % rows_per_head) % group_size;
  }
};

// The first and the last position visible to a row.
struct Sight {
  std::int64_t first, last;
};

static inline Sight sight(const AttentionArgs& args, const RowBlock& rows, std::int64_t row) {
  const std::int64_t position = rows.position(row);
  const std::int64_t begin = args.chunk_size ? position - position % args.chunk_size : 0;
  return {args.sliding_window ? larger(begin, position - args.sliding_window + 1) : begin,
          args.visible_ends ? args.visible_ends[rows.token(row)] - 1 : position};
}

// For row blocks that are not tall: how their heads are divided; long contexts are also split (attention_split.inc.h).
#if defined(OCTAVO_HAS_AVX512) && !defined(OCTAVO_HAS_AMX)
constexpr std::int64_t kShortChunksPerThread = 1;  // adjacent heads are read sequentially
#else
constexpr std::int64_t kShortChunksPerThread = kChunksPerThread;
#endif

// A step's row blocks as work items for threads. Tall ones, of more than a tile of rows, belong to prompts: they are
// processed head by head, so that one head's keys and values stay in cache for all rows. The others read theirs from
// memory: they are processed several heads at a time, whose tiles are adjacent.
class Work {
 public:
  Work(const AttentionArgs& args, const Pool& pool) : args_(args), blocks_(args.row_blocks()) {
    while (num_tall_ < num_blocks() && rows_per_head(num_tall_) > kTileRows) ++num_tall_;
    const std::int64_t num_short = num_blocks() - num_tall_;
    const std::int64_t fair_share = num_short * args.num_kv_heads / (pool.num_threads() * kShortChunksPerThread);
    heads_at_once_ = larger(1, smaller(smaller(kTileRows, args.num_kv_heads), fair_share));
    num_items_ = num_tall_items() + num_short * num_items_of_short_block();
  }

  std::int64_t num_blocks() const { return blocks_.count; }
  std::int64_t rows_per_head(std::int64_t block) const { return blocks_.of[block * 3 + 2]; }
  std::int64_t num_items() const { return num_items_; }
  std::int64_t num_tall_blocks() const { return num_tall_; }
  std::int64_t num_tall_items() const { return num_tall_ * args_.num_kv_heads; }  // these come first
  std::int64_t num_items_of_short_block() const { return ceil_div(args_.num_kv_heads, heads_at_once_); }
  std::int64_t heads_at_once() const { return heads_at_once_; }

  // One row block, for its remaining kv heads.
  struct Item {
    std::int64_t block, kv_head, end_head;
  };

  Item item(std::int64_t index) const {
    if (index < num_tall_items()) return {index % num_tall_, index / num_tall_, index / num_tall_ + 1};
    const std::int64_t parts = num_items_of_short_block(), part = (index - num_tall_items()) % parts;
    return {num_tall_ + (index - num_tall_items()) / parts, part * heads_at_once_,
            smaller(args_.num_kv_heads, (part + 1) * heads_at_once_)};
  }

  RowBlock rows(std::int64_t block, std::int64_t kv_head, std::int64_t num_heads) const {
    const std::int32_t* cut = blocks_.of + block * 3;
    const std::int64_t request = cut[0], first_token = args_.query_start_loc[request];
    const std::int64_t num_new = args_.query_start_loc[request + 1] - first_token;
    return {.request = request,
            .kv_head = kv_head,
            .num_heads = num_heads,
            .first_row = cut[1],
            .rows_per_head = cut[2],
            .group_size = args_.num_heads / args_.num_kv_heads,
            .first_token = first_token,
            .first_position = args_.seq_lens[request] - num_new};
  }

  // Takes the item's next rows; false if none are left.
  bool take(Item& item, RowBlock& next) const {
    if (item.kv_head == item.end_head) return false;
    const std::int64_t heads_of_tile = kTileRows / rows_per_head(item.block);
    const std::int64_t num_heads = larger(1, smaller(item.end_head - item.kv_head, heads_of_tile));
    next = rows(item.block, item.kv_head, num_heads);
    item.kv_head += num_heads;
    return true;
  }

 private:
  const AttentionArgs& args_;
  const RowBlocks& blocks_;
  std::int64_t num_tall_ = 0, heads_at_once_, num_items_;
};
