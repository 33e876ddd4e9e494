// What ranks add up, gather and exchange through memory, each rank a thread, beside plain loops: one to five ranks, in and
// beyond one slot, spinning and sleeping, at every level that this machine has; and what the others see of a rank that
// leaves. `make sanitize` runs it under address and undefined-behavior sanitizers, and under the thread sanitizer.
#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include "collective.h"
#include "levels.h"
#include "numbers.h"

using namespace octavo;

#if defined(OCTAVO_ONE_MAPPING)

// The thread sanitizer knows memory by its address, and each rank maps the file for itself: so that it sees what ranks do
// to each other, all of them get one mapping. The linker puts these in place of mmap and munmap (CMakeLists.txt).
extern "C" {

void* __real_mmap(void*, std::size_t, int, int, int, off_t);

void* __wrap_mmap(void* address, std::size_t size, int protection, int flags, int file, off_t offset) {
  static std::mutex mutex;
  static std::map<ino_t, void*> mappings;
  struct stat status;
  if (fstat(file, &status) != 0) return MAP_FAILED;
  const std::lock_guard lock(mutex);
  void*& mapping = mappings[status.st_ino];
  if (mapping == nullptr) mapping = __real_mmap(address, size, protection, flags, file, offset);
  return mapping;
}

int __wrap_munmap(void*, std::size_t) { return 0; }

}

#endif

namespace {

constexpr std::int64_t kOffset = 1 << 16;  // of the ranks' memory in its file

// Ranks of one group, which all do the same.
class Ranks {
 public:
  Ranks(const Ops& ops, int size, int num_spins) : ops_(ops), size_(size), num_spins_(num_spins) {
    file_ = memfd_create("ranks", 0);
    if (file_ < 0 || ftruncate(file_, kOffset + Collective::memory_size(size)) != 0)
      throw std::runtime_error("no memory for ranks");
  }
  ~Ranks() { close(file_); }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // Whether body(collective, rank) says so for all ranks. One that is not well leaves, and the others notice.
  bool all(const std::function<bool(Collective&, int)>& body) const {
    std::atomic<int> num_well{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank)
      threads.emplace_back([&, rank] {
        Collective collective(ops_, file_, kOffset, rank, size_, num_spins_);
        try {
          num_well += body(collective, rank);
        } catch (const std::runtime_error& error) {
          std::printf("rank %d of %d: %s\n", rank, size_, error.what());
        }
      });
    for (std::thread& thread : threads) thread.join();
    return num_well == size_;
  }

