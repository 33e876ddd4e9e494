#include "draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

namespace octavo {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kOut = -std::numeric_limits<float>::infinity();

// Error of a score against the definition. Logit and temperature contribute the same bits, since subtraction and
// division are correctly rounded. Noise is -log(-log u), at most 22.9: a relative error e of the inner logarithm
// becomes an error e of the outer, whose own error is e * 22.9; the sum is rounded, and at most 32 where it matters.
// With logarithms accurate to 50 ulp, e = 50 * 2^-52, both sides together are off by less than 2^-41.
constexpr double kScoreError = 0x1p-40;
constexpr double kScreenError = 0x1p-30;  // error of an estimated score, including kScoreError

// The definition counts mass in units of 2^-44 of the most likely token's, rounded down; here each mass is off by at
// most one unit and 2^-42 of itself. See `Filters`.
constexpr double kMassUnit = 0x1p-44, kMassError = 0x1p-40;
constexpr double kLeastPower = -45.0;  // 2^-45 has no mass by the definition

// By how much noise must lift a token (its grade), and a word too small for that: (word + 1/2) / 2^32 <
// exp(-exp(-grade)).
struct Grades {
  std::uint32_t words[kNumGrades];

  Grades() {
    for (int grade = 0; grade < kNumGrades; ++grade) {
      const double uniform = std::exp(-std::exp(-(kLeastGrade + grade / kGradesPerUnit)));
      words[grade] = static_cast<std::uint32_t>(std::max(0.0, std::floor(uniform * 0x1p32) - 2.0));
    }
  }
};

const Grades& grades() {
  static const Grades made;
  return made;
}

double gumbel(std::uint32_t word) { return -std::log(-std::log((word + 0.5) * 0x1p-32)); }

// One row's logits and its state.
struct Row {
  const DrawRow* wants;
  const float* logits;
  const float* maxima;  // per slice
  std::int64_t vocab_size;
  float largest = kOut;
  std::int64_t largest_id = 0;
  float least = kOut;  // the lowest logit that the filters keep
  bool is_sure = true;
  double start = 0.0;  // a score that some token reaches

  std::int64_t num_slices() const { return (vocab_size + kSliceIds - 1) / kSliceIds; }
  bool is_greedy() const { return wants->temperature == 0.0; }
  bool has_top_k() const { return wants->top_k < vocab_size; }
  bool has_top_p() const { return wants->top_p < 1.0; }
  bool is_drawn() const { return std::isfinite(largest) && !is_greedy() && is_sure; }
  double relative(float logit) const {
    return (static_cast<double>(logit) - static_cast<double>(largest)) / wants->temperature;
  }
  bool keeps(float logit) const { return logit >= least && relative(logit) >= wants->log_min_p; }
  double powers_scale() const { return 1.4426950408889634 / wants->temperature; }  // base 2 instead of e

  void find_largest() {
    for (std::int64_t slice = 0; slice < num_slices(); ++slice) {
      if (maxima[slice] > largest) largest = maxima[slice], largest_id = slice * kSliceIds;
      if (std::isnan(maxima[slice])) {
        largest = maxima[slice];
        return;
      }
    }
    if (!std::isfinite(largest)) return;
    while (logits[largest_id] != largest) ++largest_id;
    is_sure = is_greedy() || std::isfinite(powers_scale());
  }

  // Appends all finite logits of at least `bound`.
  void collect(float bound, std::vector<float>& found) const {
    for (std::int64_t slice = 0; slice < num_slices(); ++slice) {
      if (!(maxima[slice] >= bound)) continue;
      for (std::int64_t id = slice * kSliceIds; id < std::min(vocab_size, (slice + 1) * kSliceIds); ++id)
        if (logits[id] >= bound && logits[id] > kOut) found.push_back(logits[id]);
    }
  }

  // A bound that at least `count` logits reach: the `count`-th largest slice maximum.
  float bound_of(std::int64_t count) const {
    if (count > num_slices()) return kOut;
    std::vector<float> sorted(maxima, maxima + num_slices());
    std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<float>());
    return sorted[static_cast<std::size_t>(count - 1)];
  }
};

// Top-k and top-p of one row: raises `least`, or finds that the definition has to decide.
class Filters {
 public:
  // `total` is the mass of all logits, needed for top-p without top-k. The most likely token has mass 1.
  Filters(const DrawOps& ops, Row& row, double total) : ops_(ops), row_(row), total_(total) {}

  void apply() {
    if (row_.has_top_k()) keep_top_k();
    if (row_.has_top_p()) keep_top_p();
  }

