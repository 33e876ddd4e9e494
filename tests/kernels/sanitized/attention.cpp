// Attention under address and undefined-behavior sanitizers, at every level that this machine has: prompts, chunks and
// decodes in one step, keys and values in every dtype and int8, in tiles and in slots, in odd sizes and buffers of
// exactly the size that they need. `make sanitize` builds and runs it; with a level's name it runs that level alone.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "levels.h"
#include "numbers.h"
#include "ops.h"

using namespace octavo;

namespace {

// One step after the other of some requests that grow: T tokens of a step, H query heads, G kv heads, E head size.
struct Shape {
  std::int64_t num_heads, num_kv_heads, head_dim, block_size, sliding_window;
  bool has_int8_kv;
  std::int64_t num_pairs;  // that are rotated, of E / 2
  bool has_cap, has_sinks;
  std::int64_t latent_size = 0;  // one vector of E for all heads, whose first elements are the value
};

struct Request {
  std::vector<std::int32_t> blocks;
  std::int64_t length = 0;
};

template <class Element>
class Trial {
 public:
  // `ops`: those of Element.
  Trial(const LayerOps& ops, Pool& pool, Shape shape, std::mt19937& source)
      : ops_(ops), pool_(pool), shape_(shape), source_(source), requests_(6) {
    const std::int64_t padded = (shape.head_dim + 31) / 32 * 32;
    const std::int64_t vector_bytes = shape.head_dim * std::int64_t{sizeof(Element)};
    const std::int64_t slot_bytes = shape.latent_size ? vector_bytes : shape.has_int8_kv ? padded + 4 : padded * std::int64_t{sizeof(Element)};
    const std::int64_t num_blocks = (kMaxPositions + shape.block_size - 1) / shape.block_size;
    std::int32_t free = 0;
    for (Request& request : requests_)
      for (std::int64_t i = 0; i < num_blocks; ++i) request.blocks.push_back(free++);
    // What nobody has written: NaN in every dtype.
    keys_.assign(free * shape.block_size * shape.num_kv_heads * slot_bytes, 0xff);
    values_ = keys_;
    query_norm_ = floats(shape.head_dim), key_norm_ = floats(shape.head_dim), sinks_ = floats(shape.num_heads);
  }

  // Whether every result of all steps is a number that a mean of values can be. Long: one request has a context that
  // threads share.
  bool run(bool is_long) {
    bool is_well = !is_long || step(1, kLongPrompt);
    for (const std::int64_t max_new : {300, 1, 30, 1}) is_well &= step(max_new);
    return is_well;
  }

 private:
  static constexpr std::int64_t kLongPrompt = 1000, kMaxPositions = kLongPrompt + 332;

  bool step(std::int64_t max_new, std::int64_t new_of_first = 0) {
    std::vector<std::int32_t> starts{0}, lengths, table, row_blocks[2];
    std::vector<std::int64_t> slots;
    const std::int64_t group = shape_.num_heads / shape_.num_kv_heads;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      Request& request = requests_[i];
      const std::int64_t num_new = i == 0 && new_of_first ? new_of_first : 1 + source_() % max_new;
      for (std::int64_t at = request.length; at < request.length + num_new; ++at)
        slots.push_back(request.blocks[at / shape_.block_size] * shape_.block_size + at % shape_.block_size);
      request.length += num_new;
      starts.push_back(starts.back() + num_new);
      lengths.push_back(request.length);
      table.insert(table.end(), request.blocks.begin(), request.blocks.end());
      for (std::int64_t row = 0; row < num_new * group; row += kMaxRowsOfBlock) {
        const std::int64_t count = std::min(kMaxRowsOfBlock, num_new * group - row);
        for (const std::int64_t value : {static_cast<std::int64_t>(i), row, count})
          row_blocks[count <= 16].push_back(static_cast<std::int32_t>(value));
      }
    }
    row_blocks[0].insert(row_blocks[0].end(), row_blocks[1].begin(), row_blocks[1].end());
    return attend(starts, lengths, table, row_blocks[0], slots);
  }

