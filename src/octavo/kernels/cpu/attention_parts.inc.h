// The operand layouts of attention. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A right part is 32 x 32 elements: [2 tiles][16 pairs of k][16 columns][2] in bf16, as matrix tiles read them
// (attention_parts_bfloat16.inc.h), and [32 k][32 columns] in float16 and float32 (attention_parts_dense.inc.h). Keys
// are right parts of k = element of the head, column = position; values of k = position, column = element of the head. A
// left part is [16 rows][32 k], of queries or of weights. A result is [row tiles][2][16 rows][16 columns] float32. Two
// levels have products of their own: AVX2 with left parts in float32 (attention_parts_avx2.inc.h), AVX-512 without
// matrix tiles (attention_parts_avx512.inc.h).

constexpr std::int64_t kPart = 32;
constexpr std::int64_t kRightElements = kPart * kPart;
constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kLeftElements = kTileRows * kPart;
constexpr std::int64_t kPairElements = 2 * kResultElements;  // of a result, per row tile

static inline std::int64_t right_index(bf16, std::int64_t k, std::int64_t column) {
  return column / 16 * kTileElements + k / 2 * 32 + column % 16 * 2 + k % 2;
}
static inline std::int64_t right_index(f16, std::int64_t k, std::int64_t column) { return k * kPart + column; }
static inline std::int64_t right_index(float, std::int64_t k, std::int64_t column) { return k * kPart + column; }

#if defined(OCTAVO_HAS_AVX2)
#include "attention_parts_avx2.inc.h"
#elif defined(OCTAVO_HAS_AVX512) && !defined(OCTAVO_HAS_AMX)
#include "attention_parts_avx512.inc.h"
#else
#define OCTAVO_SIMPLE_PARTS  // products of their own for each layout

#if defined(OCTAVO_DENSE)
template <class Element>
using Left = float;
#else
template <class Element>
using Left = Element;
#endif
constexpr bool kMultipliesBytes = false, kMultipliesIntegers = false;
template <class Element>
using ByteOrder = Element;  // in the order of widened elements

#endif

#if defined(OCTAVO_DENSE)
#include "attention_parts_dense.inc.h"
#else
#include "attention_parts_bfloat16.inc.h"
#endif