 private:
  const Ops& ops_;
  int size_, num_spins_, file_;
};

// What a rank brings, the same wherever it is asked for: number i of a trial, from -1 to 1, with as many digits as float32
// has, so that the order of a sum shows.
float number_of(int rank, std::int64_t trial, std::int64_t i) {
  return static_cast<float>(((i + 1) * 40503 + rank * 9973 + trial) % 65521) / 32760.5f - 1.0f;
}

std::uint8_t byte_of(int rank, std::int64_t trial, std::int64_t i) {
  return static_cast<std::uint8_t>((i * 167 + i / 251 + rank * 59 + trial) % 256);
}

constexpr DType kDTypes[] = {DType::bfloat16, DType::float16, DType::float32};

template <class Element>
bool adds_up(Collective& collective, int rank, int size, std::int64_t count, DType dtype) {
  const auto number = [&](int other, std::int64_t i) {
    Element element;
    narrow_to(element, number_of(other, count, i));
    return element;
  };
  std::vector<Element> own(count);
  for (std::int64_t i = 0; i < count; ++i) own[i] = number(rank, i);
  collective.all_reduce(own.data(), count, dtype);
  bool is_well = true;
  for (std::int64_t i = 0; i < count; ++i) {
    float sum = widened(number(0, i));
    for (int other = 1; other < size; ++other) sum += widened(number(other, i));
    Element expected;
    narrow_to(expected, sum);
    is_well &= own[i] == expected;
  }
  return is_well;
}

bool adds_up(Collective& collective, int rank, int size, std::int64_t count, DType dtype) {
  return dtype == DType::float32   ? adds_up<float>(collective, rank, size, count, dtype)
         : dtype == DType::float16 ? adds_up<f16>(collective, rank, size, count, dtype)
                                   : adds_up<bf16>(collective, rank, size, count, dtype);
}

// Rank r brings rows of width * (r % 3) + 1 bytes; of `rows` there may be none.
bool gathers(Collective& collective, int rank, int size, std::int64_t rows, std::int64_t width) {
  std::vector<std::int64_t> row_bytes;
  for (int other = 0; other < size; ++other) row_bytes.push_back(width * (other % 3) + 1);
  std::vector<std::uint8_t> own(rows * row_bytes[rank]), expected;
  for (std::size_t i = 0; i < own.size(); ++i) own[i] = byte_of(rank, width, i);
  for (std::int64_t row = 0; row < rows; ++row)
    for (int other = 0; other < size; ++other)
      for (std::int64_t i = 0; i < row_bytes[other]; ++i)
        expected.push_back(byte_of(other, width, row * row_bytes[other] + i));
  std::vector<std::uint8_t> out(expected.size());
  collective.all_gather(own.data(), out.data(), rows, row_bytes);
  return out == expected;
}

// Each rank sends each other up to `most` rows, some none.
bool exchanges(Collective& collective, int rank, int size, std::int64_t most, std::int64_t row_bytes) {
  std::vector<std::vector<std::int64_t>> counts(size);
  std::vector<std::uint8_t> own, expected;
  for (int sender = 0; sender < size; ++sender) {
    std::int64_t sent = 0;
    for (int receiver = 0; receiver < size; ++receiver) {
      counts[sender].push_back((sender * 7 + receiver * 3 + most) % (most + 1));
      for (const std::int64_t end = sent + counts[sender].back() * row_bytes; sent < end; ++sent) {
        if (sender == rank) own.push_back(byte_of(sender, most, sent));
        if (receiver == rank) expected.push_back(byte_of(sender, most, sent));
      }
    }
  }
  if (collective.exchange_counts(counts[rank]) != counts) return false;
  std::vector<std::uint8_t> out(expected.size());
  collective.all_to_all(own.data(), out.data(), row_bytes, counts);
  return out == expected;
}

// Small ops in turn, while a rank now and then comes late.
bool takes_turns(Collective& collective, int rank, int size) {
  bool is_well = true;
  for (int turn = 0; turn < 60 && is_well; ++turn) {
    if (turn % (3 * size) == 3 * rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    is_well = adds_up(collective, rank, size, 1 + turn, kDTypes[turn % 3]);
    if (turn % 4 == 0) collective.barrier();
  }
  return is_well;
}

bool check_group(const Ops& ops, int size, int num_spins) {
  const Ranks ranks(ops, size, num_spins);
  return ranks.all([size](Collective& collective, int rank) {
    // Whole and in stripes, by less than a vector more than some, and beyond the 1 MiB of a slot.
    for (const std::int64_t count : {1, 31, 1000, 4096, 8209, 300001, 540007})
      for (const DType dtype : kDTypes)
        if (!adds_up(collective, rank, size, count, dtype)) throw std::runtime_error("sums are wrong");
    for (const std::int64_t width : {0, 5, 4000, 700001})
      for (const std::int64_t rows : {0, 1, 3})
        if (!gathers(collective, rank, size, rows, width)) throw std::runtime_error("gathered rows are wrong");
    if (!gathers(collective, rank, size, 300, 4000)) throw std::runtime_error("many gathered rows are wrong");
    for (const std::int64_t most : {0, 1, 40})
      for (const std::int64_t row_bytes : {1, 300, 30000})
        if (!exchanges(collective, rank, size, most, row_bytes)) throw std::runtime_error("exchanged rows are wrong");
    if (!takes_turns(collective, rank, size)) throw std::runtime_error("sums in turn are wrong");
    return true;
  });
}

// The last rank leaves after one op; all others are told so in the next.
bool tells_who_left(const Ops& ops, int size, int num_spins) {
  const Ranks ranks(ops, size, num_spins);
  return ranks.all([size](Collective& collective, int rank) {
    collective.barrier();
    if (rank == size - 1) return true;
    try {
      collective.barrier();
    } catch (const std::runtime_error&) {
      return true;
    }
    return false;
  });
}

bool check(const Ops& ops) {
  bool is_well = true;
  for (const int size : {1, 2, 3, 5})
    for (const int num_spins : {0, 1000}) {
      is_well &= check_group(ops, size, num_spins);
      is_well &= tells_who_left(ops, size, num_spins);
    }
  std::printf("%s: collectives are %s\n", ops.name, is_well ? "well" : "wrong");
  return is_well;
}

}  // namespace

int main(int count, char** names) { return check_levels(count, names, check); }
