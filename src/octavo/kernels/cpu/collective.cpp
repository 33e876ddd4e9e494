#include "collective.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace octavo {

// A futex word, how many ranks sleep on it, and whether this rank has left, on a cache line of its own.
struct alignas(64) Collective::Line {
  std::atomic<std::uint32_t> num_posts;
  std::atomic<std::uint32_t> num_sleeping;
  std::atomic<std::uint32_t> has_left;
};

namespace {

// Size of a slot: large enough to amortize the waits between pieces, small enough to stay in cache.
constexpr std::int64_t kSlotBytes = 1 << 20;
constexpr std::int64_t kLinesBytes = 1 << 16;  // whole pages, whatever the page size
constexpr int kMaxRanks = 64;
// With more than two ranks and at least this many bytes, each rank reduces one stripe: less traffic for one more wait.
constexpr std::int64_t kStripedBytes = 1 << 14;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)

// Times out now and then to check that the other rank is still alive.
void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const timespec at_most = {0, 100'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &at_most, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

std::uint8_t* map(int file, std::int64_t offset, std::int64_t size) {
  void* memory = mmap(nullptr, static_cast<std::size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
  if (memory == MAP_FAILED) throw std::runtime_error("cannot map the ranks' shared memory");
  return static_cast<std::uint8_t*>(memory);
}

void unmap(std::uint8_t* memory, std::int64_t size) { munmap(memory, static_cast<std::size_t>(size)); }

#else

void sleep_on(std::atomic<std::uint32_t>&, std::uint32_t) {}
void wake_all(std::atomic<std::uint32_t>&) {}
std::uint8_t* map(int, std::int64_t, std::int64_t) { throw std::runtime_error("shared memory ranks require Linux"); }
void unmap(std::uint8_t*, std::int64_t) {}

#endif

// An empty buffer may have a null address, which memcpy does not accept.
void copy(void* to, const void* from, std::int64_t size) {
  if (size > 0) std::memcpy(to, from, static_cast<std::size_t>(size));
}

}  // namespace

std::int64_t Collective::memory_size(int size) { return kLinesBytes + 2 * size * kSlotBytes; }

Collective::Collective(const Ops& ops, int file, std::int64_t offset, int rank, int size, int num_spins)
    : ops_(ops), rank_(rank), size_(size), num_spins_(num_spins) {
  if (size > kMaxRanks || rank < 0 || rank >= size) throw std::invalid_argument("rank or group size out of range");
  memory_ = map(file, offset, memory_size(size));
}

Collective::~Collective() {
  line(rank_).has_left.store(1);
  wake_all(line(rank_).num_posts);
  unmap(memory_, memory_size(size_));
}

Collective::Line& Collective::line(int rank) const { return reinterpret_cast<Line*>(memory_)[rank]; }

std::uint8_t* Collective::slot(int rank) const {
  return memory_ + kLinesBytes + (2 * rank + static_cast<int>(num_ops_ & 1)) * kSlotBytes;
}

void Collective::begin() { ++num_ops_; }

void Collective::post_and_wait() {
  Line& own = line(rank_);
  own.num_posts.store(++num_posts_);
  if (own.num_sleeping.load() > 0) wake_all(own.num_posts);
  // Start with the next rank, so that ranks do not all read the same line.
  for (int step = 1; step < size_; ++step) wait_for((rank_ + step) % size_);
}

void Collective::wait_for(int rank) {
  Line& other = line(rank);
  // Counters wrap around.
  const auto is_there = [&](std::uint32_t posts) { return static_cast<std::int32_t>(posts - num_posts_) >= 0; };
  for (int spins = 0; spins < num_spins_; ++spins) {
    if (is_there(other.num_posts.load(std::memory_order_acquire))) return;
    pause();
  }
  other.num_sleeping.fetch_add(1);
  std::uint32_t posts = other.num_posts.load();
  while (!is_there(posts) && !other.has_left.load()) {
    sleep_on(other.num_posts, posts);
    posts = other.num_posts.load();
  }
  other.num_sleeping.fetch_sub(1);
  if (!is_there(other.num_posts.load())) throw std::runtime_error("rank " + std::to_string(rank) + " of the group has left");
}

void Collective::barrier() {
  begin();
  post_and_wait();
}

void Collective::all_reduce(void* x, std::int64_t count, DType dtype) {
  const std::int64_t element = size_of(dtype), per_piece = kSlotBytes / element;
  for (std::int64_t done = 0; done < count; done += per_piece) {
    const std::int64_t piece = std::min(per_piece, count - done);
    std::uint8_t* at = static_cast<std::uint8_t*>(x) + done * element;
    if (size_ > 2 && piece * element >= kStripedBytes) {
      reduce_in_stripes(at, piece, dtype);
    } else {
      reduce_whole(at, piece, dtype);
    }
  }
}

void Collective::reduce_whole(std::uint8_t* x, std::int64_t count, DType dtype) {
  begin();
  copy(slot(rank_), x, count * size_of(dtype));
  post_and_wait();
  const void* parts[kMaxRanks];
  for (int rank = 0; rank < size_; ++rank) parts[rank] = slot(rank);
  ops_.sum({parts, size_, count, dtype, x});
}

// Each rank reduces one stripe in its own slot, where no other rank reads that stripe yet; then all copy every stripe.
void Collective::reduce_in_stripes(std::uint8_t* x, std::int64_t count, DType dtype) {
  const std::int64_t element = size_of(dtype);
  const auto begin_of = [&](int rank) { return count * rank / size_ / 32 * 32; };
  const auto end_of = [&](int rank) { return rank + 1 == size_ ? count : begin_of(rank + 1); };
  begin();
  copy(slot(rank_), x, count * element);
  post_and_wait();
  const std::int64_t first = begin_of(rank_);
  const void* parts[kMaxRanks];
  for (int rank = 0; rank < size_; ++rank) parts[rank] = slot(rank) + first * element;
  ops_.sum({parts, size_, end_of(rank_) - first, dtype, slot(rank_) + first * element});
  post_and_wait();
  for (int rank = 0; rank < size_; ++rank) {
    const std::int64_t from = begin_of(rank) * element, size = end_of(rank) * element - from;
    copy(x + from, slot(rank) + from, size);
  }
}

void Collective::all_gather(const void* x, void* out, std::int64_t rows, const std::vector<std::int64_t>& row_bytes) {
  std::int64_t widest = 1, total = 0;
  for (const std::int64_t bytes : row_bytes) widest = std::max(widest, bytes), total += bytes;
  // Pieces of `height` rows, up to `width` bytes wide, from every rank.
  const std::int64_t width = std::min(widest, kSlotBytes), height = kSlotBytes / width;
  for (std::int64_t row = 0; row < rows; row += height) {
    const std::int64_t num_rows = std::min(height, rows - row);
    for (std::int64_t column = 0; column < widest; column += width) {
      const auto width_of = [&](int rank) {
        return std::clamp(row_bytes[static_cast<std::size_t>(rank)] - column, std::int64_t{0}, width);
      };
      begin();
      const std::int64_t own = row_bytes[static_cast<std::size_t>(rank_)];
      const auto* from = static_cast<const std::uint8_t*>(x) + row * own + column;
      for (std::int64_t at = 0; at < num_rows; ++at)
        copy(slot(rank_) + at * width_of(rank_), from + at * own, width_of(rank_));
      post_and_wait();
      auto* to = static_cast<std::uint8_t*>(out) + row * total + column;
      for (int rank = 0; rank < size_; to += row_bytes[static_cast<std::size_t>(rank++)])
        for (std::int64_t at = 0; at < num_rows; ++at)
          copy(to + at * total, slot(rank) + at * width_of(rank), width_of(rank));
    }
  }
}

std::vector<std::vector<std::int64_t>> Collective::exchange_counts(const std::vector<std::int64_t>& counts) {
  const std::size_t size = static_cast<std::size_t>(size_), bytes = size * sizeof(std::int64_t);
  begin();
  std::memcpy(slot(rank_), counts.data(), bytes);
  post_and_wait();
  std::vector<std::vector<std::int64_t>> all(size, std::vector<std::int64_t>(size));
  for (int rank = 0; rank < size_; ++rank) std::memcpy(all[static_cast<std::size_t>(rank)].data(), slot(rank), bytes);
  return all;
}

void Collective::all_to_all(const void* x, void* out, std::int64_t row_bytes,
                            const std::vector<std::vector<std::int64_t>>& counts) {
  struct Span {
    std::int64_t begin, end;  // bytes
  };
  std::vector<Span> theirs;  // the part of each rank's rows that is for this one
  std::int64_t most = 0, own = 0;
  for (int source = 0; source < size_; ++source) {
    std::int64_t begin = 0, end = 0, sent = 0;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) begin = sent;
      sent += counts[static_cast<std::size_t>(source)][static_cast<std::size_t>(rank)] * row_bytes;
      if (rank == rank_) end = sent;
    }
    theirs.push_back({begin, end});
    most = std::max(most, sent);
    if (source == rank_) own = sent;
  }
  for (std::int64_t at = 0; at < most; at += kSlotBytes) {
    begin();
    const std::int64_t size = std::clamp(own - at, std::int64_t{0}, kSlotBytes);
    copy(slot(rank_), static_cast<const std::uint8_t*>(x) + at, size);
    post_and_wait();
    auto* to = static_cast<std::uint8_t*>(out);
    for (int source = 0; source < size_; ++source) {
      const Span span = theirs[static_cast<std::size_t>(source)];
      const std::int64_t begin = std::max(span.begin, at), end = std::min(span.end, at + kSlotBytes);
      if (begin < end)
        copy(to + (begin - span.begin), slot(source) + (begin - at), end - begin);
      to += span.end - span.begin;
    }
  }
}

}  // namespace octavo
