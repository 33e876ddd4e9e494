// Maps and norms of one level in float32: what level.inc.h does in bf16, by the same files but for products and how
// results are stored. A file float32_<level>.cpp defines OCTAVO_LEVEL and how many rows are multiplied together, and is
// compiled with the flags of its level: in files of their own, they leave the other ops' machine code as it is.
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ops.h"

#define OCTAVO_FLOAT32
#define OCTAVO_JOIN_(a, b) a##b
#define OCTAVO_JOIN(a, b) OCTAVO_JOIN_(a, b)

#if defined(__clang__)  // a * b + c in one rounding, also where operators are functions; GCC does so by itself
#pragma clang fp contract(fast)
#endif

namespace octavo::OCTAVO_LEVEL {
namespace {

using Element = float;  // of activations and weights

constexpr std::int64_t kPrefetchElements = 2048;      // ahead of weights that come from memory, 8 KiB
constexpr std::int64_t kLeftCacheBytes = 512 << 10;   // of activations that are to stay in the second-level cache
constexpr std::int64_t kFewRows = 0;                  // none: all take their k in the same blocks, which bits depend on
constexpr std::int64_t kMaxRowTiles = 8;             // 128 rows
constexpr std::int64_t kTilesOfK = 4;                 // 16 KiB of a panel, half of the first-level cache
constexpr std::int64_t kMaxPanels = 16;              // whose results, of 128 rows, take 256 KiB
constexpr std::int64_t kStreamedBytes = 1 << 16;      // results as large as this bypass the caches
constexpr std::int64_t kChunksPerThread = 8;
constexpr std::int64_t kExpertChunksPerThread = 32;  // of all experts together: their shares are uneven

#include "vectors.inc.h"
#include "simd.inc.h"
#include "bfloat16.inc.h"
#include "ahead.inc.h"
#include "float32_tiles.inc.h"
#include "norm.inc.h"
#include "argmax.inc.h"
#include "panels.inc.h"
#include "product.inc.h"
#include "finish.inc.h"
#include "multiply.inc.h"
#include "linear.inc.h"
#include "moe_route.inc.h"
#include "moe_pairs.inc.h"
#include "experts.inc.h"
#include "moe.inc.h"

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL

namespace octavo {

const LayerOps OCTAVO_JOIN(float32_ops_, OCTAVO_LEVEL) = {
    .pack_linear = OCTAVO_LEVEL::pack_linear,
    .linear = OCTAVO_LEVEL::linear,
    .argmax = OCTAVO_LEVEL::argmax,
    .mlp = OCTAVO_LEVEL::mlp,
    .route = OCTAVO_LEVEL::route,
    .expert_rows = OCTAVO_LEVEL::expert_rows_by<OCTAVO_LEVEL::PlainExperts>,
    .combine_experts = OCTAVO_LEVEL::combine_experts,
    .moe = OCTAVO_LEVEL::moe_by<OCTAVO_LEVEL::PlainExperts>,
    .rms_norm = OCTAVO_LEVEL::rms_norm,
};

}  // namespace octavo
