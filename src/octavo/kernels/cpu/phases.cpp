#include "phases.h"

#include <time.h>

#include <cstddef>

namespace octavo {
namespace {

std::chrono::nanoseconds thread_time() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

void PhaseTimes::start() {
  seconds_ = {};
  is_started_ = true;
  since_ = Clock::time_point(thread_time());
}

PhaseTimes::Seconds PhaseTimes::seconds() const { return seconds_; }

Phase PhaseTimes::enter(Phase next) {
  const Phase before = now_;
  now_ = next;
  if (is_started_) {
    const Clock::time_point time(thread_time());
    seconds_[static_cast<std::size_t>(before)] += std::chrono::duration<double>(time - since_).count();
    since_ = time;
  }
  return before;
}

InPhase::InPhase(PhaseTimes& times, Phase phase) : times_(times), before_(times.enter(phase)) {}
InPhase::~InPhase() { times_.enter(before_); }

}  // namespace octavo
