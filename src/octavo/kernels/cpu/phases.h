// Where the time of ops goes, measured on request: a benchmark's view into recorded steps.
#pragma once

#include <array>
#include <chrono>

namespace octavo {

// outside: between calls, which is the host's time. other: in a call, where no op names a phase. rows: residuals and
// norms of a linear's input, quantized or packed. states: what layers compute that keep one. waiting: for chunks that other threads have begun.
enum class Phase { outside, other, rows, products, keys, attention, states, norms, waiting };
constexpr std::array<const char*, 9> kPhaseNames = {"outside",   "other",  "rows",  "products", "keys",
                                                    "attention", "states", "norms", "waiting"};

// Processor seconds of the calling thread, by phase: a busy machine counts little. Off until started. Not inline: levels
// include it, and the linker might keep the copy of one that this processor lacks.
class PhaseTimes {
 public:
  using Seconds = std::array<double, kPhaseNames.size()>;

  void start();
  Seconds seconds() const;
  Phase enter(Phase next);  // ends the current phase and returns it

 private:
  using Clock = std::chrono::steady_clock;

  bool is_started_ = false;
  Phase now_ = Phase::outside;
  Clock::time_point since_;
  Seconds seconds_ = {};
};

// A phase for as long as this lives; then the one before goes on.
class InPhase {
 public:
  InPhase(PhaseTimes& times, Phase phase);
  ~InPhase();
  InPhase(const InPhase&) = delete;
  InPhase& operator=(const InPhase&) = delete;

 private:
  PhaseTimes& times_;
  Phase before_;
};

}  // namespace octavo
