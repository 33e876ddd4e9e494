// Collectives between ranks of one host through shared memory: all-reduce, all-gather, all-to-all.
//
// Each rank has two slots and alternates between them. Every op is the same: write to your own slot, post, wait until
// all have posted, read theirs. A rank that posts has finished reading the op before, so the slot used before that is
// free again: one counter per rank is all the state there is.
//
// Legend: P = ranks, T = rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "ops.h"

namespace octavo {

class Collective {
 public:
  // Maps `memory_size` bytes of `file`, initially zero, at `offset`. A waiting rank polls `num_spins` times before it
  // sleeps.
  Collective(const Ops& ops, int file, std::int64_t offset, int rank, int size, int num_spins);
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  static std::int64_t memory_size(int size);

  // All of these throw std::runtime_error when another rank has left.

  // x, `count` elements, becomes the sum of all ranks' x, added in rank order.
  void all_reduce(void* x, std::int64_t count, DType dtype);
  // Concatenates x [T, row_bytes[rank]] of all ranks along columns: out [T, sum of row_bytes].
  void all_gather(const void* x, void* out, std::int64_t rows, const std::vector<std::int64_t>& row_bytes);
  // Returns the counts of all ranks, [P][P].
  std::vector<std::vector<std::int64_t>> exchange_counts(const std::vector<std::int64_t>& counts);
  // The first counts[rank][0] rows of x go to rank 0, and so on. out: the rows received, in rank order.
  void all_to_all(const void* x, void* out, std::int64_t row_bytes,
                  const std::vector<std::vector<std::int64_t>>& counts);
  void barrier();

 private:
  struct Line;  // what other ranks poll

  Line& line(int rank) const;
  std::uint8_t* slot(int rank) const;  // of the current op
  void begin();                        // starts an op
  void post_and_wait();
  void wait_for(int rank);
  void reduce_whole(std::uint8_t* x, std::int64_t count, DType dtype);
  void reduce_in_stripes(std::uint8_t* x, std::int64_t count, DType dtype);

  const Ops& ops_;
  int rank_, size_, num_spins_;
  std::uint8_t* memory_ = nullptr;
  std::uint32_t num_ops_ = 0, num_posts_ = 0;
};

}  // namespace octavo
