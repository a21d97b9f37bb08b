/* Panels for x86-64 with AVX-512 (F, BW) and its VNNI (2019). */
#include "panel_products.h"
#if PANEL_HAS_AVX512
#include <immintrin.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vnni,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vnni,f16c")
#endif
#include "panel_vectors_512.inc"
#define MOST_WEIGHT 255
static inline ivec i_dot(ivec start, ivec w, ivec x) { return _mm512_dpbusd_epi32(start, w, x); }
#include "panel_products.inc"
const struct panel_kernel panel_kernel_avx512 = { "avx512", LANES, spread, multiply_panel };
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int panel_products_avx512_is_not_for_this_compiler; /* a unit is never empty */
#endif
