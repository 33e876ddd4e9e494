// Linears and norms of one level in float32: the same files as level.inc.h for bf16, except for products and stores. A
// file float32_<level>.cpp defines OCTAVO_LEVEL and the rows multiplied together, and is compiled with the flags of its
// level: in separate files, they leave the other ops' machine code unchanged.
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ops.h"

#define OCTAVO_FLOAT32
#define OCTAVO_JOIN_(a, b) a##b
#define OCTAVO_JOIN(a, b) OCTAVO_JOIN_(a, b)

#if defined(__clang__)  // contracts a * b + c also where operators are functions; GCC does so by default
#pragma clang fp contract(fast)
#endif

namespace octavo::OCTAVO_LEVEL {
namespace {

using Element = float;  // of activations and weights

constexpr std::int64_t kPrefetchElements = 2048;      // prefetch distance of weights from memory, 8 KiB
constexpr std::int64_t kLeftCacheBytes = 512 << 10;   // activations kept in L2
constexpr std::int64_t kFewRows = 0;                  // none: bits depend on the blocking of k, one for all row counts
constexpr std::int64_t kMaxRowTiles = 8;             // 128 rows
constexpr std::int64_t kTilesOfK = 4;                 // 16 KiB of a panel, half of L1
constexpr std::int64_t kMaxPanels = 16;              // their results, for 128 rows, take 256 KiB
constexpr std::int64_t kStreamedBytes = 1 << 16;      // results of at least this size bypass the caches
constexpr std::int64_t kChunksPerThread = 8;
constexpr std::int64_t kExpertChunksPerThread = 32;  // for all experts together: their loads are uneven

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
#include "activate.inc.h"
#include "lora_rows.inc.h"
#include "lora.inc.h"

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL

namespace octavo {

const LayerOps OCTAVO_JOIN(float32_ops_, OCTAVO_LEVEL) = {
    .pack_linear = OCTAVO_LEVEL::pack_linear,
    .linear = OCTAVO_LEVEL::linear,
    .argmax = OCTAVO_LEVEL::argmax,
    .mlp = OCTAVO_LEVEL::mlp,
    .activate = OCTAVO_LEVEL::activate,
    .add_lora = OCTAVO_LEVEL::add_lora,
    .route = OCTAVO_LEVEL::route,
    .expert_rows = OCTAVO_LEVEL::expert_rows_by<OCTAVO_LEVEL::PlainExperts>,
    .combine_experts = OCTAVO_LEVEL::combine_experts,
    .moe = OCTAVO_LEVEL::moe_by<OCTAVO_LEVEL::PlainExperts>,
    .rms_norm = OCTAVO_LEVEL::rms_norm,
};

}  // namespace octavo
