// Sorts the rows of a batch by adapter (LoRA) and divides the work on them. Included inside namespace
// octavo::OCTAVO_LEVEL.
//
// Legend: T = rows, S = slots, P = parts of a merged linear, R = the largest rank.

constexpr std::int64_t kRowsOfLoraBlock = 64;    // rows computed with a few ranks or outputs while these are in cache
constexpr std::int64_t kRanksOfLoraUnit = 4;     // of which each is a row of `down` in memory
constexpr std::int64_t kOutputsOfLoraUnit = 512;

// Rows of one slot, in sorted order.
struct LoraBlock {
  std::int64_t slot, first, count;
};

// A piece of work: a block of rows, and some ranks of a part, or some of its outputs.
struct LoraUnit {
  std::int32_t block, part;
  std::int32_t first, count;  // ranks within the part, or outputs of the linear
};

// Rows that have an adapter which changes this linear, sorted by slot.
struct LoraRows {
  const AddLoraArgs& args;
  std::int64_t* row;    // [T] at each sorted position
  std::int64_t* first;  // [S + 1] of each slot, in sorted order
  LoraBlock* blocks;
  std::int64_t num_blocks;
  LoraUnit* units;
  std::int64_t num_units;
  float* middle;  // [T, P * R] in sorted order: the output of `down`

  static LoraRows in(Room& room, const AddLoraArgs& args) {
    const LoraSlots& slots = args.slots;
    const std::int64_t rows = args.rows.rows, most_blocks = rows / kRowsOfLoraBlock + smaller(rows, slots.count);
    std::int64_t units_of_outputs = slots.num_parts;
    for (std::int64_t part = 0; part < slots.num_parts; ++part) units_of_outputs += slots.parts[part] / kOutputsOfLoraUnit;
    const std::int64_t units_of_ranks = slots.num_parts * ceil_div(slots.max_rank, kRanksOfLoraUnit);
    return {args,
            room.take<std::int64_t>(rows),
            room.take<std::int64_t>(slots.count + 1),
            room.take<LoraBlock>(most_blocks),
            0,
            room.take<LoraUnit>(most_blocks * larger(units_of_ranks, units_of_outputs)),
            0,
            room.take<float>(rows * slots.num_parts * slots.max_rank)};
  }

  void sort() {
    const LoraSlots& slots = args.slots;
    for (std::int64_t slot = 0; slot <= slots.count; ++slot) first[slot] = 0;
    for (std::int64_t i = 0; i < args.rows.rows; ++i)
      if (is_changed(i)) ++first[args.adapter_ids[i] + 1];
    for (std::int64_t slot = 0; slot < slots.count; ++slot) {
      const std::int64_t end = first[slot] + first[slot + 1];
      for (std::int64_t at = first[slot]; at < end; at += kRowsOfLoraBlock)
        blocks[num_blocks++] = {slot, at, smaller(kRowsOfLoraBlock, end - at)};
      first[slot + 1] = end;
    }
    // Each slot's first position is advanced past its rows.
    for (std::int64_t i = 0; i < args.rows.rows; ++i)
      if (is_changed(i)) row[first[args.adapter_ids[i]]++] = i;
  }

  // Units of blocks in order, so that those of one adapter follow each other in memory.
  void cut_ranks() {
    num_units = 0;
    for (std::int64_t block = 0; block < num_blocks; ++block)
      for (std::int64_t part = 0; part < args.slots.num_parts; ++part)
        cut(block, part, 0, args.slots.ranks[blocks[block].slot], kRanksOfLoraUnit);
  }
  void cut_outputs() {
    num_units = 0;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      std::int64_t output = 0;
      for (std::int64_t part = 0; part < args.slots.num_parts; output += args.slots.parts[part++])
        cut(block, part, output, output + args.slots.parts[part], kOutputsOfLoraUnit);
    }
  }

 private:
  bool is_changed(std::int64_t i) const {
    return args.adapter_ids[i] >= 0 && args.slots.ranks[args.adapter_ids[i]] > 0;
  }
  void cut(std::int64_t block, std::int64_t part, std::int64_t begin, std::int64_t end, std::int64_t size) {
    for (; begin < end; begin += size)
      units[num_units++] = {static_cast<std::int32_t>(block), static_cast<std::int32_t>(part),
                            static_cast<std::int32_t>(begin), static_cast<std::int32_t>(smaller(size, end - begin))};
  }
};
