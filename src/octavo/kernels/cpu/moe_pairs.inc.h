// Pairs of a token and an expert, sorted by expert. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Legend: R = pairs, X = experts, C = experts per token.

// A bump allocator, 64-byte aligned. Starting at address 0, it only measures.
struct Room {
  std::uintptr_t at;

  template <class T>
  T* take(std::int64_t count) {
    T* const taken = reinterpret_cast<T*>(at);
    at += static_cast<std::uintptr_t>(ceil_div(count * static_cast<std::int64_t>(sizeof(T)), 64) * 64);
    return taken;
  }
};

// Allocates what `place(room)` takes: one pass to measure, one to place.
template <class Place>
static inline auto placed(Pool& pool, const Place& place) {
  Room counting = {0};
  place(counting);
  Room room = {reinterpret_cast<std::uintptr_t>(pool.scratch().bytes(counting.at))};
  return place(room);
}

// Pairs in token order. `token_ids` null: a token's C pairs are consecutive.
struct Pairs {
  std::int64_t count;  // R
  const std::int64_t* expert_ids;
  const std::int64_t* token_ids;
  std::int64_t num_choices;  // C

  std::int64_t token(std::int64_t pair) const { return token_ids ? token_ids[pair] : pair / num_choices; }
};

// Pairs sorted by expert; each expert's rows start on a new row tile.
struct SortedPairs {
  std::int64_t* first_row;  // [X + 1] of each expert, in sorted order
  std::int64_t* pair;       // [R] at each sorted position
  std::int64_t* place;      // [R] sorted position of each pair
  std::int64_t* tile_row;   // [row tiles + 1] where each tile begins

  static SortedPairs in(Room& room, std::int64_t num_pairs, std::int64_t num_experts) {
    return {room.take<std::int64_t>(num_experts + 1), room.take<std::int64_t>(num_pairs),
            room.take<std::int64_t>(num_pairs), room.take<std::int64_t>(max_tiles(num_pairs, num_experts) + 1)};
  }
  static std::int64_t max_tiles(std::int64_t num_pairs, std::int64_t num_experts) {
    return num_pairs / 16 + smaller(num_pairs, num_experts);
  }

  std::int64_t rows_of(std::int64_t expert) const { return first_row[expert + 1] - first_row[expert]; }

  // Returns the number of row tiles.
  std::int64_t sort(const Pairs& pairs, std::int64_t num_experts) {
    for (std::int64_t expert = 0; expert <= num_experts; ++expert) first_row[expert] = 0;
    for (std::int64_t i = 0; i < pairs.count; ++i) ++first_row[pairs.expert_ids[i] + 1];
    std::int64_t num_tiles = 0;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      const std::int64_t begin = first_row[expert], end = begin + first_row[expert + 1];
      first_row[expert + 1] = end;
      for (std::int64_t row = begin; row < end; row += 16) tile_row[num_tiles++] = row;
    }
    tile_row[num_tiles] = pairs.count;
    // Advance each expert's next free position from its start; it ends where the next expert begins.
    for (std::int64_t i = 0; i < pairs.count; ++i) place[i] = first_row[pairs.expert_ids[i]]++;
    for (std::int64_t expert = num_experts; expert > 0; --expert) first_row[expert] = first_row[expert - 1];
    first_row[0] = 0;
    for (std::int64_t i = 0; i < pairs.count; ++i) pair[place[i]] = i;
    return num_tiles;
  }
};
