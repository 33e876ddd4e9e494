// Repacks the blocks of GGUF files: the same at every level. Layouts of blocks in files: ggml's ggml-common.h.
#include "blocks.h"

#include "ops.h"

namespace octavo {
namespace {

// 32 inputs of an output.
struct Group {
  std::uint8_t codes[32];
  std::uint16_t scale, offset;  // float16; two-level: of the span
  std::uint8_t scales[2], offsets[2];
};

std::uint16_t half_at(const std::uint8_t* from) {
  return static_cast<std::uint16_t>(from[0] | from[1] << 8);
}

void put_nibbles(const std::uint8_t* from, Group& to) {
  for (int i = 0; i < 16; ++i) to.codes[i] = from[i] & 15, to.codes[16 + i] = from[i] >> 4;
}

void add_fifth_bits(const std::uint8_t* from, Group& to) {
  for (int i = 0; i < 32; ++i) to.codes[i] |= static_cast<std::uint8_t>((from[i / 8] >> i % 8 & 1) << 4);
}

// The scale and the offset of 6 bits of group `i`, from 12 bytes of Q4_K and Q5_K.
void put_six_bit_pair(const std::uint8_t* from, int i, Group& to) {
  if (i < 4) {
    to.scales[0] = from[i] & 63, to.offsets[0] = from[4 + i] & 63;
  } else {
    to.scales[0] = static_cast<std::uint8_t>((from[4 + i] & 15) | from[i - 4] >> 6 << 4);
    to.offsets[0] = static_cast<std::uint8_t>(from[4 + i] >> 4 | from[i] >> 6 << 4);
  }
}

// Group `i` of a block of 256, of 32 consecutive bytes whose fields of 4 bits are two groups.
void put_half_bytes(const std::uint8_t* from, int i, Group& to) {
  for (int k = 0; k < 32; ++k) to.codes[k] = from[i / 2 * 32 + k] >> i % 2 * 4 & 15;
}

void read_q2_k(const std::uint8_t* block, int i, Group& to) {
  for (int k = 0; k < 32; ++k) to.codes[k] = block[16 + i / 4 * 32 + k] >> i % 4 * 2 & 3;
  for (int half = 0; half < 2; ++half) to.scales[half] = block[i * 2 + half] & 15, to.offsets[half] = block[i * 2 + half] >> 4;
  to.scale = half_at(block + 80), to.offset = half_at(block + 82);
}

void read_q3_k(const std::uint8_t* block, int i, Group& to) {
  for (int k = 0; k < 32; ++k)
    to.codes[k] = static_cast<std::uint8_t>((block[32 + i / 4 * 32 + k] >> i % 4 * 2 & 3) | (block[k] >> i & 1) << 2);
  for (int half = 0; half < 2; ++half) {
    const int at = i * 2 + half, low = block[96 + at % 8] >> at / 8 * 4 & 15, top = block[104 + at % 4] >> at / 4 * 2 & 3;
    to.scales[half] = static_cast<std::uint8_t>((low | top << 4) - 32);
  }
  to.scale = half_at(block + 108);
}

void read_q6_k(const std::uint8_t* block, int i, Group& to) {
  for (int k = 0; k < 32; ++k) {
    const int low = block[i / 4 * 64 + i % 2 * 32 + k] >> i % 4 / 2 * 4 & 15, high = block[128 + i / 4 * 32 + k] >> i % 4 * 2 & 3;
    to.codes[k] = static_cast<std::uint8_t>(low | high << 4);
  }
  for (int half = 0; half < 2; ++half) to.scales[half] = block[192 + i * 2 + half];
  to.scale = half_at(block + 208);
}

void read_iq4_xs(const std::uint8_t* block, int i, Group& to) {
  put_nibbles(block + 8 + i * 16, to);
  const int low = block[4 + i / 2] >> i % 2 * 4 & 15, top = half_at(block + 2) >> i * 2 & 3;
  to.scales[0] = static_cast<std::uint8_t>((low | top << 4) - 32);
  to.scale = half_at(block);
}

// Group `i` of a block.
void read_group(BlockType type, const std::uint8_t* block, int i, Group& to) {
  switch (type) {
    case BlockType::q4_0:
    case BlockType::iq4_nl: return to.scale = half_at(block), put_nibbles(block + 2, to);
    case BlockType::q4_1: return to.scale = half_at(block), to.offset = half_at(block + 2), put_nibbles(block + 4, to);
    case BlockType::q5_0: return to.scale = half_at(block), put_nibbles(block + 6, to), add_fifth_bits(block + 2, to);
    case BlockType::q5_1:
      to.scale = half_at(block), to.offset = half_at(block + 2);
      return put_nibbles(block + 8, to), add_fifth_bits(block + 4, to);
    case BlockType::q8_0:
      to.scale = half_at(block);
      for (int k = 0; k < 32; ++k) to.codes[k] = block[2 + k] ^ 0x80;
      return;
    case BlockType::q4_k:
      put_half_bytes(block + 16, i, to), put_six_bit_pair(block + 4, i, to);
      return void((to.scale = half_at(block), to.offset = half_at(block + 2)));
    case BlockType::q5_k:
      put_half_bytes(block + 48, i, to), put_six_bit_pair(block + 4, i, to);
      for (int k = 0; k < 32; ++k) to.codes[k] |= static_cast<std::uint8_t>((block[16 + k] >> i & 1) << 4);
      return void((to.scale = half_at(block), to.offset = half_at(block + 2)));
    case BlockType::q2_k: return read_q2_k(block, i, to);
    case BlockType::q3_k: return read_q3_k(block, i, to);
    case BlockType::q6_k: return read_q6_k(block, i, to);
    case BlockType::iq4_xs: return read_iq4_xs(block, i, to);
  }
}

// Adds `count` bits of the codes, from bit `first` on, to a plane of zeros.
void put_plane(const Group& group, std::int64_t column, int first, int count, std::uint8_t* plane) {
  const int quads_of_line = 8 / count;
  for (int k = 0; k < 32; ++k) {
    const int quad = k / 4, field = group.codes[k] >> first & ((1 << count) - 1);
    plane[quad / quads_of_line * 64 + column * 4 + k % 4] |= static_cast<std::uint8_t>(field << quad % quads_of_line * count);
  }
}

void put_codes(const Group& group, int bits, std::int64_t column, std::uint8_t* to) {
  int first = 0;
  for (int count : {8, 4, 2, 1})
    if (bits & count) put_plane(group, column, first, count, to + first * 64), first += count;
}

void put_half(std::uint8_t* to, std::uint16_t value) { __builtin_memcpy(to, &value, sizeof value); }

// The scales of group `index` of a chunk.
void put_scales(const Group& group, const BlockTraits& traits, std::int64_t index, std::int64_t num_groups, std::int64_t span,
                std::int64_t column, std::uint8_t* to) {
  if (!traits.is_two_level) {
    put_half(to + (index * 16 + column) * 2, group.scale);
    if (traits.has_offsets) put_half(to + ((num_groups + index) * 16 + column) * 2, group.offset);
    return;
  }
  const std::int64_t num_spans = (num_groups + span - 1) / span, num_subs = traits.num_subs();
  put_half(to + (index / span * 16 + column) * 2, group.scale);
  if (traits.has_offsets) put_half(to + ((num_spans + index / span) * 16 + column) * 2, group.offset);
  std::uint8_t* of_groups = to + num_spans * 32 * (traits.has_offsets ? 2 : 1);
  for (std::int64_t sub = 0; sub < num_subs; ++sub) {
    of_groups[(index * num_subs + sub) * 16 + column] = group.scales[sub];
    if (traits.has_offsets) of_groups[((num_groups + index) * num_subs + sub) * 16 + column] = group.offsets[sub];
  }
}

// One strip of a panel, zeros so far: 16 outputs of a part from `first` on.
void pack_strip(const PackBlocksArgs& args, const BlockPanel& panel, int strip, int part, std::int64_t first, std::uint8_t* values) {
  const BlockTraits& traits = panel.strips[strip];
  const BlockRows& rows = args.parts[part];
  const std::int64_t row_bytes = args.row_inputs / traits.block_inputs * traits.block_bytes;
  const std::int64_t groups_of_block = traits.block_inputs / kBlockGroup;
  for (std::int64_t column = 0; column < kStripOutputs && first + column < rows.num_outputs; ++column) {
    const std::uint8_t* row = rows.data + (first + column) * row_bytes;
    for (std::int64_t group = 0; group < panel.num_groups; ++group) {
      const std::int64_t chunk = group / kChunkGroups, index = group % kChunkGroups, in_row = args.first_group + group;
      std::uint8_t* to = values + (panel.chunk(chunk, strip) - values);
      Group found = {};
      read_group(args.blocks.types[part], row + in_row / groups_of_block * traits.block_bytes,
                 static_cast<int>(in_row % groups_of_block), found);
      put_codes(found, traits.bits, column, to + index * traits.group_bytes());
      const std::int64_t num_groups = panel.groups_of(chunk);
      put_scales(found, traits, index, num_groups, args.blocks.span, column, to + num_groups * traits.group_bytes());
    }
  }
}

}  // namespace

std::int64_t packed_blocks_size(const PackBlocksArgs& args) {
  return args.blocks.panel_offset(args.num_panels(), args.in_size);
}

void pack_blocks(const PackBlocksArgs& args, Pool& pool) {
  pool.run(args.num_panels(), [&](std::int64_t index) {
    const BlockPanel panel = BlockPanel::of(args.blocks, args.packed, index, args.in_size);
    for (int strip = 0; strip < 2; ++strip) {
      const std::int64_t number = index * 2 + strip;
      const int part = args.blocks.part_of(number);
      std::int64_t before = 0;
      for (int earlier = 0; earlier < part; ++earlier) before += args.blocks.num_strips[earlier];
      const std::int64_t in_part = args.blocks.is_gated ? index : number - before;
      pack_strip(args, panel, strip, part, in_part * kStripOutputs, args.packed);
    }
  });
}

}  // namespace octavo
