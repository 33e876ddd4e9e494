// Sampling: draws a token for each row of logits, as a function of that row, its parameters and its noise alone.
//
// sampling/draw.py defines the result, with torch's logarithms and exponentials. Those used here have bounded
// errors: a row is decided here if no error within the bound could change its token, else it is left to the definition.
//
// Legend: S = rows, V = vocabulary.
#pragma once

#include <cstdint>

#include "pool.h"

namespace octavo {

constexpr std::int64_t kSliceIds = 64;  // ids screened together: 16 Philox counters

// Key of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011), with counter (id / 4, output_index, 0, 0).
struct NoiseKey {
  std::uint32_t seed_low, seed_high, output_index;
};

// Sampling parameters of a row. Filled in by Python.
struct DrawRow {
  double temperature;  // 0: argmax only; the fields below are ignored
  double top_p;        // 1: off
  double log_min_p;    // -infinity: off
  std::int64_t top_k;  // V or more: off
  NoiseKey key;
  std::uint32_t unused;
};

struct DrawArgs {
  const float* logits;  // [S, V]
  std::int64_t num_rows, vocab_size;
  const DrawRow* rows;      // [S]
  std::int64_t* token_ids;  // [S]; kUnsure: left to the definition; undefined where `largest` is not finite
  float* largest;           // [S]; NaN if any logit is
};

constexpr std::int64_t kUnsure = -1;

// Filters noise: only what could lift the best token of a slice to `best` is computed.
struct Screen {
  double largest, per_temperature;  // the row's largest logit; 1 / temperature
  double best;                      // a score that some token reaches
  float least;                      // logits below it are filtered out
  const std::uint32_t* words;       // [kNumGrades] per grade of missing noise, a word too small to supply it
};

constexpr double kLeastGrade = -4.0, kGradesPerUnit = 8.0;  // no noise is below -3.14
constexpr double kMaxNoise = 22.9;                         // no noise is above 22.88
constexpr int kNumGrades = 216;                             // from -4 to 22.9

// The lowest word whose noise may lift a logit to `best`; above 32 bits if none can.
static inline std::uint64_t least_word(const Screen& screen, float logit) {
  const double lacking = screen.best - (static_cast<double>(logit) - screen.largest) * screen.per_temperature;
  if (!(logit >= screen.least) || !(lacking < kMaxNoise)) return std::uint64_t{1} << 32;
  return lacking < kLeastGrade ? 0 : screen.words[static_cast<int>((lacking - kLeastGrade) * kGradesPerUnit)];
}

// Vectorized functions of sampling: one table per level.
struct DrawOps {
  // The largest logit of each slice of logits [count]; NaN if any is.
  void (*slice_maxima)(const float* logits, std::int64_t count, float* maxima);
  // The sum of 2^((logit - largest) * scale), each term accurate to 2^-42 of itself, and to 2^-100.
  double (*sum_of_powers)(const float* logits, std::int64_t count, double largest, double scale);
  // The first slice in [first, end) with noise that passes the screen; its words go to [4 lanes][16 counters].
  std::int64_t (*find_slice)(const NoiseKey& key, const float* maxima, std::int64_t first, std::int64_t end,
                             const Screen& screen, std::uint32_t* words);
};

extern const DrawOps draw_ops_portable;
#if defined(__x86_64__)
extern const DrawOps draw_ops_avx2, draw_ops_avx512;
#endif

void draw(const DrawOps& ops, const DrawArgs& args, Pool& pool);

}  // namespace octavo
