#include <stdexcept>

#include "ops.h"

namespace octavo {
namespace {

constexpr std::int64_t kTile = 512;  // elements of one of a k tile's two right tiles
constexpr std::int64_t kIdsOfChunk = 8;

// The right tiles of a panel, at one of its outputs.
template <class Element>
const Element* tiles_of(const PackedRowsArgs& args, std::int64_t output) {
  return static_cast<const Element*>(args.packed.weight) + output / 32 * ((args.size + 31) / 32) * 2 * kTile;
}

// In bf16 its inputs are one pair per line of [16 pairs of k][16 outputs][2].
void unpack_row(const PackedRowsArgs& args, std::int64_t output, bf16* out) {
  const bf16* tiles = tiles_of<bf16>(args, output) + output % 32 / 16 * kTile + output % 16 * 2;
  for (std::int64_t k = 0; k + 1 < args.size; k += 2)
    __builtin_memcpy(out + k, tiles + k / 32 * 2 * kTile + k % 32 * 16, 2 * sizeof(bf16));
  if (args.size % 2) out[args.size - 1] = tiles[(args.size - 1) / 32 * 2 * kTile + (args.size - 1) % 32 * 16];
}

// In float16 and float32 they are a column of [k][32 outputs].
template <class Element>
void unpack_row(const PackedRowsArgs& args, std::int64_t output, Element* out) {
  const Element* column = tiles_of<Element>(args, output) + output % 32;
  for (std::int64_t k = 0; k < args.size; ++k) out[k] = column[k * 32];
}

}  // namespace

template <class Element>
void packed_rows(const PackedRowsArgs& args, Pool& pool) {
  if (args.packed.integers.bits) throw std::invalid_argument("rows can be read from dense weights only");
  for (std::int64_t i = 0; i < args.num_ids; ++i)
    if (args.ids[i] < 0 || args.ids[i] >= args.packed.out_size) throw std::out_of_range("id is out of range");
  pool.run((args.num_ids + kIdsOfChunk - 1) / kIdsOfChunk, [&](std::int64_t chunk) {
    for (std::int64_t i = chunk * kIdsOfChunk; i < args.num_ids && i < (chunk + 1) * kIdsOfChunk; ++i)
      unpack_row(args, args.ids[i], static_cast<Element*>(args.out) + i * args.size);
  });
}

template void packed_rows<bf16>(const PackedRowsArgs& args, Pool& pool);
template void packed_rows<f16>(const PackedRowsArgs& args, Pool& pool);
template void packed_rows<float>(const PackedRowsArgs& args, Pool& pool);

}  // namespace octavo
