/* Panels for x86-64 with AVX2, FMA and F16C (2013). */
#include "panel_products.h"
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include "panel_vectors_256.inc"
#define MOST_WEIGHT 127 /* pairs of products are summed in 16 bits: 2 * 127 * 128 */
static inline ivec i_dot(ivec start, ivec w, ivec x) {
    return _mm256_add_epi32(start, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
#include "panel_products.inc"
const struct panel_kernel panel_kernel_avx2 = { "avx2", LANES, spread, multiply_panel };
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int panel_products_avx2_is_not_for_this_compiler; /* a unit is never empty */
#endif
