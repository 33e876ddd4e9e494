#include "pool.h"

#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(OCTAVO_SANITIZE)
#include <sanitizer/asan_interface.h>
#endif

namespace octavo {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::uint64_t kChunkBits = 20, kChunkMask = (1u << kChunkBits) - 1;
constexpr std::uint64_t kEpochMask = (1u << 24) - 1;
// A worker polls this often before it sleeps, about 50 us: longer than the gaps between the ops of a step, too short
// for another process to notice.
constexpr int kSpins = 1500;
// The caller spins this long for a chunk that another thread has begun before it yields its core: that thread may be
// waiting for this very core.
constexpr int kSpinsBeforeYield = 4000;

std::uint64_t make_ticket(std::uint64_t epoch, std::uint64_t num_chunks) {
  return (epoch & kEpochMask) << (2 * kChunkBits) | num_chunks << kChunkBits;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Scratch::~Scratch() { std::free(data_); }

void* Scratch::bytes(std::size_t size) {
  if (size > size_) {
    std::free(data_);
    size_ = (size + kHugePage - 1) / kHugePage * kHugePage;
    data_ = std::aligned_alloc(kHugePage, size_);
    if (data_ == nullptr) {
      size_ = 0;
      throw std::bad_alloc();
    }
#if defined(__linux__)
    madvise(data_, size_, MADV_HUGEPAGE);  // a hint: small pages are only slower
#endif
  }
#if defined(OCTAVO_SANITIZE)  // memory beyond the requested size is poisoned
  ASAN_UNPOISON_MEMORY_REGION(data_, size_);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(data_) + size, size_ - size);
#endif
  return data_;
}

void Scratch::swap(Scratch& other) {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
}

Pool::NestedOp::NestedOp(Pool& pool) : pool_(pool) { pool_.scratch_.swap(pool_.nested_scratch_); }
Pool::NestedOp::~NestedOp() { pool_.scratch_.swap(pool_.nested_scratch_); }

Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

Pool::Pool(int num_threads) {
  for (int helper = 1; helper < num_threads; ++helper) helpers_.emplace_back([this] { help(); });
}

Pool::~Pool() {
  is_closing_.store(true);
  epoch_.fetch_add(1);
#if defined(__linux__)
  syscall(SYS_futex, &epoch_, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#else
  epoch_.notify_all();
#endif
  for (std::thread& helper : helpers_) helper.join();
}

void Pool::run_erased(std::int64_t num_chunks, Function function, const void* body) {
  if (num_chunks <= 1 || helpers_.empty()) {
    for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) function(body, chunk);
    return;
  }
  function_.store(function, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  num_unfinished_.store(num_chunks, std::memory_order_relaxed);
  const std::uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  ticket_.store(make_ticket(epoch, static_cast<std::uint64_t>(num_chunks)), std::memory_order_release);
  epoch_.store(epoch);
  if (num_sleeping_.load() > 0) {
#if defined(__linux__)
    syscall(SYS_futex, &epoch_, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#else
    epoch_.notify_all();
#endif
  }
  work_on(epoch);
  const InPhase waiting(phases_, Phase::waiting);
  for (int spins = 0; num_unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void Pool::work_on(std::uint64_t epoch) {
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    const std::uint64_t chunk = ticket & kChunkMask, num_chunks = ticket >> kChunkBits & kChunkMask;
    if (ticket >> (2 * kChunkBits) != (epoch & kEpochMask) || chunk >= num_chunks) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    // Claimed: until the chunk is done, the run cannot end and these cannot change.
    function_.load(std::memory_order_relaxed)(body_.load(std::memory_order_relaxed), static_cast<std::int64_t>(chunk));
    num_unfinished_.fetch_sub(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void Pool::help() {
  std::uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen && spins < kSpins) {
      pause();
      ++spins;
    }
    if (epoch_.load() == seen) sleep_until_after(seen);
    seen = epoch_.load(std::memory_order_acquire);
    if (is_closing_.load()) return;
    work_on(seen);
  }
}

void Pool::sleep_until_after(std::uint32_t epoch) {
  num_sleeping_.fetch_add(1);
#if defined(__linux__)
  while (epoch_.load() == epoch) syscall(SYS_futex, &epoch_, FUTEX_WAIT_PRIVATE, epoch, nullptr, nullptr, 0);
#else
  epoch_.wait(epoch);
#endif
  num_sleeping_.fetch_sub(1);
}

}  // namespace octavo
