// Memory that will be wanted. Included inside namespace octavo::OCTAVO_LEVEL, in front of products.

// What a product asks memory for while it computes: `lines` cache lines for each k tile.
struct Ahead {
  const void* from = nullptr;
  std::int64_t lines = 0;

  const char* line(std::int64_t index) const { return static_cast<const char*>(from) + index * 64; }
  // The share of k tile `k` that goes beside one of kShares parts of its product, into the second-level cache: asked for
  // all at once, lines fill the queue of misses, and products wait behind them.
  template <int kShares>
  void fetch_share(std::int64_t k, std::int64_t share) const {
    for (std::int64_t i = share * lines / kShares; i < (share + 1) * lines / kShares; ++i)
      __builtin_prefetch(line(k * lines + i), 0, 2);
  }
  void fetch(std::int64_t k) const {
    for (std::int64_t i = 0; i < lines; ++i) __builtin_prefetch(line(k * lines + i));
  }
};
