// Mixtures of experts. Included inside namespace octavo::OCTAVO_LEVEL. What is computed: ops.h, kernels/reference.py.
//
// Pairs of a token and an expert are sorted by expert, so that each expert's weights are read once, for all of its rows
// together. A row's result does not depend on who shares its expert: tiles see to that, as in all linear maps.
//
// Legend: T = tokens, C = experts that a token chooses, R = pairs, X = experts, D = hidden size, I = intermediate size.

// Hands out memory, 64-byte aligned. From address 0 it only counts.
struct Room {
  std::uintptr_t at;

  template <class T>
  T* take(std::int64_t count) {
    T* const taken = reinterpret_cast<T*>(at);
    at += static_cast<std::uintptr_t>(ceil_div(count * static_cast<std::int64_t>(sizeof(T)), 64) * 64);
    return taken;
  }
};

// Memory for what `place(room)` takes, twice: to count, and for good.
template <class Place>
static inline auto placed(Pool& pool, const Place& place) {
  Room counting = {0};
  place(counting);
  Room room = {reinterpret_cast<std::uintptr_t>(pool.scratch().bytes(counting.at))};
  return place(room);
}

// value[i] = e^(value[i] - most); returns nothing but what is in `values`.
static inline void exponentials(float* values, std::int64_t count, float most) {
  for (std::int64_t i = 0; i < count; i += 16) {
    float lanes[16] = {};
    const std::size_t size = static_cast<std::size_t>(smaller(16, count - i)) * sizeof(float);
    __builtin_memcpy(lanes, values + i, size);
    store_f32(lanes, exponential(load_f32(lanes) - most));
    __builtin_memcpy(values + i, lanes, size);
  }
}

