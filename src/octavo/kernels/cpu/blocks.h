// Weights in the blocks of GGUF files, computed as stored: their integers and scales are repacked, never rounded.
//
// w = scale * (code - zero) + offset, with a scale (and offset) for 16 or 32 inputs of an output; codes of 2 to 6 or of 8
// bits. Two-level: a scale is a float16 for a span of groups times an integer for each. MXFP4's are powers of two.
//
// A strip is 16 outputs, a group is 32 inputs, a chunk is 8 groups or the last ones. A panel of 32 outputs is
// [chunks][2 strips]; the chunk of a strip:
//   codes   [groups][planes]; a plane has some bits of each code: all 8 [8 quads][16 outputs][4]; 4 [4][16][4], two quads
//           in a byte, the first in the low bits; 2 [2][16][4], four quads; 1 [16][4], eight quads. Low bits come first
//   scales  one level: float16 scales [groups][16], then offsets, or uint8 exponents [groups][16]; two levels: float16 scales
//           [spans][16] and of offsets, then int8 [groups][32 / sub][16] of scales and of offsets; padded to 64 bytes
#pragma once

#include <cstdint>

namespace octavo {

// Numbers are those of ggml's enum ggml_type.
enum class BlockType : std::int32_t {
  q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q2_k = 10, q3_k = 11, q4_k = 12, q5_k = 13, q6_k = 14, iq4_nl = 20, iq4_xs = 23,
  mxfp4 = 39,
};

constexpr std::int64_t kBlockGroup = 32, kChunkGroups = 8, kChunkInputs = kBlockGroup * kChunkGroups, kStripOutputs = 16;

struct BlockTraits {
  int bits = 0;          // of a code; 0: unknown type
  int zero = 0;          // the code of 0
  bool is_table = false; // codes are indices of a table: `table_of`
  int sub = 32;          // inputs that share a scale
  bool is_two_level = false, has_offsets = false;
  int block_inputs = 32, block_bytes = 0;  // in the file
  bool has_exponents = false;              // scales are powers of two, stored as a byte: of one level, without offsets

  constexpr std::int64_t num_subs() const { return kBlockGroup / sub; }
  constexpr std::int64_t group_bytes() const { return bits * 64; }  // of codes
  constexpr std::int64_t one_level_bytes() const { return has_exponents ? 16 : 32; }  // of a group's scales
  constexpr std::int64_t scale_bytes(std::int64_t num_groups, std::int64_t span) const {
    const std::int64_t of_groups = num_groups * (is_two_level ? num_subs() * 16 : one_level_bytes());
    const std::int64_t of_spans = is_two_level ? (num_groups + span - 1) / span * 32 : 0;
    return ((of_groups + of_spans) * (has_offsets ? 2 : 1) + 63) / 64 * 64;
  }
  constexpr std::int64_t chunk_bytes(std::int64_t num_groups, std::int64_t span) const {
    return num_groups * group_bytes() + scale_bytes(num_groups, span);
  }
};

constexpr BlockTraits traits_of(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return {4, 8, false, 32, false, false, 32, 18};
    case BlockType::q4_1: return {4, 0, false, 32, false, true, 32, 20};
    case BlockType::q5_0: return {5, 16, false, 32, false, false, 32, 22};
    case BlockType::q5_1: return {5, 0, false, 32, false, true, 32, 24};
    case BlockType::q8_0: return {8, 128, false, 32, false, false, 32, 34};
    case BlockType::q2_k: return {2, 0, false, 16, true, true, 256, 84};
    case BlockType::q3_k: return {3, 4, false, 16, true, false, 256, 110};
    case BlockType::q4_k: return {4, 0, false, 32, true, true, 256, 144};
    case BlockType::q5_k: return {5, 0, false, 32, true, true, 256, 176};
    case BlockType::q6_k: return {6, 32, false, 16, true, false, 256, 210};
    case BlockType::iq4_nl: return {4, 0, true, 32, false, false, 32, 18};
    case BlockType::iq4_xs: return {4, 0, true, 32, true, false, 256, 136};
    case BlockType::mxfp4: return {4, 12, true, 32, false, false, 32, 17, true};
  }
  return {};
}

// What codes stand for, the type's zero included. Those of MXFP4 count halves: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and minus these.
constexpr std::int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr std::int8_t kMxfp4Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr const std::int8_t* table_of(BlockType type) { return type == BlockType::mxfp4 ? kMxfp4Values : kIq4Values; }

// The weight of a layer: up to four parts of different types, stacked by outputs; gated: gates and ups, whose strips
// alternate.
struct Blocks {
  static constexpr int kMaxParts = 4;
  int num_parts = 0;  // 0: not in blocks
  bool is_gated = false;
  std::int64_t span = 0;  // groups that share the outer scale
  BlockType types[kMaxParts] = {};
  std::int64_t num_strips[kMaxParts] = {};

  std::int64_t strip_bytes(int part, std::int64_t in_size) const {
    const BlockTraits traits = traits_of(types[part]);
    const std::int64_t num_groups = in_size / kBlockGroup, whole = num_groups / kChunkGroups, rest = num_groups % kChunkGroups;
    return whole * traits.chunk_bytes(kChunkGroups, span) + (rest ? traits.chunk_bytes(rest, span) : 0);
  }
  // The part that a strip belongs to.
  int part_of(std::int64_t strip) const {
    if (is_gated) return static_cast<int>(strip % 2);
    int part = 0;
    while (part + 1 < num_parts && strip >= num_strips[part]) strip -= num_strips[part++];
    return part;
  }
  // Where a panel begins: an even number of strips lies before it.
  std::int64_t panel_offset(std::int64_t panel, std::int64_t in_size) const {
    if (is_gated) return panel * (strip_bytes(0, in_size) + strip_bytes(1, in_size));
    std::int64_t strips = panel * 2, offset = 0;
    for (int part = 0; part < num_parts && strips > 0; ++part) {
      const std::int64_t here = part + 1 < num_parts && num_strips[part] < strips ? num_strips[part] : strips;
      offset += here * strip_bytes(part, in_size), strips -= here;
    }
    return offset;
  }
};

// One panel as kernels read it.
struct BlockPanel {
  BlockType types[2];  // of the strips
  BlockTraits strips[2];
  const std::uint8_t* data;
  std::int64_t span, num_groups;

  static BlockPanel of(const Blocks& blocks, const std::uint8_t* values, std::int64_t panel, std::int64_t in_size) {
    const BlockType types[2] = {blocks.types[blocks.part_of(panel * 2)], blocks.types[blocks.part_of(panel * 2 + 1)]};
    return {{types[0], types[1]}, {traits_of(types[0]), traits_of(types[1])}, values + blocks.panel_offset(panel, in_size), blocks.span,
            in_size / kBlockGroup};
  }
  // Both strips get what either needs.
  std::int64_t num_subs() const { return strips[0].sub == 16 || strips[1].sub == 16 ? 2 : 1; }
  bool has_offsets() const { return strips[0].has_offsets || strips[1].has_offsets; }
  std::int64_t groups_of(std::int64_t chunk) const {
    const std::int64_t rest = num_groups - chunk * kChunkGroups;
    return rest < kChunkGroups ? rest : kChunkGroups;
  }
  std::int64_t bytes_of(std::int64_t chunk) const {
    return strips[0].chunk_bytes(groups_of(chunk), span) + strips[1].chunk_bytes(groups_of(chunk), span);
  }
  const std::uint8_t* chunk(std::int64_t index, int strip) const {
    return data + index * bytes_of(0) + (strip ? strips[0].chunk_bytes(groups_of(index), span) : 0);
  }
};

}  // namespace octavo
