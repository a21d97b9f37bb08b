/* What this processor can do, in words that old compilers have, too. */
#ifndef GGML_ENGINE_PROCESSOR_H
#define GGML_ENGINE_PROCESSOR_H

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

/* AVX2, FMA and F16C, and a system that keeps their registers. Not every compiler's builtin knows the last by name. */
static inline int processor_has_avx2_fma_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (ecx & bit_F16C) != 0;
}
#endif

#endif
