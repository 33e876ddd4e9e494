// Vectorized functions of sampling, compiled per level by a file draw_<level>.cpp, which defines OCTAVO_LEVEL. Vectors
// are exactly as wide as the level's registers, since 32-bit to 64-bit products work within lanes.
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "draw.h"

#define OCTAVO_JOIN_(a, b) a##b
#define OCTAVO_JOIN(a, b) OCTAVO_JOIN_(a, b)

namespace octavo {
namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr int kWordLanes = kRegisterBytes / 4, kDoubleLanes = kRegisterBytes / 8;

typedef std::uint32_t Words __attribute__((vector_size(kRegisterBytes)));
typedef std::int32_t SignedWords __attribute__((vector_size(kRegisterBytes)));
typedef std::uint64_t WideWords __attribute__((vector_size(kRegisterBytes)));
typedef float Floats __attribute__((vector_size(kRegisterBytes)));
typedef double Doubles __attribute__((vector_size(kRegisterBytes)));
typedef float HalfFloats __attribute__((vector_size(kRegisterBytes / 2)));

inline std::int64_t least_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Products of the low halves of 64-bit lanes. GCC 12 would emit full 64-bit multiplies, at three times the cost.
inline WideWords multiply_low(WideWords a, WideWords b) {
#if defined(__AVX512F__)
  return (WideWords)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);  // without a mask GCC 12 warns of its header
#elif defined(__AVX2__)
  return (WideWords)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Philox4x32-10 of counters (block, output_index, 0, 0), one block per 64-bit lane of two vectors whose rounds are
// interleaved: words of ids 4 * block + 0 ... 3, in the low halves; the high halves are garbage that no product reads.
// The first two rounds are specialized: in the first the second product is zero, in the second the first product is the
// same for all blocks.
inline void random_words(const NoiseKey& key, const WideWords* block, WideWords (*words)[2]) {
  constexpr std::uint32_t kStep0 = 0x9E3779B9u, kStep1 = 0xBB67AE85u;
  const WideWords multiplier0 = WideWords{} + 0xD2511F53u, multiplier1 = WideWords{} + 0xCD9E8D57u;
  std::uint32_t key0 = key.seed_low, key1 = key.seed_high;
  const std::uint64_t same = std::uint64_t{0xD2511F53u} * (key.output_index ^ key0);
  WideWords c0[2], c1[2], c2[2], c3[2];
  for (int i = 0; i < 2; ++i) {
    const WideWords first = multiply_low(block[i], multiplier0);
    c1[i] = multiply_low(first >> 32 ^ key1, multiplier1);
    c0[i] = c1[i] >> 32 ^ (key0 + kStep0), c2[i] = first ^ (same >> 32 ^ (key1 + kStep1)), c3[i] = WideWords{} + same;
  }
  key0 += kStep0, key1 += kStep1;
  for (int round = 2; round < 10; ++round) {
    key0 += kStep0, key1 += kStep1;
    for (int i = 0; i < 2; ++i) {
      const WideWords product0 = multiply_low(c0[i], multiplier0), product1 = multiply_low(c2[i], multiplier1);
      c0[i] = product1 >> 32 ^ (c1[i] ^ key0), c1[i] = product1;
      c2[i] = product0 >> 32 ^ (c3[i] ^ key1), c3[i] = product0;
    }
  }
  for (int i = 0; i < 2; ++i) words[0][i] = c0[i], words[1][i] = c1[i], words[2][i] = c2[i], words[3][i] = c3[i];
}

inline bool any_lane(SignedWords is_true) {
  std::uint64_t parts[kRegisterBytes / 8], any = 0;
  __builtin_memcpy(parts, &is_true, sizeof parts);
  for (std::uint64_t part : parts) any |= part;
  return any != 0;
}

// Computes all words of a slice; returns whether one is at least `least`. Little-endian, as all levels are.
inline bool words_of_slice(const NoiseKey& key, std::int64_t slice, std::uint32_t least, std::uint32_t* words) {
  SignedWords is_found = {};
  WideWords even_lanes;
  for (int lane = 0; lane < kDoubleLanes; ++lane) even_lanes[lane] = static_cast<std::uint64_t>(2 * lane);
  for (int counter = 0; counter < 16; counter += kWordLanes) {
    const WideWords even = even_lanes + static_cast<std::uint64_t>(slice * 16 + counter), blocks[2] = {even, even + 1};
    WideWords all[4][2];
    random_words(key, blocks, all);
    for (int i = 0; i < 4; ++i) {
      const Words now = (Words)((all[i][0] & 0xffffffffu) | all[i][1] << 32);
      is_found |= now >= least;
      __builtin_memcpy(words + i * 16 + counter, &now, sizeof now);
    }
  }
  return any_lane(is_found);
}

std::int64_t find_slice(const NoiseKey& key, const float* maxima, std::int64_t first, std::int64_t end,
                               const Screen& screen, std::uint32_t* words) {
  for (std::int64_t slice = first; slice < end; ++slice) {
    const std::uint64_t least = least_word(screen, maxima[slice]);
    if (least >> 32) continue;
    if (words_of_slice(key, slice, static_cast<std::uint32_t>(least), words)) return slice;
  }
  return end;
}

inline float largest_of_slice(const float* logits, std::int64_t count) {
  float best = -__builtin_inff(), not_a_number = 0.0f;
  std::int64_t at = 0;
  if (count == kSliceIds) {
    Floats values = Floats{} - __builtin_inff();
    SignedWords is_nan = {};
    for (; at < count; at += kWordLanes) {
      Floats now;
      __builtin_memcpy(&now, logits + at, sizeof now);
      is_nan |= now != now;
      values = now > values ? now : values;
    }
    if (any_lane(is_nan)) return __builtin_nanf("");
    for (int lane = 0; lane < kWordLanes; ++lane) best = values[lane] > best ? values[lane] : best;
  }
  for (; at < count; ++at) {
    if (logits[at] != logits[at]) not_a_number = __builtin_nanf("");
    best = logits[at] > best ? logits[at] : best;
  }
  return best + not_a_number;
}

void slice_maxima(const float* logits, std::int64_t count, float* maxima) {
  for (std::int64_t at = 0; at < count; at += kSliceIds)
    maxima[at / kSliceIds] = largest_of_slice(logits + at, least_of(kSliceIds, count - at));
}

// 2^x for x <= 0, by a polynomial accurate to 2^-44: Taylor, degree 11, |f| <= 1/2.
inline Doubles power_of_two_in_double(Doubles x) {
  const Doubles least = Doubles{} - 100.0;
  x = x > least ? x : least;
  const Doubles shifted = x + 6755399441055744.0;  // 1.5 * 2^52: leaves the nearest integer in the lowest bits
  const Doubles f = x - (shifted - 6755399441055744.0);
  Doubles p = Doubles{} + 4.4455382718708116e-10;
  p = p * f + 7.0549116208011233e-09;
  p = p * f + 1.0178086009239700e-07;
  p = p * f + 1.3215486790144309e-06;
  p = p * f + 1.5252733804059841e-05;
  p = p * f + 1.5403530393381609e-04;
  p = p * f + 1.3333558146428443e-03;
  p = p * f + 9.6181291076284772e-03;
  p = p * f + 5.5504108664821580e-02;
  p = p * f + 2.4022650695910071e-01;
  p = p * f + 6.9314718055994531e-01;
  p = p * f + 1.0;
  return (Doubles)((WideWords)p + ((WideWords)shifted << 52));
}

double sum_of_powers(const float* logits, std::int64_t count, double largest, double scale) {
  Doubles sum = {};
  const auto add = [&](HalfFloats now) {
    sum += power_of_two_in_double((__builtin_convertvector(now, Doubles) - largest) * scale);
  };
  HalfFloats now;
  std::int64_t at = 0;
  for (; at + kDoubleLanes <= count; at += kDoubleLanes) {
    __builtin_memcpy(&now, logits + at, sizeof now);
    add(now);
  }
  if (at < count) {
    now = HalfFloats{} - __builtin_inff();
    __builtin_memcpy(&now, logits + at, static_cast<std::size_t>(count - at) * sizeof(float));
    add(now);
  }
  double total = 0.0;
  for (int lane = 0; lane < kDoubleLanes; ++lane) total += sum[lane];
  return total;
}

}  // namespace

const DrawOps OCTAVO_JOIN(draw_ops_, OCTAVO_LEVEL) = {slice_maxima, sum_of_powers, find_slice};

}  // namespace octavo
