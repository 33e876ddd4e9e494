#include <stdexcept>

#include "ops.h"

namespace octavo {
namespace {

constexpr std::int64_t kTile = 512;  // elements: [16 pairs of k][16 outputs][2]
constexpr std::int64_t kIdsOfChunk = 8;

// One output's inputs lie in one pair of every line of its tiles.
void unpack_row(const PackedRowsArgs& args, std::int64_t output, bf16* out) {
  const std::int64_t num_k = (args.size + 31) / 32;
  const bf16* tiles = args.packed.weight + output / 32 * num_k * 2 * kTile + output % 32 / 16 * kTile + output % 16 * 2;
  for (std::int64_t k = 0; k + 1 < args.size; k += 2)
    __builtin_memcpy(out + k, tiles + k / 32 * 2 * kTile + k % 32 * 16, 2 * sizeof(bf16));
  if (args.size % 2) out[args.size - 1] = tiles[(args.size - 1) / 32 * 2 * kTile + (args.size - 1) % 32 * 16];
}

}  // namespace

void packed_rows(const PackedRowsArgs& args, Pool& pool) {
  if (args.packed.integers.bits) throw std::invalid_argument("rows are read of bf16 weights only");
  for (std::int64_t i = 0; i < args.num_ids; ++i)
    if (args.ids[i] < 0 || args.ids[i] >= args.packed.out_size) throw std::out_of_range("an id that the weight has no row for");
  pool.run((args.num_ids + kIdsOfChunk - 1) / kIdsOfChunk, [&](std::int64_t chunk) {
    for (std::int64_t i = chunk * kIdsOfChunk; i < args.num_ids && i < (chunk + 1) * kIdsOfChunk; ++i)
      unpack_row(args, args.ids[i], args.out + i * args.size);
  });
}

}  // namespace octavo
