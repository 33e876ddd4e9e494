// Maps with weights in the blocks of GGUF files, of every type, under sanitizers, at every level that this machine has: packed
// and multiplied in buffers of exactly the size that they need, few and many rows, beside the portable level; each row
// alone as among others. What values blocks mean is tests/kernels/test_blocks.py. `make sanitize` builds and runs it.
#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "levels.h"
#include "numbers.h"
#include "ops.h"

using namespace octavo;

namespace {

struct TypeOfBlocks {
  BlockType type;
  int scale_at;  // byte of the first float16 in a block, or of an exponent
  const char* name;
};

constexpr TypeOfBlocks kTypes[] = {
    {BlockType::q4_0, 0, "Q4_0"},   {BlockType::q4_1, 0, "Q4_1"},     {BlockType::q5_0, 0, "Q5_0"},
    {BlockType::q5_1, 0, "Q5_1"},   {BlockType::q8_0, 0, "Q8_0"},     {BlockType::q2_k, 80, "Q2_K"},
    {BlockType::q3_k, 108, "Q3_K"}, {BlockType::q4_k, 0, "Q4_K"},     {BlockType::q5_k, 0, "Q5_K"},
    {BlockType::q6_k, 208, "Q6_K"}, {BlockType::iq4_nl, 0, "IQ4_NL"}, {BlockType::iq4_xs, 0, "IQ4_XS"},
    {BlockType::mxfp4, 0, "MXFP4"},
};

// Rows as in a file, whose scales are small numbers.
std::vector<std::uint8_t> random_blocks(const TypeOfBlocks& of, std::int64_t num_outputs, std::int64_t in_size, std::mt19937& source) {
  const BlockTraits traits = traits_of(of.type);
  std::vector<std::uint8_t> bytes(num_outputs * in_size / traits.block_inputs * traits.block_bytes);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(source());
  for (std::size_t block = 0; block < bytes.size(); block += traits.block_bytes)
    if (traits.has_exponents)
      bytes[block + of.scale_at] = static_cast<std::uint8_t>(118 + source() % 4);  // about 2^-8
    else for (int half = 0; half <= traits.has_offsets; ++half)
      bytes[block + of.scale_at + half * 2 + 1] = static_cast<std::uint8_t>(0x1c | (source() & 0x80));  // about 2^-8
  return bytes;
}

// A weight of parts that are stacked, or of gates and ups.
struct WeightInBlocks {
  std::vector<std::vector<std::uint8_t>> parts;
  std::vector<std::uint8_t> values;
  PackBlocksArgs args = {};

  WeightInBlocks(const std::vector<TypeOfBlocks>& types, const std::vector<std::int64_t>& sizes, bool is_gated, std::int64_t in_size,
                 Pool& pool, std::mt19937& source) {
    args.blocks.is_gated = is_gated, args.blocks.span = kChunkGroups;
    args.row_inputs = args.in_size = in_size;
    for (std::size_t i = 0; i < types.size(); ++i) {
      parts.push_back(random_blocks(types[i], sizes[i], in_size, source));
      args.blocks.types[i] = types[i].type, args.blocks.num_strips[i] = (sizes[i] + kStripOutputs - 1) / kStripOutputs;
      args.parts[i] = {parts.back().data(), sizes[i]};
      args.out_size = is_gated ? sizes[i] : args.out_size + sizes[i];
    }
    args.blocks.num_parts = static_cast<int>(types.size());
    values.resize(packed_blocks_size(args));
    args.packed = values.data();
    pack_blocks(args, pool);
  }

  PackedWeight packed() const {
    return {args.out_size, nullptr, nullptr,
            {.bits = 8, .is_two_level = false, .group_size = kBlockGroup, .values = values.data(), .scales = nullptr,
             .offsets = nullptr, .is_rotated = false, .mixes_blocks = false, .blocks = args.blocks}};
  }
};

std::vector<float> multiplied(const Ops& ops, Pool& pool, const bf16* x, std::int64_t num_rows, const WeightInBlocks& weight) {
  const std::int64_t out_size = weight.args.out_size;
  if (!weight.args.blocks.is_gated) {
    std::vector<float> out(num_rows * out_size);
    ops.integers_bfloat16.linear({{x, num_rows, weight.args.in_size}, weight.packed(), Output::float32, out.data()}, pool);
    return out;
  }
  std::vector<bf16> halves(num_rows * out_size);
  ops.integers_bfloat16.linear({{x, num_rows, weight.args.in_size}, weight.packed(), Output::gated, halves.data()}, pool);
  std::vector<float> out;
  for (const bf16 half : halves) out.push_back(widened(half));
  return out;
}

const char* check_weight(const Ops& ops, Pool& pool, const WeightInBlocks& weight, std::int64_t num_rows, std::mt19937& source) {
  const std::int64_t in_size = weight.args.in_size, out_size = weight.args.out_size;
  const std::vector<bf16> x = random_halves(num_rows * in_size, source);
  const std::vector<float> out = multiplied(ops, pool, x.data(), num_rows, weight);
  const std::vector<float> expected = multiplied(ops_portable, pool, x.data(), num_rows, weight);
  float largest = 0.0f;
  for (const float value : expected) largest = std::fmax(largest, std::fabs(value));
  const float tolerance = largest * (weight.args.blocks.is_gated ? 0x1p-6f : 0x1p-16f);
  for (std::size_t i = 0; i < out.size(); ++i)
    if (!(std::fabs(out[i] - expected[i]) <= tolerance)) return "a product is not the portable level's";
  for (const std::int64_t most : {1, 4, 7}) {
    const std::int64_t count = std::min(most, num_rows), first = random_below(num_rows - count + 1, source);
    const std::vector<float> alone = multiplied(ops, pool, x.data() + first * in_size, count, weight);
    if (!std::equal(alone.begin(), alone.end(), out.begin() + first * out_size)) return "a row depends on others";
  }
  return nullptr;
}

const char* check_type(const Ops& ops, Pool& pool, const TypeOfBlocks& type, std::mt19937& source) {
  const TypeOfBlocks other = kTypes[random_below(std::size(kTypes), source)];
  for (const std::int64_t num_rows : {1, 6, 37}) {
    const std::int64_t in_size = 256 * (1 + random_below(3, source)), size = 1 + random_below(80, source);
    const WeightInBlocks plain({type}, {size}, false, in_size, pool, source);
    const WeightInBlocks stacked({type, other}, {16 * (1 + random_below(3, source)), size}, false, in_size, pool, source);
    const WeightInBlocks gated({type, other}, {size, size}, true, in_size, pool, source);
    for (const WeightInBlocks* weight : {&plain, &stacked, &gated})
      if (const char* fault = check_weight(ops, pool, *weight, num_rows, source)) return fault;
  }
  // The last chunk is not whole; several blocks of rows.
  const std::int64_t in_size = traits_of(type.type).block_inputs == 32 ? 352 : 512;
  const WeightInBlocks wide({type}, {70}, false, in_size, pool, source);
  return check_weight(ops, pool, wide, 150, source);
}

bool check(const Ops& ops) {
  std::mt19937 source(1);
  Pool pool(3);
  bool is_well = true;
  for (const TypeOfBlocks& type : kTypes)
    if (const char* fault = check_type(ops, pool, type, source)) {
      is_well = false;
      std::printf("%s: %s: %s\n", ops.name, type.name, fault);
    }
  std::printf("%s: blocks are %s\n", ops.name, is_well ? "well" : "wrong");
  return is_well;
}

}  // namespace

int main(int count, char** names) { return check_levels(count, names, check); }
