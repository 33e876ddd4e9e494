// Draws: a token for each row of logits, as a function of that row, its parameters and its noise alone.
//
// What a draw is, is defined in sampling/backend.py, by torch's logarithms and exponentials. Here they are others, whose
// errors are bounded: a row is answered where no error within the bound could change its token, else it is handed back.
//
// Legend: S = rows, V = vocabulary.
#pragma once

#include <cstdint>

#include "pool.h"

namespace octavo {

constexpr std::int64_t kSliceIds = 64;  // ids that are taken or left together: 16 counters of Philox

// Whose noise: that of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011), with counter (id / 4, output_index, 0, 0).
struct NoiseKey {
  std::uint32_t seed_low, seed_high, output_index;
};

// What a row wants. Python fills these.
struct DrawRow {
  double temperature;  // 0: the largest logit, and nothing below counts
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
  std::int64_t* token_ids;  // [S]; kUnsure where the definition has to decide; anything where `largest` is not finite
  float* largest;           // [S]; NaN where any logit is
};

constexpr std::int64_t kUnsure = -1;

// Which noise is worth a look: that with which the best token of a slice would reach `best`.
struct Screen {
  double largest, per_temperature;  // of the row's logits; 1 / temperature
  double best;                      // a score that some token has
  float least;                      // logits below it are out
  const std::uint32_t* words;       // [kNumGrades] for each grade of lacking noise, a word that is too small for it
};

constexpr double kLeastGrade = -4.0, kGradesPerUnit = 8.0;  // no noise is below -3.14
constexpr double kMaxNoise = 22.9;                         // no noise is above 22.88
constexpr int kNumGrades = 216;                             // from -4 to 22.9

// The least word whose noise may bring a logit up to `best`, or more than any word where none does.
static inline std::uint64_t least_word(const Screen& screen, float logit) {
  const double lacking = screen.best - (static_cast<double>(logit) - screen.largest) * screen.per_temperature;
  if (!(logit >= screen.least) || !(lacking < kMaxNoise)) return std::uint64_t{1} << 32;
  return lacking < kLeastGrade ? 0 : screen.words[static_cast<int>((lacking - kLeastGrade) * kGradesPerUnit)];
}

// What is wanted of vectors: a table of one level.
struct DrawOps {
  // The largest of each slice of logits [count]; NaN where any is.
  void (*slice_maxima)(const float* logits, std::int64_t count, float* maxima);
  // The sum of 2^((logit - largest) * scale), each term to a 2^-42th of it, and to 2^-100.
  double (*sum_of_powers)(const float* logits, std::int64_t count, double largest, double scale);
  // The first slice from `first` on, before `end`, that has noise worth a look; its words to [4 lanes][16 counters].
  std::int64_t (*find_slice)(const NoiseKey& key, const float* maxima, std::int64_t first, std::int64_t end,
                             const Screen& screen, std::uint32_t* words);
};

extern const DrawOps draw_ops_portable;
#if defined(__x86_64__)
extern const DrawOps draw_ops_avx2, draw_ops_avx512;
#endif

void draw(const DrawOps& ops, const DrawArgs& args, Pool& pool);

}  // namespace octavo
