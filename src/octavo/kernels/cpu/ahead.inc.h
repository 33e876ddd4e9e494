// Prefetching. Included inside namespace octavo::OCTAVO_LEVEL, before products.

// What a product prefetches while it computes: `lines` cache lines per k tile.
struct Ahead {
  const void* from = nullptr;
  std::int64_t lines = 0;

  const char* line(std::int64_t index) const { return static_cast<const char*>(from) + index * 64; }
  // Prefetches part `share` of kShares of k tile `k`'s lines into L2. Requested all at once, the lines would fill the
  // miss queue and stall the product.
  template <int kShares>
  void fetch_share(std::int64_t k, std::int64_t share) const {
    for (std::int64_t i = share * lines / kShares; i < (share + 1) * lines / kShares; ++i)
      __builtin_prefetch(line(k * lines + i), 0, 2);
  }
  void fetch(std::int64_t k) const {
    for (std::int64_t i = 0; i < lines; ++i) __builtin_prefetch(line(k * lines + i));
  }
};
