#include "level.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

struct Registers {
  unsigned eax, ebx, ecx, edx;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r{};
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

unsigned long long enabled_states() {  // XCR0: register state that the OS saves
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<unsigned long long>(high) << 32 | low;
}

constexpr bool all(unsigned value, unsigned bits) { return (value & bits) == bits; }

// Linux grants the 8 KiB of tile register state on request only (Documentation/arch/x86/xstate.rst).
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

bool has_avx_vnni() {
  static const bool has = all(cpuid(7, 1).eax, 1u << 4);
  return has;
}

// Bits: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2A, CPUID.
Level best_level() {
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
  constexpr unsigned kOsxsave = 1u << 27, kFma = 1u << 12, kF16c = 1u << 29, kAvx2 = 1u << 5;
  if (!all(basic.ecx, kOsxsave | kFma | kF16c) || !all(extended.ebx, kAvx2)) return Level::portable;
  const unsigned long long states = enabled_states();
  if ((states & 0x6) != 0x6) return Level::portable;

  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  constexpr unsigned kVnni = 1u << 11, kBf16 = 1u << 5;
  const bool has_avx512 = all(extended.ebx, kAvx512) && all(extended.ecx, kVnni) && (states & 0xe6) == 0xe6;
  if (!has_avx512) return has_avx_vnni() ? Level::avx2_vnni : Level::avx2;
  if (!all(more.eax, kBf16)) return Level::avx512_vnni;

  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, TILE, INT8
  if (!all(extended.edx, kAmx) || (states & 0x60000) != 0x60000 || !may_use_tiles()) return Level::avx512;
  return Level::amx;
}

}  // namespace octavo

#else

namespace octavo {
Level best_level() { return Level::portable; }
}  // namespace octavo

#endif
