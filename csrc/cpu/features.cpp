#include "features.h"

#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace headrace {

const std::vector<const Kernels*>& available_kernels() {
    static const std::vector<const Kernels*> kernels = [] {
        std::vector<const Kernels*> found;
#if defined(__x86_64__)
        // These ask the operating system too, not only the CPU.
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
        if (vnni && __builtin_cpu_supports("avx512bf16")) found.push_back(kernels_avx512_bf16());
        if (vnni) found.push_back(kernels_avx512_vnni());
        if (avx512) found.push_back(kernels_avx512());
        if (avx2) found.push_back(kernels_avx2());
#elif defined(__aarch64__) && defined(HEADRACE_NEON)
        if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back(kernels_neon());
#endif
        found.push_back(kernels_generic());
        return found;
    }();
    return kernels;
}

const Kernels& find_kernels(const std::string& name) {
    const auto& kernels = available_kernels();
    if (name.empty()) return *kernels.front();
    std::string names;
    for (const Kernels* k : kernels) {
        if (name == k->name) return *k;
        names += (names.empty() ? "" : ", ") + std::string(k->name);
    }
    throw std::invalid_argument("instruction set '" + name + "' is not available on this CPU; available: " + names);
}

}  // namespace headrace
