// Adapters (LoRA; Hu et al. 2021, arXiv:2106.09685): base + up(down(x)), for rows with an adapter. Included inside
// namespace octavo::OCTAVO_LEVEL.
//
// A row's bits are its own: `down` sums over k in 16 lanes, which are then folded, `up` over ranks from the first to the
// last; rows of a block only share reading the weights. Few rows are memory-bound, so each unit
// prefetches the weights of the next.

#if defined(OCTAVO_HAS_AVX512)
constexpr int kLoraRows = 4, kLoraRanks = 4, kLoraVectors = 4;  // of a tile, whose sums are in registers
#elif defined(__AVX2__)
constexpr int kLoraRows = 2, kLoraRanks = 2, kLoraVectors = 2;
#else
constexpr int kLoraRows = 2, kLoraRanks = 1, kLoraVectors = 1;
#endif

// Rows of some sorted positions and their weights. `ahead`: what the next unit reads at the same place, or null.
struct DownTile {
  const Element* x[kLoraRows];  // [K] each
  float* middle[kLoraRows];     // of the first rank
  const Element* down;          // [ranks][K]
  const Element* ahead;
  std::int64_t size;            // K
};

template <int kRows, int kRanks>
static void multiply_down(const DownTile& of) {
  f32x16 sums[kRows][kRanks];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kRanks; ++j) sums[i][j] = splat(0.0f);
  const auto add = [&](std::int64_t k, const auto& load) {
    f32x16 weights[kRanks];
#pragma GCC unroll 4
    for (int j = 0; j < kRanks; ++j) weights[j] = load(of.down + j * of.size + k);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const f32x16 x = load(of.x[i] + k);
#pragma GCC unroll 4
      for (int j = 0; j < kRanks; ++j) sums[i][j] += x * weights[j];
    }
  };
  const std::int64_t num_whole = of.size / 16 * 16;
  for (std::int64_t k = 0; k < num_whole; k += 16) {
    if (of.ahead)
      for (int j = 0; j < kRanks; ++j) __builtin_prefetch(of.ahead + j * of.size + k);
    add(k, [](const Element* from) { return load_whole(from); });
  }
  if (const std::int64_t rest = of.size - num_whole)
    add(num_whole, [rest](const Element* from) { return load_part(from, rest); });
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kRanks; ++j) of.middle[i][j] = sum_of_lanes(sums[i][j]);
}

template <int kRows = kLoraRows, int kRanks = kLoraRanks>
static inline void multiply_some_down(const DownTile& of, std::int64_t rows, std::int64_t ranks) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_some_down<kRows - 1, kRanks>(of, rows, ranks);
  }
  if constexpr (kRanks > 1) {
    if (ranks < kRanks) return multiply_some_down<kRows, kRanks - 1>(of, rows, ranks);
  }
  multiply_down<kRows, kRanks>(of);
}

static inline const Element* down_of(const LoraRows& rows, const LoraUnit& unit) {
  const LoraSlots& slots = rows.args.slots;
  const std::int64_t column = (rows.blocks[unit.block].slot * slots.num_parts + unit.part) * slots.max_rank + unit.first;
  return static_cast<const Element*>(slots.down) + column * rows.args.rows.size;
}

static void multiply_down_unit(const LoraRows& rows, const LoraUnit& unit, const LoraUnit* next) {
  const LoraBlock& block = rows.blocks[unit.block];
  const std::int64_t size = rows.args.rows.size, width = rows.args.slots.num_parts * rows.args.slots.max_rank;
  const Element *down = down_of(rows, unit), *ahead = next ? down_of(rows, *next) : nullptr;
  float* middle = rows.middle + unit.part * rows.args.slots.max_rank + unit.first;
  for (std::int64_t at = 0; at < block.count; at += kLoraRows, ahead = nullptr) {
    const std::int64_t num_rows = smaller(kLoraRows, block.count - at);
    DownTile tile = {{}, {}, nullptr, nullptr, size};
    for (std::int64_t rank = 0; rank < unit.count; rank += kLoraRanks) {
      for (std::int64_t i = 0; i < num_rows; ++i) {
        tile.x[i] = static_cast<const Element*>(rows.args.rows.x) + rows.row[block.first + at + i] * size;
        tile.middle[i] = middle + (block.first + at + i) * width + rank;
      }
      tile.down = down + rank * size;
      tile.ahead = ahead && rank < next->count ? ahead + rank * size : nullptr;
      multiply_some_down(tile, num_rows, smaller(kLoraRanks, unit.count - rank));
    }
  }
}

