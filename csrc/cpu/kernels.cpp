#include "kernels.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace eagle {

#if defined(__x86_64__)
// A process has to ask Linux for the state of the tiles before it uses them.
static bool amx_available() {
#if defined(__linux__)
    static const bool available = [] {
        unsigned eax, ebx, ecx, edx;
        if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
        constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
        constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        return (edx & kBf16) && (edx & kTile) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    }();
    return available;
#else
    return false;
#endif
}
#endif

bool isa_available(const char* name) {
    if (std::strcmp(name, "portable") == 0) return true;
#if defined(__x86_64__)
    if (std::strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (std::strcmp(name, "avx512") == 0) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (std::strcmp(name, "amx") == 0) return isa_available("avx512") && amx_available();
#endif
    return false;
}

static const Kernels* by_name(const char* name) {
    if (!isa_available(name)) return nullptr;
#if defined(__x86_64__)
    if (std::strcmp(name, "amx") == 0) return &kernels_amx;
    if (std::strcmp(name, "avx512") == 0) return &kernels_avx512;
    if (std::strcmp(name, "avx2") == 0) return &kernels_avx2;
#endif
    return &kernels_portable;
}

static const Kernels* best() {
    for (const char* name : {"amx", "avx512", "avx2"})
        if (const Kernels* found = by_name(name)) return found;
    return &kernels_portable;
}

static std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> table{best()};
    return table;
}

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool set_isa(const char* name) {
    const Kernels* table = by_name(name);
    if (table != nullptr) chosen().store(table);
    return table != nullptr;
}

}  // namespace eagle
