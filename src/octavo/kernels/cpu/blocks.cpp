// Repacks and decodes the blocks of GGUF files: the same at every level. Layouts of blocks in files: ggml's ggml-common.h.
#include "blocks.h"

#include "decode_blocks.h"
#include "ops.h"

namespace octavo {
namespace {

constexpr std::uint64_t kEveryByte = 0x0101010101010101u;
constexpr int kWords = kBlockGroup / 8;

// 32 inputs of an output: codes of a byte each, eight in a word, the first in its lowest byte.
struct Group {
  std::uint64_t codes[kWords];
  std::uint16_t scale, offset;  // float16, or an exponent; two-level: of the span
  std::uint8_t scales[2], offsets[2];
};

std::uint16_t half_at(const std::uint8_t* from) {
  return static_cast<std::uint16_t>(from[0] | from[1] << 8);
}

std::uint64_t word_at(const std::uint8_t* from) {
  std::uint64_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return word;
}

// Adds a field of `bits` bits of each of 32 bytes, from bit `first` on, to the codes, at bit `at` of each.
void add_fields(const std::uint8_t* from, int first, int bits, int at, Group& to) {
  const std::uint64_t mask = kEveryByte * ((1u << bits) - 1);
  for (int word = 0; word < kWords; ++word) to.codes[word] |= (word_at(from + word * 8) >> first & mask) << at;
}

// 16 bytes: the low nibbles, then the high ones.
void put_nibbles(const std::uint8_t* from, Group& to) {
  for (int word = 0; word < kWords; ++word) to.codes[word] = word_at(from + word % 2 * 8) >> word / 2 * 4 & kEveryByte * 15;
}

// 4 bytes: bit 4 of each code. A byte is copied to all of a word, each copy keeps a bit of its own, and a sum carries it to
// the copy's highest bit.
void add_fifth_bits(const std::uint8_t* from, Group& to) {
  for (int word = 0; word < kWords; ++word) {
    const std::uint64_t chosen = from[word] * kEveryByte & 0x8040201008040201u;
    to.codes[word] |= ((chosen + kEveryByte * 0x7f) >> 7 & kEveryByte) << 4;
  }
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

void read_q2_k(const std::uint8_t* block, int i, Group& to) {
  add_fields(block + 16 + i / 4 * 32, i % 4 * 2, 2, 0, to);
  for (int half = 0; half < 2; ++half) to.scales[half] = block[i * 2 + half] & 15, to.offsets[half] = block[i * 2 + half] >> 4;
  to.scale = half_at(block + 80), to.offset = half_at(block + 82);
}

void read_q3_k(const std::uint8_t* block, int i, Group& to) {
  add_fields(block + 32 + i / 4 * 32, i % 4 * 2, 2, 0, to), add_fields(block, i, 1, 2, to);
  for (int half = 0; half < 2; ++half) {
    const int at = i * 2 + half, low = block[96 + at % 8] >> at / 8 * 4 & 15, top = block[104 + at % 4] >> at / 4 * 2 & 3;
    to.scales[half] = static_cast<std::uint8_t>((low | top << 4) - 32);
  }
  to.scale = half_at(block + 108);
}

void read_q6_k(const std::uint8_t* block, int i, Group& to) {
  add_fields(block + i / 4 * 64 + i % 2 * 32, i % 4 / 2 * 4, 4, 0, to), add_fields(block + 128 + i / 4 * 32, i % 4 * 2, 2, 4, to);
  for (int half = 0; half < 2; ++half) to.scales[half] = block[192 + i * 2 + half];
  to.scale = half_at(block + 208);
}

void read_iq4_xs(const std::uint8_t* block, int i, Group& to) {
  put_nibbles(block + 8 + i * 16, to);
  const int low = block[4 + i / 2] >> i % 2 * 4 & 15, top = half_at(block + 2) >> i * 2 & 3;
  to.scales[0] = static_cast<std::uint8_t>((low | top << 4) - 32);
  to.scale = half_at(block);
}

// Group `i` of a block; all of `to` is zeros.
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
      for (int word = 0; word < kWords; ++word) to.codes[word] = word_at(block + 2 + word * 8) ^ kEveryByte * 0x80;
      return;
    case BlockType::q4_k:
    case BlockType::q5_k:
      add_fields(block + (type == BlockType::q4_k ? 16 : 48) + i / 2 * 32, i % 2 * 4, 4, 0, to), put_six_bit_pair(block + 4, i, to);
      if (type == BlockType::q5_k) add_fields(block + 16, i, 1, 4, to);
      return void((to.scale = half_at(block), to.offset = half_at(block + 2)));
    case BlockType::q2_k: return read_q2_k(block, i, to);
    case BlockType::q3_k: return read_q3_k(block, i, to);
    case BlockType::q6_k: return read_q6_k(block, i, to);
    case BlockType::iq4_xs: return read_iq4_xs(block, i, to);
    case BlockType::mxfp4: return to.scale = *block, put_nibbles(block + 1, to);
  }
}

void put_quad(std::uint64_t codes, std::uint8_t* to) {
  const std::uint32_t quad = static_cast<std::uint32_t>(codes);
  __builtin_memcpy(to, &quad, sizeof quad);
}

// Puts `count` bits of the codes, from bit `first` on, into a column of a plane: a line of it has 8 / count quads.
template <int first, int count>
void put_plane(const Group& group, std::uint8_t* column) {
  if constexpr (count == 8) {
    for (int word = 0; word < kWords; ++word, column += 128)
      put_quad(group.codes[word], column), put_quad(group.codes[word] >> 32, column + 64);
  } else {
    constexpr std::uint64_t mask = kEveryByte * ((1u << count) - 1);
    constexpr int words_of_line = 4 / count;
    for (int line = 0; line < count; ++line, column += 64) {
      std::uint64_t pairs = 0;  // of quads: those of the lower halves of words, and of the upper ones
      for (int word = 0; word < words_of_line; ++word)
        pairs |= (group.codes[line * words_of_line + word] >> first & mask) << 2 * count * word;
      put_quad(pairs | pairs >> 32 << count, column);
    }
  }
}

template <int bits>
void put_codes(const Group& group, std::uint8_t* column) {
  if constexpr ((bits & 8) != 0) put_plane<0, 8>(group, column);
  if constexpr ((bits & 4) != 0) put_plane<0, 4>(group, column);
  if constexpr ((bits & 2) != 0) put_plane<(bits & 4), 2>(group, column + (bits & 4) * 64);
  if constexpr ((bits & 1) != 0) put_plane<(bits & 6), 1>(group, column + (bits & 6) * 64);
}

// Puts the scales of groups of a chunk into their places.
template <BlockType type>
struct ScalePlaces {
  static constexpr BlockTraits traits = traits_of(type);
  static constexpr int num_subs = static_cast<int>(traits.num_subs());
  static constexpr int scale_bytes = traits.has_exponents ? 1 : 2;
  std::uint8_t *halves, *of_groups;  // float16 or exponents of groups or of spans; integers of groups, if two-level
  int num_groups, num_halves;
  int half_of[kChunkGroups];         // of each group