struct UpTile {
  Element* base[kLoraRows];        // of the first output
  const float* middle[kLoraRows];  // [ranks]
  const Element* up;               // [ranks][N], of the first output
  const Element* ahead;
  std::int64_t num_ranks, num_outputs;  // N
};

// kVectors * 16 outputs; the last vector has `count` of them.
template <int kRows, int kVectors>
static void multiply_up(const UpTile& of, std::int64_t count) {
  f32x16 sums[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[i][v] = splat(0.0f);
  for (std::int64_t rank = 0; rank < of.num_ranks; ++rank) {
    const Element* from = of.up + rank * of.num_outputs;
    if (of.ahead)
      for (int v = 0; v < kVectors; ++v) __builtin_prefetch(of.ahead + rank * of.num_outputs + v * 16);
    f32x16 weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = kVectors > 1 ? load_whole(from + v * 16) : load_some(from, count);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const f32x16 middle = splat(of.middle[i][rank]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[i][v] += middle * weights[v];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Element* to = of.base[i] + v * 16;
      if (kVectors > 1) {
        store_whole(to, load_whole(to) + sums[i][v]);
      } else {
        store_some(to, load_some(to, count) + sums[i][v], count);
      }
    }
}

template <int kRows = kLoraRows>
static inline void multiply_some_up(const UpTile& of, std::int64_t rows, std::int64_t count) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_some_up<kRows - 1>(of, rows, count);
  }
  count == kLoraVectors * 16 ? multiply_up<kRows, kLoraVectors>(of, 16) : multiply_up<kRows, 1>(of, count);
}

static inline const Element* up_of(const LoraRows& rows, const LoraUnit& unit, std::int64_t num_outputs) {
  const LoraSlots& slots = rows.args.slots;
  return static_cast<const Element*>(slots.up) + rows.blocks[unit.block].slot * slots.max_rank * num_outputs + unit.first;
}

static void multiply_up_unit(const LoraRows& rows, const LoraUnit& unit, const LoraUnit* next) {
  const LoraSlots& slots = rows.args.slots;
  const LoraBlock& block = rows.blocks[unit.block];
  const std::int64_t num_outputs = slots.num_outputs(), width = slots.num_parts * slots.max_rank;
  const Element *up = up_of(rows, unit, num_outputs), *ahead = next ? up_of(rows, *next, num_outputs) : nullptr;
  for (std::int64_t at = 0; at < block.count; at += kLoraRows, ahead = nullptr) {
    const std::int64_t num_rows = smaller(kLoraRows, block.count - at);
    for (std::int64_t output = 0; output < unit.count;) {
      const std::int64_t rest = unit.count - output;
      const std::int64_t count = rest < kLoraVectors * 16 ? smaller(rest, 16) : kLoraVectors * 16;
      UpTile tile = {{}, {}, up + output, nullptr, slots.ranks[block.slot], num_outputs};
      if (ahead && output < next->count && slots.ranks[rows.blocks[next->block].slot] >= tile.num_ranks) tile.ahead = ahead + output;
      for (std::int64_t i = 0; i < num_rows; ++i) {
        const std::int64_t place = block.first + at + i;
        tile.base[i] = static_cast<Element*>(rows.args.base) + rows.row[place] * num_outputs + unit.first + output;
        tile.middle[i] = rows.middle + place * width + unit.part * slots.max_rank;
      }
      multiply_some_up(tile, num_rows, count);
      output += count;
    }
  }
}

// Each thread gets several runs of units, one after another in memory.
template <class Multiply>
static void run_lora_units(const LoraRows& rows, Pool& pool, const Multiply& multiply) {
  const std::int64_t group = larger(1, rows.num_units / (pool.num_threads() * kChunksPerThread));
  pool.run(ceil_div(rows.num_units, group), [&](std::int64_t chunk) {
    const std::int64_t end = smaller(rows.num_units, (chunk + 1) * group);
    for (std::int64_t i = chunk * group; i < end; ++i)
      multiply(rows, rows.units[i], i + 1 < end ? &rows.units[i + 1] : nullptr);
  });
}

static void add_lora(const AddLoraArgs& args, Pool& pool) {
  LoraRows rows = placed(pool, [&](Room& room) { return LoraRows::in(room, args); });
  rows.sort();
  if (rows.num_blocks == 0) return;
  rows.cut_ranks();
  run_lora_units(rows, pool, multiply_down_unit);
  rows.cut_outputs();
  run_lora_units(rows, pool, multiply_up_unit);
}
