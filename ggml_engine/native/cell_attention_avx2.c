/* For x86-64 with AVX2, FMA and F16C (2013). */
#include "cell_attention.h"
#if defined(__x86_64__) && defined(__GNUC__)
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define LANES 8
#define SCORE_VECS 3 /* by 4 rows: 12 of 16 registers hold sums */
#define MIX_VECS 2   /* by 6 queries */
typedef __m256 vec;
static inline vec v_load(const float * x) { return _mm256_loadu_ps(x); }
static inline void v_store(float * x, vec a) { _mm256_storeu_ps(x, a); }
static inline vec v_set1(float x) { return _mm256_set1_ps(x); }
static inline vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec v_round(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vec v_exp2i(vec n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline vec v_zero_below(vec x, float limit, vec y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ), y);
}
static inline vec v_keep(vec x, float r, vec lo, vec hi) {
    const vec i = _mm256_set1_ps(r);
    const vec seen = _mm256_and_ps(_mm256_cmp_ps(i, lo, _CMP_GE_OQ), _mm256_cmp_ps(i, hi, _CMP_LE_OQ));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, seen);
}
static inline vec v_load_f16(const uint16_t * x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x)); }
static inline void v_sum4(float * out, vec a, vec b, vec c, vec d) {
    const vec h = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
static inline float v_sum(vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
#include "cell_products.inc"
#include "cell_attention.inc"
const struct cell_kernel cell_kernel_avx2 = { "avx2", LANES, attend, merge };
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int cell_attention_avx2_is_not_for_this_compiler; /* a unit is never empty */
#endif