  ScalePlaces(std::uint8_t* to, int num_groups, int span) : halves(to), num_groups(num_groups) {
    const int together = traits.is_two_level ? span : 1;  // groups that share a float16
    for (int group = 0; group < num_groups; ++group) half_of[group] = group / together;
    num_halves = (num_groups + together - 1) / together;
    of_groups = to + num_halves * 32 * (traits.has_offsets ? 2 : 1);
  }

  void put(const Group& group, int index, int column) const {
    std::uint8_t* half = halves + (half_of[index] * 16 + column) * scale_bytes;
    __builtin_memcpy(half, &group.scale, scale_bytes);
    if constexpr (traits.has_offsets) __builtin_memcpy(half + num_halves * 32, &group.offset, 2);
    if constexpr (traits.is_two_level) {
      std::uint8_t* integers = of_groups + index * num_subs * 16 + column;
      for (int sub = 0; sub < num_subs; ++sub) {
        integers[sub * 16] = group.scales[sub];
        if constexpr (traits.has_offsets) integers[(num_groups * num_subs + sub) * 16] = group.offsets[sub];
      }
    }
  }
};

// One strip of a panel: 16 outputs of a part from `first` on, chunk by chunk, so that what is written stays in the first-level
// cache. Compiled for each type: its shifts and masks are constants.
template <BlockType type>
void pack_strip(const PackBlocksArgs& args, const BlockPanel& panel, int strip, const BlockRows& rows, std::int64_t first) {
  constexpr BlockTraits traits = traits_of(type);
  constexpr std::int64_t groups_of_block = traits.block_inputs / kBlockGroup;
  constexpr std::int64_t bytes_of_chunk = kChunkGroups / groups_of_block * traits.block_bytes;  // in the file
  const std::int64_t row_bytes = args.row_inputs / traits.block_inputs * traits.block_bytes;
  const std::int64_t num_columns = rows.num_outputs - first < kStripOutputs ? rows.num_outputs - first : kStripOutputs;
  for (std::int64_t chunk = 0; chunk * kChunkGroups < panel.num_groups; ++chunk) {
    const int num_groups = static_cast<int>(panel.groups_of(chunk));
    std::uint8_t* codes = args.packed + (panel.chunk(chunk, strip) - args.packed);
    const ScalePlaces<type> scales(codes + num_groups * traits.group_bytes(), num_groups, static_cast<int>(args.blocks.span));
    for (int column = 0; column < num_columns; ++column) {
      const std::uint8_t* row = rows.data + (first + column) * row_bytes;
      // The rows are too many streams for the hardware to read ahead.
      const std::uint8_t* ahead = row + (args.first_group + (chunk + 1) * kChunkGroups) / groups_of_block * traits.block_bytes;
      for (std::int64_t at = 0; at < bytes_of_chunk; at += 64) __builtin_prefetch(ahead + at);
      for (int index = 0; index < num_groups; ++index) {
        const std::int64_t in_row = args.first_group + chunk * kChunkGroups + index;
        Group group = {};
        read_group(type, row + in_row / groups_of_block * traits.block_bytes, static_cast<int>(in_row % groups_of_block), group);
        put_codes<traits.bits>(group, codes + index * traits.group_bytes() + column * 4);
        scales.put(group, index, column);
      }
    }
  }
}

using PackStrip = void (*)(const PackBlocksArgs&, const BlockPanel&, int, const BlockRows&, std::int64_t);

PackStrip pack_strip_of(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return pack_strip<BlockType::q4_0>;
    case BlockType::q4_1: return pack_strip<BlockType::q4_1>;
    case BlockType::q5_0: return pack_strip<BlockType::q5_0>;
    case BlockType::q5_1: return pack_strip<BlockType::q5_1>;
    case BlockType::q8_0: return pack_strip<BlockType::q8_0>;
    case BlockType::q2_k: return pack_strip<BlockType::q2_k>;
    case BlockType::q3_k: return pack_strip<BlockType::q3_k>;
    case BlockType::q4_k: return pack_strip<BlockType::q4_k>;
    case BlockType::q5_k: return pack_strip<BlockType::q5_k>;
    case BlockType::q6_k: return pack_strip<BlockType::q6_k>;
    case BlockType::iq4_nl: return pack_strip<BlockType::iq4_nl>;
    case BlockType::iq4_xs: return pack_strip<BlockType::iq4_xs>;
    case BlockType::mxfp4: return pack_strip<BlockType::mxfp4>;
  }
  return nullptr;
}