 private:
  void keep_top_k() {
    const std::int64_t count = row_.wants->top_k;
    row_.collect(row_.bound_of(count), kept_);
    if (count > static_cast<std::int64_t>(kept_.size())) return;  // the others are -inf
    std::nth_element(kept_.begin(), kept_.begin() + (count - 1), kept_.end(), std::greater<float>());
    row_.least = kept_[static_cast<std::size_t>(count - 1)];
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [this](float logit) { return logit < row_.least; }), kept_.end());
  }

  void keep_top_p() {
    double num_tokens = static_cast<double>(row_.vocab_size);
    if (row_.has_top_k()) {
      total_ = mass_of(0, kept_.size()), num_tokens = static_cast<double>(kept_.size());
    } else {
      collect_top_p(error(num_tokens));
    }
    decide(error(num_tokens));
  }

  double wanted() const { return row_.wants->top_p * total_; }
  // Joint error bound of `wanted` and of the mass above a token.
  double error(double num_tokens) const { return (2.0 * num_tokens + 4.0) * kMassUnit + total_ * kMassError; }

  double mass_of(std::size_t first, std::size_t end) const {
    return ops_.sum_of_powers(kept_.data() + first, static_cast<std::int64_t>(end - first), row_.largest, row_.powers_scale());
  }

  // Collects the most likely tokens up to the wanted mass; for a flat row, all tokens with any mass.
  void collect_top_p(double slack) {
    for (std::int64_t num_slices = 64;; num_slices *= 8) {
      const bool is_last = num_slices / 8 >= row_.num_slices();
      kept_.clear();
      row_.collect(is_last ? least_of_weight() : row_.bound_of(std::min(num_slices, row_.num_slices())), kept_);
      if (is_last || mass_of(0, kept_.size()) > wanted() + slack) return;
    }
  }

  // Every sum by the definition is within `slack` of the sum here. The last logit certain to be kept is the threshold
  // if the next lower one is certain to be dropped. The most likely token has nothing above it and is always kept.
  void decide(double slack) {
    const double surely = std::max(kMassUnit / 2, wanted() - slack);
    std::size_t first = 0, end = kept_.size();
    double above = 0.0;  // mass above [first, end)
    while (end - first > 1) {
      const std::size_t middle = first + (end - first) / 2;
      std::nth_element(at(first), at(middle), at(end), std::greater<float>());
      const double upper = mass_of(first, middle);
      if (above + upper < surely) {
        above += upper, first = middle;
      } else {
        end = middle;
      }
    }
    const auto num_equal = static_cast<double>(std::count(at(first), kept_.end(), kept_[first]));
    row_.is_sure = above + num_equal * mass_of(first, first + 1) >= wanted() + slack;
    row_.least = std::max(row_.least, kept_[first]);
  }

  // The lowest logit that may have any mass.
  float least_of_weight() const {
    return static_cast<float>(std::max<double>(std::numeric_limits<float>::lowest(),
                                               row_.largest + kLeastPower / row_.powers_scale()));
  }

  std::vector<float>::iterator at(std::size_t place) { return kept_.begin() + static_cast<std::ptrdiff_t>(place); }

  const DrawOps& ops_;
  Row& row_;
  double total_;
  std::vector<float> kept_;
};

// The best token of some slices, and the best score of the rest.
struct Lead {
  double score = -kInfinity, next = -kInfinity;
  std::int64_t id = 0;

  void meet(double other, std::int64_t other_id) {
    if (other > score) {
      next = score, score = other, id = other_id;
    } else {
      next = std::max(next, other);
    }
  }
  void meet(const Lead& other) {
    meet(other.score, other.id);
    next = std::max(next, other.next);
  }
  bool is_sure() const { return score - next > kScoreError; }
};

Screen screen_of(const Row& row, double best) {
  return {row.largest, 1.0 / row.wants->temperature, best, row.least, grades().words};
}

// The score of the most likely token: a lower bound on the best score from the start.
double first_score(const DrawOps& ops, const Row& row) {
  alignas(64) std::uint32_t words[kSliceIds];
  const std::int64_t slice = row.largest_id / kSliceIds, i = row.largest_id % kSliceIds;
  ops.find_slice(row.wants->key, row.maxima, slice, slice + 1, screen_of(row, -kInfinity), words);  // any noise will do
  return gumbel(words[i % 4 * 16 + i / 4]);
}

