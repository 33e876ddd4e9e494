// Ranks of one host that add up, gather and exchange rows through memory which they share.
//
// Each rank has two slots, which take turns. An op is the same for all: write to the own slot, say so, wait until all
// have, read theirs. Who says so has read all of the op before, so the slot of the op before that is free again: one
// counter for each rank is all there is to keep.
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
  // Maps `memory_size` bytes of `file`, zeros at first, from `offset` on. A rank that waits looks `num_spins` times
  // before it sleeps.
  Collective(const Ops& ops, int file, std::int64_t offset, int rank, int size, int num_spins);
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  static std::int64_t memory_size(int size);

  // All of these throw std::runtime_error when another rank has left.

  // x, `count` elements bf16 or float32, becomes the sum of all ranks' x, added in the order of ranks.
  void all_reduce(void* x, std::int64_t count, bool is_float32);
  // x [T, row_bytes[rank]] of each rank, side by side: out [T, sum of row_bytes].
  void all_gather(const void* x, void* out, std::int64_t rows, const std::vector<std::int64_t>& row_bytes);
  // Returns the counts of all ranks, [P][P].
  std::vector<std::vector<std::int64_t>> exchange_counts(const std::vector<std::int64_t>& counts);
  // Rows of x, the first counts[rank][0] of which are for rank 0, and so on. out: what came, in the order of ranks.
  void all_to_all(const void* x, void* out, std::int64_t row_bytes,
                  const std::vector<std::vector<std::int64_t>>& counts);
  void barrier();

 private:
  struct Line;  // what others watch of a rank

  Line& line(int rank) const;
  std::uint8_t* slot(int rank) const;  // of the op under way
  void begin();                        // an op
  void post_and_wait();
  void wait_for(int rank);
  void reduce_whole(std::uint8_t* x, std::int64_t count, bool is_float32);
  void reduce_in_stripes(std::uint8_t* x, std::int64_t count, bool is_float32);

  const Ops& ops_;
  int rank_, size_, num_spins_;
  std::uint8_t* memory_ = nullptr;
  std::uint32_t num_ops_ = 0, num_posts_ = 0;
};

}  // namespace octavo
