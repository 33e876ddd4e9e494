// Draws under address and undefined-behavior sanitizers, at every level that this machine has: odd vocabularies in
// buffers of exactly the size that they need, rows with nothing finite in them, and tokens beside a plain draw in
// doubles. `make sanitize` runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "draw.h"
#include "levels.h"
#include "numbers.h"

using namespace octavo;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Philox4x32-10 of one counter, as its paper has it.
struct Philox {
  std::uint32_t x[4];

  Philox(const NoiseKey& key, std::uint32_t counter) : x{counter, key.output_index, 0, 0} {
    std::uint32_t low = key.seed_low, high = key.seed_high;
    for (int round = 0; round < 10; ++round, low += 0x9E3779B9u, high += 0xBB67AE85u) {
      const std::uint64_t a = std::uint64_t{0xD2511F53u} * x[0], b = std::uint64_t{0xCD9E8D57u} * x[2];
      const std::uint32_t next[4] = {static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ low, static_cast<std::uint32_t>(b),
                                     static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ high, static_cast<std::uint32_t>(a)};
      std::copy(next, next + 4, x);
    }
  }
};

double noise(const NoiseKey& key, std::int64_t id) {
  const double uniform = (Philox(key, static_cast<std::uint32_t>(id / 4)).x[id % 4] + 0.5) * 0x1p-32;
  return -std::log(-std::log(uniform));
}

// A row and what it asks for.
struct Case {
  std::vector<float> logits;
  DrawRow wants;
  double greatest;  // of the logits

  double relative(float logit) const { return (logit - greatest) / wants.temperature; }

  // Which tokens top-k, top-p and min-p leave.
  std::vector<bool> kept() const {
    std::vector<float> sorted = logits;
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    const auto size = static_cast<std::int64_t>(sorted.size());
    const float least = sorted[static_cast<std::size_t>(std::min(wants.top_k, size) - 1)];
    std::vector<double> above{0.0};  // the mass of so many of the greatest
    for (const float logit : sorted) above.push_back(above.back() + (logit >= least ? std::exp(relative(logit)) : 0.0));
    std::vector<bool> result;
    for (const float logit : logits) {
      const auto num_greater = std::lower_bound(sorted.begin(), sorted.end(), logit, std::greater<float>()) - sorted.begin();
      const bool is_in_top_p = wants.top_p == 1.0 || above[num_greater] < wants.top_p * above.back();
      result.push_back(logit >= least && is_in_top_p && relative(logit) >= wants.log_min_p);
    }
    return result;
  }

  std::int64_t token() const {
    if (wants.temperature == 0.0) return std::max_element(logits.begin(), logits.end()) - logits.begin();
    const std::vector<bool> is_kept = kept();
    std::int64_t best = 0;
    double score = -kInfinity;
    for (std::int64_t id = 0; id < static_cast<std::int64_t>(logits.size()); ++id) {
      const double other = is_kept[id] ? relative(logits[id]) + noise(wants.key, id) : -kInfinity;
      if (other > score) score = other, best = id;
    }
    return best;
  }
};

Case make_case(std::int64_t vocab_size, std::mt19937& source) {
  const float spread = std::exp(3.0f * random_floats(1, source)[0]) * 4.0f;
  Case made{random_floats(vocab_size, source), {}, spread};
  for (float& logit : made.logits) logit = source() % 9 == 0 ? -kInfinity : logit * spread;
  made.logits[random_below(vocab_size, source)] = spread;
  const double temperatures[] = {0.0, 0.3, 1.0, 2.5}, top_ps[] = {1.0, 0.9, 0.3, 1e-9}, min_ps[] = {0.0, 0.01, 0.4};
  const std::int64_t top_ks[] = {vocab_size, 1, 1 + random_below(vocab_size, source)};
  made.wants = {temperatures[source() % 4], top_ps[source() % 4], std::log(min_ps[source() % 3]), top_ks[source() % 3],
                {static_cast<std::uint32_t>(source()), static_cast<std::uint32_t>(source()), static_cast<std::uint32_t>(source() % 99)}, 0};
  return made;
}

// Counts wrong tokens of some rows in one call, and those that were left to the definition.
std::pair<int, int> draw_cases(const DrawOps& ops, Pool& pool, const std::vector<Case>& cases) {
  const auto num_rows = static_cast<std::int64_t>(cases.size()), vocab_size = static_cast<std::int64_t>(cases[0].logits.size());
  std::vector<float> logits, largest(num_rows);
  std::vector<DrawRow> rows;
  std::vector<std::int64_t> token_ids(num_rows);
  for (const Case& each : cases) logits.insert(logits.end(), each.logits.begin(), each.logits.end()), rows.push_back(each.wants);
  draw(ops, {logits.data(), num_rows, vocab_size, rows.data(), token_ids.data(), largest.data()}, pool);
  int num_wrong = 0, num_unsure = 0;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    num_unsure += token_ids[row] == kUnsure;
    num_wrong += token_ids[row] != kUnsure && token_ids[row] != cases[row].token();
    num_wrong += largest[row] != cases[row].greatest;
  }
  return {num_wrong, num_unsure};
}

// A row of one value, and one NaN in it perhaps: `largest` says what is wrong.
bool tells(const DrawOps& ops, Pool& pool, float value, bool has_nan, std::int64_t vocab_size) {
  std::vector<float> logits(vocab_size, value);
  if (has_nan) logits[vocab_size / 2] = std::nanf("");
  const DrawRow wants{1.0, 0.9, -kInfinity, 5, {1, 2, 3}, 0};
  std::int64_t token_id;
  float largest;
  draw(ops, {logits.data(), 1, vocab_size, &wants, &token_id, &largest}, pool);
  return has_nan ? std::isnan(largest) : largest == value;
}

bool check(const Ops& ops) {
  std::mt19937 source(1);
  Pool pool(3);
  int num_wrong = 0, num_unsure = 0, num_rows = 0;
  for (int trial = 0; trial < 150; ++trial) {
    const std::int64_t vocab_size = 1 + random_below(trial % 10 ? 300 : 9000, source);
    std::vector<Case> cases;
    for (std::int64_t row = 1 + random_below(5, source); row > 0; --row) cases.push_back(make_case(vocab_size, source));
    const auto [wrong, unsure] = draw_cases(*ops.draw, pool, cases);
    num_wrong += wrong, num_unsure += unsure, num_rows += static_cast<int>(cases.size());
  }
  for (const std::int64_t vocab_size : {1, 63, 64, 65, 5000})
    for (const float value : {-kInfinity, kInfinity, 0.0f})
      num_wrong += !tells(*ops.draw, pool, value, false, vocab_size) + !tells(*ops.draw, pool, value, true, vocab_size);
  std::printf("%s: draws, %d of %d rows went wrong, %d were left\n", ops.name, num_wrong, num_rows, num_unsure);
  return num_wrong == 0 && num_unsure < num_rows / 10;
}

}  // namespace

int main(int count, char** names) { return check_levels(count, names, check); }