  bool attend(const std::vector<std::int32_t>& starts, const std::vector<std::int32_t>& lengths,
              const std::vector<std::int32_t>& table, const std::vector<std::int32_t>& row_blocks,
              const std::vector<std::int64_t>& slots) {
    const std::int64_t num_tokens = starts.back(), width = shape_.num_heads + (shape_.latent_size ? 0 : 2 * shape_.num_kv_heads);
    const std::int64_t value_size = shape_.latent_size ? shape_.latent_size : shape_.head_dim;
    const std::vector<float> cos = floats(num_tokens * shape_.num_pairs), sin = floats(num_tokens * shape_.num_pairs);
    const auto qkv = random_elements<Element>(num_tokens * width * shape_.head_dim, source_);
    const auto vectors = random_elements<Element>(num_tokens * shape_.head_dim, source_);
    std::vector<Element> out(num_tokens * shape_.num_heads * value_size);
    AttentionArgs args{};
    args.num_heads = shape_.num_heads, args.num_kv_heads = shape_.num_kv_heads, args.head_dim = shape_.head_dim;
    args.block_size = shape_.block_size, args.sliding_window = shape_.sliding_window;
    args.query_norm = query_norm_.data(), args.key_norm = key_norm_.data(), args.norm_eps = 1e-6f;
    args.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    args.has_int8_kv = shape_.has_int8_kv;
    args.num_tokens = num_tokens;
    args.all_blocks = {static_cast<std::int64_t>(row_blocks.size()) / 3, row_blocks.data()};
    args.num_blocks_per_request = static_cast<std::int64_t>(requests_[0].blocks.size());
    args.angles = {cos.data(), sin.data(), shape_.num_pairs}, args.slots = slots.data();
    args.soft_cap = shape_.has_cap ? 2.0f : 0.0f, args.sinks = shape_.has_sinks ? sinks_.data() : nullptr;
    args.query_start_loc = starts.data(), args.seq_lens = lengths.data();
    args.block_table = table.data();
    args.qkv = qkv.data(), args.out = out.data();
    args.keys = keys_.data(), args.values = values_.data();
    if (shape_.latent_size) {
      args.latent_size = shape_.latent_size, args.num_parts = 1, args.rotates_pairs = source_() % 2 == 1;
      args.vectors = vectors.data(), args.values = args.keys, args.query_norm = nullptr;
    }
    ops_.attention(args, pool_);
    bool is_well = true;
    // A normalized vector may consist of one element.
    const float most = shape_.latent_size ? std::sqrt(static_cast<float>(value_size)) : 1.0f;
    for (const Element value : out) is_well &= std::fabs(widened(value)) <= 1.016f * most;
    return is_well;
  }

  std::vector<float> floats(std::int64_t count) { return random_floats(count, source_); }

  const LayerOps& ops_;
  Pool& pool_;
  Shape shape_;
  std::mt19937& source_;
  std::vector<Request> requests_;
  std::vector<std::uint8_t> keys_, values_;
  std::vector<float> query_norm_, key_norm_, sinks_;
};

template <class Element>
bool is_well_with(const LayerOps& ops) {
  std::mt19937 source(1);
  Pool alone(1), crowd(3);  // one thread takes several kv heads at a time
  bool is_well = true;
  for (const std::int64_t head_dim : {12, 64, 80, 128, 256})
    for (const std::int64_t block_size : {32, 8, 96})
      for (const bool has_int8_kv : {false, true}) {
        const std::int64_t num_kv_heads = 1 + source() % 4, group = 1 + source() % 5;
        const std::int64_t half = head_dim / 2, some_pairs = source() % half;
        const Shape shape{num_kv_heads * group, num_kv_heads, head_dim, block_size, source() % 2 ? 50 : 0,
                          has_int8_kv, source() % 2 ? half : some_pairs, source() % 2 == 1,
                          source() % 2 == 1};
        is_well &= Trial<Element>(ops, source() % 2 ? alone : crowd, shape, source).run(false);
      }
  for (const bool has_int8_kv : {false, true})
    for (const std::int64_t block_size : {32, 48}) {
      const Shape shape{6, 2, 40, block_size, 0, has_int8_kv, 20, false, true};
      is_well &= Trial<Element>(ops, crowd, shape, source).run(true);
    }
  for (const std::int64_t latent_size : {20, 64, 512})
    for (const std::int64_t block_size : {8, 16, 96}) {
      const std::int64_t num_pairs = latent_size == 20 ? 3 : 16, num_heads = 1 + source() % 20;
      const Shape shape{num_heads, 1, latent_size + 2 * num_pairs, block_size, 0, false, num_pairs, false, false, latent_size};
      is_well &= Trial<Element>(ops, source() % 2 ? alone : crowd, shape, source).run(block_size == 16);
    }
  return is_well;
}

bool check(const Ops& ops) {
  const bool is_well = is_well_with<bf16>(ops.bfloat16) & is_well_with<f16>(*ops.float16) & is_well_with<float>(*ops.float32);
  std::printf("%s: attention is %s\n", ops.name, is_well ? "well" : "not a mean of values");
  return is_well;
}

}  // namespace

int main(int count, char** names) { return check_levels(count, names, check); }