// The best of slices [first, end). The screen passes every token whose score could lie within the error of the best.
Lead find_lead(const DrawOps& ops, const Row& row, std::int64_t first, std::int64_t end) {
  Lead lead;
  alignas(64) std::uint32_t words[kSliceIds];
  double best = row.start;
  for (std::int64_t slice = first;; ++slice) {
    const Screen screen = screen_of(row, best - kScreenError);
    slice = ops.find_slice(row.wants->key, row.maxima, slice, end, screen, words);
    if (slice == end) return lead;
    const std::uint64_t least = least_word(screen, row.maxima[slice]);
    for (std::int64_t i = 0; i < kSliceIds; ++i) {
      const std::int64_t id = slice * kSliceIds + i / 16 + i % 16 * 4;
      if (words[i] < least || id >= row.vocab_size || !row.keeps(row.logits[id])) continue;
      lead.meet(row.relative(row.logits[id]) + gumbel(words[i]), id);
    }
    best = std::max(best, lead.score);
  }
}

// How slices are split between threads.
struct Cut {
  std::int64_t num_slices, num_parts;

  std::int64_t begin(std::int64_t part) const { return num_slices * part / num_parts; }
};

// About eight chunks per thread for balance, of at least 64 slices each.
Cut cut_rows(const DrawArgs& args, int num_threads) {
  const std::int64_t num_slices = (args.vocab_size + kSliceIds - 1) / kSliceIds;
  const std::int64_t wanted = std::max<std::int64_t>(1, 8 * num_threads / std::max<std::int64_t>(1, args.num_rows));
  return {num_slices, std::clamp<std::int64_t>(num_slices / 64, 1, wanted)};
}

}  // namespace

void draw(const DrawOps& ops, const DrawArgs& args, Pool& pool) {
  const Cut cut = cut_rows(args, pool.num_threads());
  const std::int64_t num_chunks = args.num_rows * cut.num_parts;
  std::vector<float> maxima(static_cast<std::size_t>(args.num_rows * cut.num_slices));
  std::vector<Row> rows;
  for (std::int64_t row = 0; row < args.num_rows; ++row)
    rows.push_back({args.rows + row, args.logits + row * args.vocab_size, maxima.data() + row * cut.num_slices, args.vocab_size});

  // Calls body(row, chunk, first slice, end) for all chunks of all rows.
  const auto run_parts = [&](const auto& body) {
    pool.run(num_chunks, [&](std::int64_t chunk) {
      const std::int64_t part = chunk % cut.num_parts;
      body(rows[static_cast<std::size_t>(chunk / cut.num_parts)], static_cast<std::size_t>(chunk), cut.begin(part), cut.begin(part + 1));
    });
  };
  const auto logits_of = [&](std::int64_t first, std::int64_t end) {
    return std::min(args.vocab_size, end * kSliceIds) - first * kSliceIds;
  };

  run_parts([&](const Row& row, std::size_t, std::int64_t first, std::int64_t end) {
    const std::int64_t of_row = row.maxima - maxima.data();
    ops.slice_maxima(row.logits + first * kSliceIds, logits_of(first, end), maxima.data() + of_row + first);
  });
  std::vector<double> totals(static_cast<std::size_t>(num_chunks));
  const auto for_rows = [&](const auto& body) {
    pool.run(args.num_rows, [&](std::int64_t row) { body(rows[static_cast<std::size_t>(row)], static_cast<std::size_t>(row * cut.num_parts)); });
  };
  for_rows([](Row& row, std::size_t) { row.find_largest(); });
  run_parts([&](const Row& row, std::size_t chunk, std::int64_t first, std::int64_t end) {
    if (row.is_drawn() && row.has_top_p() && !row.has_top_k())
      totals[chunk] = ops.sum_of_powers(row.logits + first * kSliceIds, logits_of(first, end), row.largest, row.powers_scale());
  });
  for_rows([&](Row& row, std::size_t chunk) {
    if (!row.is_drawn()) return;
    Filters(ops, row, std::accumulate(totals.begin() + chunk, totals.begin() + chunk + cut.num_parts, 0.0)).apply();
    row.start = first_score(ops, row);
  });
  std::vector<Lead> leads(static_cast<std::size_t>(num_chunks));
  run_parts([&](const Row& row, std::size_t chunk, std::int64_t first, std::int64_t end) {
    if (row.is_drawn()) leads[chunk] = find_lead(ops, row, first, end);
  });
  for_rows([&](Row& row, std::size_t chunk) {
    const auto at = &row - rows.data();
    for (std::int64_t part = 1; part < cut.num_parts; ++part) leads[chunk].meet(leads[chunk + part]);
    args.largest[at] = row.largest;
    args.token_ids[at] = !row.is_drawn() ? row.largest_id : leads[chunk].id;
    if (!row.is_sure || (row.is_drawn() && !leads[chunk].is_sure())) args.token_ids[at] = kUnsure;
  });
}

}  // namespace octavo
