// What the machine can do at most: reading memory that no cache holds, and multiplying from registers.
// Prints one line of JSON. Compiled for the machine it runs on: `python -m benchmarks.machine.probe`.

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kWideBytes = 64;
#else
constexpr int kWideBytes = 32;
#endif
using Wide = float __attribute__((vector_size(kWideBytes)));
using Words = std::uint64_t __attribute__((vector_size(64)));

constexpr std::size_t kBytes = std::size_t{1} << 30;
constexpr int kRepeats = 7;

// What the compiler must not drop is added up here.
volatile std::uint64_t sink;

double seconds(const std::function<void()>& work) {
  const auto begun = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// The shortest of several runs of `work(thread)` on all threads: neighbors on the machine count least.
double best_seconds(int threads, const std::function<void(int)>& work) {
  double best = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const double taken = seconds([&] {
      std::vector<std::thread> others;
      for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
      work(0);
      for (auto& other : others) other.join();
    });
    best = taken < best ? taken : best;
  }
  return best;
}

void read_all(const Words* data, std::size_t count) {
  Words sums[8] = {};
  for (std::size_t i = 0; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8; ++j) {
      __builtin_prefetch(data + i + j + 64);
      sums[j] += data[i + j];
    }
  }
  for (int j = 1; j < 8; ++j) sums[0] += sums[j];
  sink = sums[0][0] + sums[0][7];
}

double read_rate(const Words* data, int threads) {
  const std::size_t part = kBytes / sizeof(Words) / threads;
  return kBytes / best_seconds(threads, [&](int thread) { read_all(data + thread * part, part); });
}

constexpr int kRounds = 1 << 22;

// 12 sums, so that no product waits for the one before it. They begin apart: equal ones would be computed once.
void multiply_float(int) {
  Wide sums[12];
  for (int j = 0; j < 12; ++j) sums[j] = Wide{} + static_cast<float>(j);
  const Wide left = Wide{} + 1.0001f, right = Wide{} + 1e-7f;
  for (int round = 0; round < kRounds; ++round) {
    for (auto& sum : sums) sum = sum * left + right;
  }
  for (int j = 1; j < 12; ++j) sums[0] += sums[j];
  sink = static_cast<std::uint64_t>(sums[0][0]);
}
constexpr double kFloatOperations = 2.0 * (kWideBytes / 4) * 12 * kRounds;

#if defined(__AMX_TILE__)
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const TileShapes kShapes;  // static: GCC 12 drops the stores to one on the stack
alignas(64) std::uint8_t zeros[1024];

bool allow_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void set_tiles() {
  _tile_loadconfig(&kShapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
}

void multiply_bf16(int) {
  set_tiles();
  for (int round = 0; round < kRounds / 16; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
constexpr double kBf16Operations = 2.0 * 16 * 16 * 32 * 4 * (kRounds / 16);

void multiply_int8(int) {
  set_tiles();
  for (int round = 0; round < kRounds / 16; ++round) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
}
constexpr double kInt8Operations = 2.0 * 16 * 16 * 64 * 4 * (kRounds / 16);
#else
bool allow_tiles() { return true; }

#if defined(__AVX512BF16__)
void multiply_bf16(int) {
  __m512 sums[12];
  for (int j = 0; j < 12; ++j) sums[j] = _mm512_set1_ps(static_cast<float>(j));
  const __m512bh one = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1), _mm512_set1_ps(1));
  for (int round = 0; round < kRounds; ++round) {
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, one, one);
  }
  for (int j = 1; j < 12; ++j) sums[0] += sums[j];
  sink = static_cast<std::uint64_t>(sums[0][0]);
}
constexpr double kBf16Operations = 2.0 * 32 * 12 * kRounds;
#else
// No unit for bfloat16: it is widened, and floats are the limit.
void multiply_bf16(int thread) { multiply_float(thread); }
constexpr double kBf16Operations = kFloatOperations;
#endif

#if defined(__AVX512VNNI__)
void multiply_int8(int) {
  __m512i sums[12];
  for (int j = 0; j < 12; ++j) sums[j] = _mm512_set1_epi32(j);
  const __m512i one = _mm512_set1_epi8(1);
  for (int round = 0; round < kRounds; ++round) {
    for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, one, one);
  }
  for (int j = 1; j < 12; ++j) sums[0] = _mm512_add_epi32(sums[0], sums[j]);
  sink = static_cast<std::uint64_t>(sums[0][0]);
}
constexpr double kInt8Operations = 2.0 * 64 * 12 * kRounds;
#elif defined(__AVX2__)
// Pairs of products in 16 bits, widened; of the sum itself, so that nothing is the same in every round.
void multiply_int8(int) {
  __m256i sums[12];
  for (int j = 0; j < 12; ++j) sums[j] = _mm256_set1_epi32(j);
  const __m256i bytes = _mm256_set1_epi8(1), words = _mm256_set1_epi16(1);
  for (int round = 0; round < kRounds; ++round) {
    for (auto& sum : sums)
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(sum, bytes), words));
  }
  for (int j = 1; j < 12; ++j) sums[0] = _mm256_add_epi32(sums[0], sums[j]);
  sink = static_cast<std::uint64_t>(_mm256_extract_epi64(sums[0], 0));
}
constexpr double kInt8Operations = 2.0 * 32 * 12 * kRounds;
#else
void multiply_int8(int thread) { multiply_float(thread); }
constexpr double kInt8Operations = kFloatOperations;
#endif
#endif

Words* cold_memory() {
  void* memory = std::aligned_alloc(std::size_t{1} << 21, kBytes);
  if (memory == nullptr) std::exit(1);
  madvise(memory, kBytes, MADV_HUGEPAGE);
  auto* data = static_cast<std::uint64_t*>(memory);
  for (std::size_t i = 0; i < kBytes / 8; ++i) data[i] = i;
  return static_cast<Words*>(memory);
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : 2;
  if (!allow_tiles()) {
    std::fprintf(stderr, "the kernel does not allow the use of AMX tiles\n");
    return 1;
  }
  const Words* data = cold_memory();
  std::printf("{");
  for (int threads = 1; threads <= most; threads += threads < most ? most - 1 : 1) {
    const double times[3] = {best_seconds(threads, multiply_float), best_seconds(threads, multiply_bf16),
                             best_seconds(threads, multiply_int8)};
    std::printf("%s\"%d\": {\"bytes_per_s\": %.4g, \"float32_per_s\": %.4g, \"bf16_per_s\": %.4g, \"int8_per_s\": %.4g}",
                threads > 1 ? ", " : "", threads, read_rate(data, threads), threads * kFloatOperations / times[0],
                threads * kBf16Operations / times[1], threads * kInt8Operations / times[2]);
  }
  std::printf("}\n");
}
