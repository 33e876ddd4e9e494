// Arguments of one attention call: a layer's projection in, its attention out, keys and values in paged memory.
//
// Legend: T = tokens of the step, R = requests, H = query heads, G = kv heads, E = head size, P = E rounded up to 32,
// B = most blocks of any request, W = tokens kept after the last layer's attention, A = pairs that a table rotates.
#pragma once

#include <cstdint>

namespace octavo {

constexpr std::int64_t kMaxRowsOfBlock = 32;
constexpr std::int64_t kMaxHeadDim = 576;
constexpr std::int64_t kTilePositions = 32;
constexpr std::int64_t kMaxRotaryTables = 4;

// Keys and values are stored in tiles of 32 consecutive positions: if block_size is a multiple of 32, a block holds
// [G][block_size / 32][tile] for keys and the same for values. A tile consists of square parts, [P / 32][32 x 32], laid
// out for the multiplying unit (attention_parts.inc.h). Otherwise a block holds [block_size][G][P], and tiles are built
// when read.
//
// A latent layer has one vector [E] per token, whose first V elements are also the value: keys and values are one pool,
// [slots][E] (attention_latent.inc.h).
//
// One layer, in every step. Projection, output and, unless int8, the pool are of the dtype of the op.
struct AttentionLayer {
  std::int64_t num_heads, num_kv_heads, head_dim, block_size;
  std::int64_t sliding_window;  // position p sees p - sliding_window + 1 ... p; 0: all up to p
  const float* query_norm;      // [E], or null: no norms
  const float* key_norm;        // [E], or null
  const float* sinks;           // [H], or null: one extra logit per head, without a value
  float norm_eps, scale;
  float soft_cap;               // scaled scores s become soft_cap * tanh(s / soft_cap); 0: no cap
  std::int64_t rotary;          // which of the step's tables rotates queries and keys; -1: none
  bool has_int8_kv;  // the pool holds bytes and scales (attention_int8.inc.h)
  bool computes_kept_only;  // outputs only for the step's kept tokens
  std::int64_t kv_group;  // which block table and slots to use
  bool normalizes_values = false;  // with the epsilon of the norms, without weights
  // Of the projection: 3: queries, keys, values; 2: values are keys, before norm and rotation; 1: queries only, keys and
  // values are another layer's, written before, or the layer is latent.
  std::int64_t num_parts = 3;
  std::int64_t gate_heads = 0;  // behind these parts in a row, for others than attention
  std::int64_t latent_size = 0;  // V of a latent layer, whose key_norm is [V]; 0: keys and values are apart
  // Elements 2 * i and 2 * i + 1 are a pair, of a latent layer behind the value; else i and i + A.
  bool rotates_pairs = false;
  bool norms_behind = false;      // heads are rotated first, then normalized
  std::int64_t query_rotary = 0;  // which of the step's tables rotates queries; -1: none
  std::int64_t chunk_size = 0;    // position p sees nothing before p - p % chunk_size; 0: there are no chunks
};

// A row is one query head of one token; those of a request and a kv head are [new tokens][H / G]. Work is divided into
// row blocks, each for every kv head.
struct RowBlocks {
  std::int64_t count;
  const std::int32_t* of;  // [count, 3]: request, first row, rows; blocks of more than 16 rows first
};

// Angles of a step's tokens: a head's element i pairs with i + A; elements from 2 * A on are not rotated.
struct RotaryTable {
  const float* cos = nullptr;  // [T, A]
  const float* sin = nullptr;  // [T, A]
  std::int64_t num_pairs = 0;  // A, at most E / 2
};

// One step, in every layer of a KV group.
struct AttentionStep {
  std::int64_t num_tokens, num_kept, num_blocks_per_request;  // T, W, B
  RotaryTable rotary_tables[kMaxRotaryTables];
  const std::int64_t* slots;            // [T], where each token's key and value are written
  const std::int32_t* query_start_loc;  // [R + 1], a request's tokens in T
  const std::int32_t* seq_lens;         // [R], with this step's tokens
  const std::int32_t* block_table;      // [R, B]
  const std::int64_t* kept;             // [W], or null: all T
  const std::int32_t* visible_ends;     // [T], one past the last position that a token sees, ascending within a request;
                                        // null: it sees itself last
  RowBlocks all_blocks, kept_blocks;    // of all tokens, and of those that are kept
};

struct AttentionArgs : AttentionLayer, AttentionStep {
  const void* qkv;  // [T, width() * E]
  void* out;        // [T, H * E]; latent: [T, H * V]
  void* keys;       // the pool, as above
  void* values;     // the pool
  const void* vectors = nullptr;  // [T, E], of a latent layer
  RotaryTable angles = {}, query_angles = {};  // the layer's tables, in this step

  std::int64_t width() const { return num_heads + (num_parts - 1) * num_kv_heads + gate_heads; }
  const RowBlocks& row_blocks() const { return computes_kept_only ? kept_blocks : all_blocks; }
};

}  // namespace octavo