float float_at(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Of a finite float16: the exponent is moved up, and all numbers, subnormal ones included, are then off by one factor.
float float_of_half(std::uint16_t half) {
  const float magnitude = (half & 0x7c00u) == 0x7c00u ? float_at((half & 0x7fffu) << 13 | 0x7f800000u)
                                                      : float_at((half & 0x7fffu) << 13) * 0x1p112f;
  return half & 0x8000u ? -magnitude : magnitude;
}

// Half of a power of two of E8M0; the least two are subnormal numbers.
float float_of_exponent(std::uint16_t exponent) {
  return float_at(exponent < 2 ? 0x200000u << exponent : (exponent - 1u) << 23);
}

// Writes the 32 values of a group.
void decode_group(BlockType type, const BlockTraits& traits, const Group& group, float* to) {
  std::uint8_t codes[kBlockGroup];
  __builtin_memcpy(codes, group.codes, sizeof codes);
  const float scale = traits.has_exponents ? float_of_exponent(group.scale) : float_of_half(group.scale);
  const float offset = traits.has_offsets ? float_of_half(group.offset) : 0.0f;
  for (int i = 0; i < kBlockGroup; ++i) {
    const std::int64_t sub = i / traits.sub;
    const int code = traits.is_table ? table_of(type)[codes[i]] : codes[i];
    const float of_code = traits.is_two_level ? scale * static_cast<float>(static_cast<std::int8_t>(group.scales[sub])) : scale;
    to[i] = static_cast<float>(code - traits.zero) * of_code;
    if (traits.has_offsets) to[i] += traits.is_two_level ? -(offset * static_cast<float>(group.offsets[sub])) : offset;
  }
}

}  // namespace

void decode_blocks(BlockType type, const std::uint8_t* blocks, std::int64_t count, float* to) {
  const BlockTraits traits = traits_of(type);
  for (; count > 0; --count, blocks += traits.block_bytes)
    for (int i = 0; i < traits.block_inputs / kBlockGroup; ++i, to += kBlockGroup) {
      Group group = {};
      read_group(type, blocks, i, group);
      decode_group(type, traits, group, to);
    }
}

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
      pack_strip_of(args.blocks.types[part])(args, panel, strip, args.parts[part], in_part * kStripOutputs);
    }
  });
}

}  // namespace octavo
