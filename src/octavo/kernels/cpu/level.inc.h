// All ops of one level. A file level_<name>.cpp defines OCTAVO_LEVEL, the OCTAVO_HAS_... macros that hold for it and
// its constants, includes this file, and is compiled with the flags of its level.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "level.h"
#include "ops.h"

#define OCTAVO_JOIN_(a, b) a##b
#define OCTAVO_JOIN(a, b) OCTAVO_JOIN_(a, b)
#define OCTAVO_TEXT_(a) #a
#define OCTAVO_TEXT(a) OCTAVO_TEXT_(a)

#if (defined(OCTAVO_HAS_AVX512) || defined(OCTAVO_HAS_AVX2)) && !defined(OCTAVO_HAS_BF16)
#define OCTAVO_WIDENS_BF16  // to float32, without an instruction that multiplies bf16
#endif

#if defined(OCTAVO_HAS_AVX512)  // float16, float32 and sampling are in files that levels share
#define OCTAVO_SHARED_LEVEL avx512
#elif defined(OCTAVO_HAS_AVX2)
#define OCTAVO_SHARED_LEVEL avx2
#else
#define OCTAVO_SHARED_LEVEL portable
#endif

#if defined(__clang__)  // contracts a * b + c also where operators are functions; GCC does so by default
#pragma clang fp contract(fast)
#endif

namespace octavo::OCTAVO_LEVEL {
namespace {

using Element = bf16;  // of activations and weights, unless said otherwise
constexpr const LayerOps& kFloat16Ops = OCTAVO_JOIN(float16_ops_, OCTAVO_SHARED_LEVEL);

constexpr int kRowsAtOnce = OCTAVO_ROWS_AT_ONCE;      // rows per product, with vectors
#if defined(OCTAVO_HAS_AVX2)
constexpr std::int64_t kLeftCacheBytes = 256 << 10;   // activations kept in L2
constexpr std::int64_t kFewRows = 0;                  // products are slow enough to prefetch weights during any of them
constexpr std::int64_t kPrefetchElements = 0;         // so no product prefetches for itself
constexpr std::int64_t kMaxRowTiles = 4;             // 64 rows
constexpr std::int64_t kTilesOfK = 8;                 // 16 KiB of a panel, half of L1
#elif defined(OCTAVO_HAS_AVX512) && !defined(OCTAVO_HAS_AMX)
constexpr std::int64_t kLeftCacheBytes = 512 << 10;   // activations kept in L2
constexpr std::int64_t kFewRows = 8;                  // whose products pass over weights once
constexpr std::int64_t kPrefetchElements = 4096;      // prefetch distance of weights from memory, 8 KiB
constexpr std::int64_t kMaxRowTiles = 6;             // 96 rows
constexpr std::int64_t kTilesOfK = 32;                // 64 KiB of a panel, read from L2 for all rows
#else
constexpr std::int64_t kLeftCacheBytes = 1 << 20;     // activations kept in L2
constexpr std::int64_t kFewRows = 96;
constexpr std::int64_t kPrefetchElements = 2048;      // prefetch distance of weights from memory, 4 KiB
constexpr std::int64_t kMaxRowTiles = 32;            // 512 rows
constexpr std::int64_t kTilesOfK = 16;                // 32 KiB of a panel in L1, which left tiles bypass
#endif
constexpr std::int64_t kMaxPanels = 16;              // their results, for 512 rows, take 1 MiB
constexpr std::int64_t kStreamedBytes = 1 << 16;      // results of at least this size bypass the caches
constexpr std::int64_t kChunksPerThread = 8;
constexpr std::int64_t kExpertChunksPerThread = 32;  // for all experts together: their loads are uneven
constexpr int kIntegerRowsAtOnce = OCTAVO_ROWS_AT_ONCE / 2;  // rows per integer product, with vectors
constexpr std::int64_t kIntegerRowsOfBlock = 128;            // rows kept in cache for all panels
constexpr std::int64_t kFewRows8 = 1, kFewRows4 = 4;         // up to here vectors are faster than tiles
constexpr std::int64_t kFewRowsTwoLevel = 1;                   // the same for two-level integers
constexpr std::int64_t kIntegerTilesOfK = 16;                // 32 KiB of a panel, in L1
constexpr std::int64_t kIntegerLeftBytes = 768 << 10;        // activations kept in L2

#include "vectors.inc.h"
#include "simd.inc.h"
#include "bfloat16.inc.h"
#include "float16.inc.h"
#include "elements.inc.h"
#include "ahead.inc.h"
#include "tiles.inc.h"
#include "norm.inc.h"
#include "sum.inc.h"
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
#include "integer_two_level.inc.h"
#include "integer_rotation.inc.h"
#include "integer_pack.inc.h"
#include "block_rows.inc.h"
#include "integer_rows.inc.h"
#include "integer_product.inc.h"
#include "integer_finish.inc.h"
#if defined(OCTAVO_HAS_AVX2)
#include "integer_panels.inc.h"
#include "integer_avx2.inc.h"
#elif defined(OCTAVO_HAS_AVX512) && !defined(OCTAVO_HAS_AMX)
#include "integer_panels.inc.h"
#include "integer_units_avx512.inc.h"
#include "integer_avx512.inc.h"
#else
#include "integer_dot.inc.h"
#endif
#if defined(OCTAVO_HAS_AMX)
#include "integer_tiles.inc.h"
#endif
#include "block_codes.inc.h"
#include "block_expand.inc.h"
#include "block_dots.inc.h"
#include "block_product.inc.h"
#include "integer_multiply.inc.h"
#include "integer_linear.inc.h"
#include "integer_experts.inc.h"
#include "attention_parts.inc.h"
#include "softmax.inc.h"
#include "attention_heads.inc.h"
#if defined(OCTAVO_HAS_AVX512) && !defined(OCTAVO_HAS_AMX)
#include "attention_integers.inc.h"
#endif
#include "attention_int8.inc.h"
#include "attention_write.inc.h"
#include "attention_rows.inc.h"
#include "attention_span.inc.h"
#include "attention_weights.inc.h"
#include "attention_values.inc.h"
#if defined(OCTAVO_HAS_AVX512) && !defined(OCTAVO_HAS_AMX)
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

template <class Element>
constexpr IntegerOps kIntegerOps = {
    .linear = integer_linear<Element>,
    .argmax = integer_argmax<Element>,
    .mlp = integer_mlp<Element>,
    .expert_rows = expert_rows_by<IntegerExperts<Element>>,
    .moe = moe_by<IntegerExperts<Element>>,
};

}  // namespace
}  // namespace octavo::OCTAVO_LEVEL

