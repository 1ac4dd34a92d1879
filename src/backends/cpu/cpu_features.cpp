// CPUID, XCR0 and Linux's permission for AMX (see cpu_features.h).
#include "backends/cpu/cpu_features.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace dsacore::cpu {
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

constexpr bool has_bits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

/// XCR0: the register states that the system saves; 0 where it does not say.
uint64_t saved_states() {
  constexpr unsigned kOsXsave = 1u << 27;
  if (!has_bits(cpuid(1, 0).ecx, kOsXsave)) return 0;
  uint32_t low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

constexpr uint64_t kZmmStates = 0xE6;         // SSE, AVX, opmask, upper halves, upper registers
constexpr uint64_t kTileStates = 3ull << 17;  // tile configuration, tile data

}  // namespace

bool has_avx512_bf16() {
  constexpr unsigned kFDqBwVl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // leaf 7.0, EBX
  constexpr unsigned kBf16 = 1u << 5;                                       // leaf 7.1, EAX
  return has_bits(cpuid(7, 0).ebx, kFDqBwVl) && cpuid(7, 0).eax >= 1 && has_bits(cpuid(7, 1).eax, kBf16) &&
         has_bits(saved_states(), kZmmStates);
}

bool has_avx512_vbmi() {
  constexpr unsigned kVbmi = 1u << 1;  // leaf 7.0, ECX
  return has_avx512_bf16() && has_bits(cpuid(7, 0).ecx, kVbmi);
}

bool acquire_amx() {
  static const bool acquired = [] {
    constexpr unsigned kBf16Tile = 1u << 22 | 1u << 24;  // leaf 7.0, EDX
    if (!has_avx512_bf16() || !has_bits(cpuid(7, 0).edx, kBf16Tile) || !has_bits(saved_states(), kTileStates))
      return false;
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM of <asm/prctl.h>, which older systems lack
    constexpr long kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return acquired;
}

}  // namespace dsacore::cpu

#else

namespace dsacore::cpu {

bool has_avx512_bf16() { return false; }
bool has_avx512_vbmi() { return false; }
bool acquire_amx() { return false; }

}  // namespace dsacore::cpu

#endif
