/* Panels for x86-64 with AVX-512 (F, BW) and no VNNI (2017). */
#include "panel_products.h"
#if PANEL_HAS_AVX512
#include <immintrin.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,f16c")
#endif
#include "panel_vectors_512.inc"
#define MOST_WEIGHT 127 /* pairs of products are summed in 16 bits: 2 * 127 * 128 */
static inline ivec i_dot(ivec start, ivec w, ivec x) {
    return _mm512_add_epi32(start, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
#include "panel_products.inc"
const struct panel_kernel panel_kernel_avx512bw = { "avx512bw", LANES, spread, multiply_panel };
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int panel_products_avx512bw_is_not_for_this_compiler; /* a unit is never empty */
#endif