namespace octavo {

const Ops OCTAVO_JOIN(ops_, OCTAVO_LEVEL) = {
    .name = OCTAVO_TEXT(OCTAVO_LEVEL),
    .bfloat16 =
        {
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
            .rms_norm = OCTAVO_LEVEL::rms_norm<bf16>,
            .part_squares = OCTAVO_LEVEL::part_squares<bf16>,
            .scale_parts = OCTAVO_LEVEL::scale_parts<bf16>,
            .attention = OCTAVO_LEVEL::attention,
            .gated_delta = OCTAVO_LEVEL::gated_delta,
            .short_conv = OCTAVO_LEVEL::short_conv,
            .state_space = OCTAVO_LEVEL::state_space,
            .norm_groups = OCTAVO_LEVEL::norm_groups,
            .gate = OCTAVO_LEVEL::gate,
        },
    .float16 = &OCTAVO_LEVEL::kFloat16Ops,
    .float32 = &OCTAVO_JOIN(float32_ops_, OCTAVO_SHARED_LEVEL),
    .integers_bfloat16 = OCTAVO_LEVEL::kIntegerOps<bf16>,
    .integers_float16 = OCTAVO_LEVEL::kIntegerOps<f16>,
    .quantize = OCTAVO_LEVEL::quantize,
    .pack_integers = OCTAVO_LEVEL::pack_integers,
    .sum = OCTAVO_LEVEL::sum,
    .draw = &OCTAVO_JOIN(draw_ops_, OCTAVO_SHARED_LEVEL),
};

}  // namespace octavo
