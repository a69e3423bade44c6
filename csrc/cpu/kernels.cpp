#include "kernels.h"

#include <atomic>
#include <cstring>

namespace eagle {

bool isa_available(const char* name) {
    if (std::strcmp(name, "portable") == 0) return true;
#if defined(__x86_64__)
    if (std::strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (std::strcmp(name, "avx512") == 0) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return false;
}

static const Kernels* by_name(const char* name) {
    if (!isa_available(name)) return nullptr;
#if defined(__x86_64__)
    if (std::strcmp(name, "avx512") == 0) return &kernels_avx512;
    if (std::strcmp(name, "avx2") == 0) return &kernels_avx2;
#endif
    return &kernels_portable;
}

static const Kernels* best() {
    for (const char* name : {"avx512", "avx2"})
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
