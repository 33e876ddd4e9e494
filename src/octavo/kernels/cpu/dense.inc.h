// Ops of one dtype, float16 or float32, with dense weights: the same files as level.inc.h for bf16, except for products
// and stores. Sums are float32. A file <dtype>_<level>.cpp defines OCTAVO_FLOAT16 or OCTAVO_FLOAT32, OCTAVO_LEVEL and
// the rows multiplied together, and is compiled with the flags of its level, for all levels with vectors of that size.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ops.h"

#define OCTAVO_DENSE
#define OCTAVO_JOIN_(a, b) a##b
#define OCTAVO_JOIN(a, b) OCTAVO_JOIN_(a, b)

#if defined(__clang__)  // contracts a * b + c also where operators are functions; GCC does so by default
#pragma clang fp contract(fast)
#endif

namespace octavo::OCTAVO_LEVEL {
namespace {

#if defined(OCTAVO_FLOAT32)
using Element = float;  // of activations and weights
constexpr std::int64_t kTilesOfK = 4;                 // 16 KiB of a panel, half of L1
#define OCTAVO_OPS float32_ops_
#else
using Element = f16;
constexpr std::int64_t kTilesOfK = 8;                 // the same
#define OCTAVO_OPS float16_ops_
#endif

constexpr int kRowsAtOnce = 2;                       // rows per product of attention, where it has no other
constexpr std::int64_t kPrefetchElements = 2048;      // prefetch distance of weights from memory, 8 KiB
constexpr std::int64_t kLeftCacheBytes = 512 << 10;   // activations kept in L2
constexpr std::int64_t kFewRows = 0;                  // none: bits depend on the blocking of k, one for all row counts
constexpr std::int64_t kMaxRowTiles = 8;             // 128 rows
constexpr std::int64_t kMaxPanels = 16;              // their results, for 128 rows, take 256 KiB
constexpr std::int64_t kStreamedBytes = 1 << 16;      // results of at least this size bypass the caches
constexpr std::int64_t kChunksPerThread = 8;
constexpr std::int64_t kExpertChunksPerThread = 32;  // for all experts together: their loads are uneven

#include "vectors.inc.h"
#include "simd.inc.h"
#include "bfloat16.inc.h"
#include "float16.inc.h"
#include "elements.inc.h"
#include "ahead.inc.h"
#include "dense_tiles.inc.h"
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
#include "head_linears.inc.h"
#include "activate.inc.h"
#include "lora_rows.inc.h"
#include "lora.inc.h"
#if defined(OCTAVO_HAS_AVX2)
#include "add_k.inc.h"
#endif
#include "attention_parts.inc.h"
#include "softmax.inc.h"
#include "attention_heads.inc.h"
#if defined(OCTAVO_HAS_AVX512)
#include "attention_integers.inc.h"
#endif
#include "attention_int8.inc.h"
#include "attention_write.inc.h"
#include "attention_rows.inc.h"
#include "attention_span.inc.h"
#include "attention_weights.inc.h"
#include "attention_values.inc.h"
#if defined(OCTAVO_HAS_AVX512)
#include "attention_products_avx512.inc.h"
#else
#include "attention_products.inc.h"
#endif
#include "attention_block.inc.h"
#include "attention_split.inc.h"
#include "attention.inc.h"
#include "recurrence.inc.h"
#include "gated_delta.inc.h"
#include "short_conv.inc.h"
#include "state_space.inc.h"

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL

namespace octavo {

const LayerOps OCTAVO_JOIN(OCTAVO_OPS, OCTAVO_LEVEL) = {
    .pack_linear = OCTAVO_LEVEL::pack_linear,
    .linear = OCTAVO_LEVEL::linear,
    .head_linears = OCTAVO_LEVEL::head_linears,
    .argmax = OCTAVO_LEVEL::argmax,
    .mlp = OCTAVO_LEVEL::mlp,
    .activate = OCTAVO_LEVEL::activate,
    .gated_product = OCTAVO_LEVEL::gated_product,
    .scaled_sum = OCTAVO_LEVEL::scaled_sum,
    .add_lora = OCTAVO_LEVEL::add_lora,
    .route = OCTAVO_LEVEL::route,
    .expert_rows = OCTAVO_LEVEL::expert_rows_by<OCTAVO_LEVEL::PlainExperts>,
    .combine_experts = OCTAVO_LEVEL::combine_experts,
    .moe = OCTAVO_LEVEL::moe_by<OCTAVO_LEVEL::PlainExperts>,
    .rms_norm = OCTAVO_LEVEL::rms_norm<OCTAVO_LEVEL::Element>,
    .part_squares = OCTAVO_LEVEL::part_squares<OCTAVO_LEVEL::Element>,
    .scale_parts = OCTAVO_LEVEL::scale_parts<OCTAVO_LEVEL::Element>,
    .attention = OCTAVO_LEVEL::attention,
    .gated_delta = OCTAVO_LEVEL::gated_delta,
    .short_conv = OCTAVO_LEVEL::short_conv,
    .state_space = OCTAVO_LEVEL::state_space,
    .norm_groups = OCTAVO_LEVEL::norm_groups,
    .gate = OCTAVO_LEVEL::gate,
};

}  // namespace octavo