static inline float sum_in_order(const float* values, std::int64_t count) {
  float sum = 0.0f;
  for (std::int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

// The largest logits in falling order, equal ones by the lower number. NaN is not larger than anything.
static inline void find_largest(const float* logits, std::int64_t num_logits, std::int64_t count, std::int64_t* ids,
                                float* largest) {
  std::int64_t num_found = 0;
  for (std::int64_t id = 0; id < num_logits; ++id) {
    if (num_found == count && !(logits[id] > largest[count - 1])) continue;
    std::int64_t at = num_found < count ? num_found++ : count - 1;
    for (; at > 0 && logits[id] > largest[at - 1]; --at) largest[at] = largest[at - 1], ids[at] = ids[at - 1];
    largest[at] = logits[id], ids[at] = id;
  }
}

// One token's experts and their weights, from its logits, which are spoilt.
static inline void choose_experts(const Routing& routing, float* logits, std::int64_t* ids, float* weights) {
  find_largest(logits, routing.num_experts, routing.top_k, ids, weights);
  const float most = weights[0];
  exponentials(weights, routing.top_k, most);
  float total = 0.0f;
  if (routing.renormalises) {
    total = sum_in_order(weights, routing.top_k);
  } else {
    exponentials(logits, routing.num_experts, most);
    total = sum_in_order(logits, routing.num_experts);
  }
  for (std::int64_t i = 0; i < routing.top_k; ++i) weights[i] /= total;
  if (routing.has_shared) {
    float gate = -logits[routing.num_experts];
    exponentials(&gate, 1, 0.0f);
    ids[routing.top_k] = routing.num_experts, weights[routing.top_k] = 1.0f / (1.0f + gate);
  }
}

constexpr std::int64_t kTokensTogether = 8;  // of a chunk, where a token takes about a microsecond

// `left`: the tokens as left tiles. `logits`: [T, outputs of the router].
static void route_tokens(const Routing& routing, const PackedWeight& router, const LeftElement* left, std::int64_t num_tokens,
                         std::int64_t num_k, float* logits, std::int64_t* ids, float* weights, Pool& pool) {
  multiply({left, num_tokens, num_k, router, {Output::float32, router.out_size, logits, nullptr}}, pool);
  const std::int64_t num_choices = routing.num_choices();
  pool.run(ceil_div(num_tokens, kTokensTogether), [&](std::int64_t chunk) {
    const std::int64_t end = smaller(num_tokens, (chunk + 1) * kTokensTogether);
    for (std::int64_t token = chunk * kTokensTogether; token < end; ++token)
      choose_experts(routing, logits + token * router.out_size, ids + token * num_choices, weights + token * num_choices);
  });
}

// Pairs in the order of their tokens. `token_ids` null: a token's C pairs follow one another.
struct Pairs {
  std::int64_t count;  // R
  const std::int64_t* expert_ids;
  const std::int64_t* token_ids;
  std::int64_t num_choices;  // C

  std::int64_t token(std::int64_t pair) const { return token_ids ? token_ids[pair] : pair / num_choices; }
};

// Pairs sorted by expert; an expert's rows begin a row tile of their own.
struct SortedPairs {
  std::int64_t* first_row;  // [X + 1] of each expert, in the sorted order
  std::int64_t* pair;       // [R] that is in this place of the order
  std::int64_t* place;      // [R] of each pair in the order
  std::int64_t* tile_row;   // [row tiles + 1] at which each tile begins

  static SortedPairs in(Room& room, std::int64_t num_pairs, std::int64_t num_experts) {
    return {room.take<std::int64_t>(num_experts + 1), room.take<std::int64_t>(num_pairs),
            room.take<std::int64_t>(num_pairs), room.take<std::int64_t>(most_tiles(num_pairs, num_experts) + 1)};
  }
  static std::int64_t most_tiles(std::int64_t num_pairs, std::int64_t num_experts) {
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
    // Each expert's next free place is where it begins; afterwards that is where the next one begins.
    for (std::int64_t i = 0; i < pairs.count; ++i) place[i] = first_row[pairs.expert_ids[i]]++;
    for (std::int64_t expert = num_experts; expert > 0; --expert) first_row[expert] = first_row[expert - 1];
    first_row[0] = 0;
    for (std::int64_t i = 0; i < pairs.count; ++i) pair[place[i]] = i;
    return num_tiles;
  }
};

// One expert's share of a phase.
struct ExpertProduct {
  Product product;
  Cut cut;
  std::int64_t first_chunk;
};

// What lies between the steps of all experts' MLPs.
struct ExpertMemory {
  SortedPairs sorted;
  ExpertProduct* products;  // [X]
  LeftElement* left;        // left tiles of the sorted rows
  LeftElement* middle;      // the same, between the two maps
  Element* answers;         // [R, D] in the sorted order

  static ExpertMemory in(Room& room, const Experts& experts, std::int64_t num_pairs, std::int64_t size) {
    const std::int64_t num_tiles = SortedPairs::most_tiles(num_pairs, experts.count);
    return {SortedPairs::in(room, num_pairs, experts.count), room.take<ExpertProduct>(experts.count),
            room.take<LeftElement>(num_tiles * ceil_div(size, 32) * kTileElements),
            room.take<LeftElement>(num_tiles * ceil_div(experts.most_intermediate, 32) * kTileElements),
            room.take<Element>(num_pairs * size)};
  }
};

// Copies tokens from their left tiles into those of their experts.
static void gather_tokens(const LeftElement* tokens, std::int64_t num_k, const Pairs& pairs, const SortedPairs& sorted,
                          std::int64_t num_tiles, LeftElement* left, Pool& pool) {
  pool.run(num_tiles, [&](std::int64_t tile) {
    const std::int64_t first = sorted.tile_row[tile], count = sorted.tile_row[tile + 1] - first;
    LeftElement* to = left + tile * num_k * kTileElements;
    for (std::int64_t line = 0; line < (kReadsWholeTiles ? 16 : count); ++line) {
      const std::int64_t token = line < count ? pairs.token(sorted.pair[first + line]) : 0;
      const LeftElement* from = tokens + token / 16 * num_k * kTileElements + token % 16 * 32;
      for (std::int64_t k = 0; k < num_k; ++k) {
        LeftElement* to_line = to + k * kTileElements + line * 32;
        line < count ? __builtin_memcpy(to_line, from + k * kTileElements, 32 * sizeof *to)
                     : __builtin_memset(to_line, 0, 32 * sizeof *to);
      }
    }
  });
}

// Runs one product for each expert that has rows: make(expert, its first row tile, its rows).
template <class Make>
static void multiply_experts(const SortedPairs& sorted, std::int64_t num_experts, ExpertProduct* products, Pool& pool,
                             const Make& make) {
  std::int64_t num_active = 0;
  for (std::int64_t expert = 0; expert < num_experts; ++expert) num_active += sorted.rows_of(expert) > 0;
  const std::int64_t num_wanted = ceil_div(pool.num_threads() * kExpertChunksPerThread, larger(1, num_active));
  std::int64_t num_products = 0, num_chunks = 0, tile = 0;
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    const std::int64_t rows = sorted.rows_of(expert);
    if (rows == 0) continue;
    const Product product = make(expert, tile, rows);
    products[num_products] = {product, cut_product(product, num_wanted), num_chunks};
    num_chunks += products[num_products++].cut.num_chunks;
    tile += ceil_div(rows, 16);
  }
  pool.run(num_chunks, [&](std::int64_t chunk) {
    std::int64_t at = 0;  // the last product that begins at this chunk or before
    for (std::int64_t end = num_products; end - at > 1;) {
      const std::int64_t half = (at + end) / 2;
      products[half].first_chunk <= chunk ? at = half : end = half;
    }
    multiply_chunk(products[at].product, products[at].cut, chunk - products[at].first_chunk);
  });
}

// Fills memory.answers. `tokens`: left tiles.
static void compute_experts(const Experts& experts, const LeftElement* tokens, std::int64_t size, const Pairs& pairs,
                            ExpertMemory& memory, Pool& pool) {
  SortedPairs& sorted = memory.sorted;
  const std::int64_t num_k = ceil_div(size, 32), num_tiles = sorted.sort(pairs, experts.count);
  gather_tokens(tokens, num_k, pairs, sorted, num_tiles, memory.left, pool);
  const std::int64_t middle_stride = ceil_div(experts.most_intermediate, 32) * kTileElements;  // of a row tile
  multiply_experts(sorted, experts.count, memory.products, pool,
                   [&](std::int64_t expert, std::int64_t tile, std::int64_t rows) -> Product {
                     const PackedWeight& gate_up = experts.gate_up[expert];
                     LeftElement* middle = memory.middle + tile * middle_stride;
                     return {memory.left + tile * num_k * kTileElements, rows, num_k, gate_up,
                             {Output::gated, gate_up.out_size, nullptr, middle}};
                   });
  multiply_experts(sorted, experts.count, memory.products, pool,
                   [&](std::int64_t expert, std::int64_t tile, std::int64_t rows) -> Product {
                     const PackedWeight& down = experts.down[expert];
                     return {memory.middle + tile * middle_stride, rows, ceil_div(experts.gate_up[expert].out_size, 32), down,
                             {Output::plain, size, memory.answers + sorted.first_row[expert] * size, nullptr}};
                   });
}

// out = sum over a token's pairs, in their order, of weight * answer. `place` null: answers are in the order of pairs.
static void combine_rows(const Element* answers, const std::int64_t* place, const float* weights, std::int64_t num_tokens,
                         std::int64_t num_choices, std::int64_t size, Element* out, Pool& pool) {
  const auto answer = [&](std::int64_t pair) { return answers + (place ? place[pair] : pair) * size; };
  pool.run(ceil_div(num_tokens, kTokensTogether), [&](std::int64_t chunk) {
    const std::int64_t end = smaller(num_tokens, (chunk + 1) * kTokensTogether);
    for (std::int64_t token = chunk * kTokensTogether; token < end; ++token) {
      for (std::int64_t i = 0; i < size; i += 16) {
        const std::int64_t count = smaller(16, size - i);
        f32x16 total = splat(0.0f);
        for (std::int64_t pair = token * num_choices; pair < (token + 1) * num_choices; ++pair)
          total += load_some(answer(pair) + i, count) * weights[pair];
        store_some(out + token * size + i, total, count);
      }
    }
  });
}

static void combine_experts(const CombineArgs& args, Pool& pool) {
  combine_rows(static_cast<const Element*>(args.answers), nullptr, args.weights, args.num_tokens, args.num_choices, args.size,
               static_cast<Element*>(args.out), pool);
}

static void route(const RouteArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  struct Memory {
    LeftElement* left;
    float* logits;
  };
  const Memory memory = placed(pool, [&](Room& room) -> Memory {
    return {room.take<LeftElement>(left_elements(rows.rows, rows.size)), room.take<float>(rows.rows * args.router.out_size)};
  });
  pack_rows(rows, memory.left, pool);
  route_tokens(args.routing, args.router, memory.left, rows.rows, ceil_div(rows.size, 32), memory.logits, args.expert_ids,
               args.weights, pool);
}

static void expert_rows(const ExpertRowsArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (args.num_pairs == 0) return;
  struct Memory {
    LeftElement* left;
    ExpertMemory experts;
  };
  Memory memory = placed(pool, [&](Room& room) -> Memory {
    return {room.take<LeftElement>(left_elements(rows.rows, rows.size)),
            ExpertMemory::in(room, args.experts, args.num_pairs, rows.size)};
  });
  pack_rows(rows, memory.left, pool);
  const Pairs pairs = {args.num_pairs, args.expert_ids, args.token_ids, 0};
  compute_experts(args.experts, memory.left, rows.size, pairs, memory.experts, pool);
  pool.run(ceil_div(args.num_pairs, kTokensTogether), [&](std::int64_t chunk) {
    const std::int64_t end = smaller(args.num_pairs, (chunk + 1) * kTokensTogether);
    for (std::int64_t pair = chunk * kTokensTogether; pair < end; ++pair)
      __builtin_memcpy(static_cast<Element*>(args.out) + pair * rows.size, memory.experts.answers + memory.experts.sorted.place[pair] * rows.size,
                       static_cast<std::size_t>(rows.size) * sizeof(Element));
  });
}

static void moe(const MoeArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const std::int64_t num_choices = args.routing.num_choices(), num_pairs = rows.rows * num_choices;
  struct Memory {
    LeftElement* left;
    float* logits;
    std::int64_t* expert_ids;
    float* weights;
    ExpertMemory experts;
  };
  Memory memory = placed(pool, [&](Room& room) -> Memory {
    return {room.take<LeftElement>(left_elements(rows.rows, rows.size)), room.take<float>(rows.rows * args.router.out_size),
            room.take<std::int64_t>(num_pairs), room.take<float>(num_pairs),
            ExpertMemory::in(room, args.experts, num_pairs, rows.size)};
  });
  pack_rows(rows, memory.left, pool);
  route_tokens(args.routing, args.router, memory.left, rows.rows, ceil_div(rows.size, 32), memory.logits, memory.expert_ids,
               memory.weights, pool);
  const Pairs pairs = {num_pairs, memory.expert_ids, nullptr, num_choices};
  compute_experts(args.experts, memory.left, rows.size, pairs, memory.experts, pool);
  for (std::int64_t expert = 0; expert < args.routing.num_experts; ++expert)
    args.load[expert] += memory.experts.sorted.rows_of(expert);
  combine_rows(memory.experts.answers, memory.experts.sorted.place, memory.weights, rows.rows, num_choices, rows.size,
               static_cast<Element*>(args.out), pool);
}
