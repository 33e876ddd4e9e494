// A thread pool for shared machines. Work is claimed chunk by chunk from one atomic word: a descheduled thread claims
// nothing, and the running ones take the rest. There is no barrier between threads, only the caller's wait for chunks
// that others have begun.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "phases.h"

namespace octavo {

// A grow-only buffer for an op's temporaries. 64-byte aligned.
class Scratch {
 public:
  ~Scratch();
  void* bytes(std::size_t size);
  void swap(Scratch& other);

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// Thread-local, for the body of an op.
Scratch& thread_scratch();

class Pool {
 public:
  explicit Pool(int num_threads);  // including the caller
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return 1 + static_cast<int>(helpers_.size()); }

  // Calls body(chunk) once for each chunk in [0, num_chunks), on any thread and in any order; returns when all have
  // returned. At most 2^20 chunks. Not from within a body.
  template <class Body>
  void run(std::int64_t num_chunks, const Body& body) {
    run_erased(num_chunks, [](const void* self, std::int64_t chunk) { (*static_cast<const Body*>(self))(chunk); }, &body);
  }

  // One op at a time holds the pool and its scratch memory.
  std::mutex& mutex() { return mutex_; }
  Scratch& scratch() { return scratch_; }
  PhaseTimes& phases() { return phases_; }

  // While it lives, an op that another one calls has scratch memory of its own.
  class NestedOp {
   public:
    explicit NestedOp(Pool& pool);
    ~NestedOp();
    NestedOp(const NestedOp&) = delete;
    NestedOp& operator=(const NestedOp&) = delete;

   private:
    Pool& pool_;
  };

 private:
  using Function = void (*)(const void*, std::int64_t);

  void run_erased(std::int64_t num_chunks, Function function, const void* body);
  void help();
  void work_on(std::uint64_t epoch);
  void sleep_until_after(std::uint32_t epoch);

  // Epoch (24 bits), number of chunks (20), next chunk (20): claimed by one compare-and-swap, so that a thread that was
  // descheduled since an earlier run can never claim a chunk of a later one.
  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  alignas(64) std::atomic<std::int64_t> num_unfinished_{0};
  alignas(64) std::atomic<std::uint32_t> epoch_{0};  // workers wait for it to change
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> is_closing_{false};
  std::atomic<Function> function_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::mutex mutex_;
  Scratch scratch_, nested_scratch_;
  PhaseTimes phases_;
  std::vector<std::thread> helpers_;
};

}  // namespace octavo
