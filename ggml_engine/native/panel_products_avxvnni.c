/* Panels for x86-64 with AVX-VNNI (2021), beside AVX2, FMA and F16C. */
#include "panel_products.h"
#if PANEL_HAS_AVXVNNI
#include <immintrin.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#include "panel_vectors_256.inc"
#define MOST_WEIGHT 255
static inline ivec i_dot(ivec start, ivec w, ivec x) { return _mm256_dpbusd_avx_epi32(start, w, x); }
#include "panel_products.inc"
const struct panel_kernel panel_kernel_avxvnni = { "avxvnni", LANES, spread, multiply_panel };
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int panel_products_avxvnni_is_not_for_this_compiler; /* a unit is never empty */
#endif
