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
#define LANES 16
#define MOST_TOKENS 3 /* 24 of 32 registers hold sums */
typedef __m512i ivec;
typedef __m512 fvec;
static inline ivec i_zero(void) { return _mm512_setzero_si512(); }
static inline ivec i_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline ivec i_load(const void * x) { return _mm512_loadu_si512(x); }
static inline void i_store(void * x, ivec a) { _mm512_storeu_si512(x, a); }
static inline ivec i_and(ivec a, ivec b) { return _mm512_and_si512(a, b); }
static inline ivec i_or(ivec a, ivec b) { return _mm512_or_si512(a, b); }
static inline ivec i_xor(ivec a, ivec b) { return _mm512_xor_si512(a, b); }
static inline ivec i_andnot(ivec a, ivec b) { return _mm512_andnot_si512(a, b); }
static inline ivec i_add8(ivec a, ivec b) { return _mm512_add_epi8(a, b); }
static inline ivec i_is_zero8(ivec a) { return _mm512_movm_epi8(_mm512_testn_epi8_mask(a, a)); }
static inline ivec i_shift_right4(ivec a) { return _mm512_srli_epi16(a, 4); }
static inline ivec i_upper_halves(ivec a) { return _mm512_srli_epi32(a, 16); }
static inline ivec i_bytes_of(ivec a, int byte) {
    const __m512i first = _mm512_set_epi32(
        0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808,
        0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    return _mm512_shuffle_epi8(a, _mm512_add_epi8(first, _mm512_set1_epi8((char) byte)));
}
static inline __m128i i_load16(const char * x) { return _mm_loadu_si128((const __m128i *) x); }
/* Four quads of every row: 16 bytes at an offset, turned so that a vector holds one quad of each. */
static inline void i_load_rows(ivec * quads, const char * const * row, size_t at) {
    __m512i a[4];
    for (int i = 0; i < 4; ++i) {
        __m512i whole = _mm512_castsi128_si512(i_load16(row[i] + at));
        whole = _mm512_inserti32x4(whole, i_load16(row[4 + i] + at), 1);
        whole = _mm512_inserti32x4(whole, i_load16(row[8 + i] + at), 2);
        a[i] = _mm512_inserti32x4(whole, i_load16(row[12 + i] + at), 3);
    }
    const __m512i p = _mm512_unpacklo_epi32(a[0], a[1]), q = _mm512_unpackhi_epi32(a[0], a[1]);
    const __m512i r = _mm512_unpacklo_epi32(a[2], a[3]), s = _mm512_unpackhi_epi32(a[2], a[3]);
    quads[0] = _mm512_unpacklo_epi64(p, r);
    quads[1] = _mm512_unpackhi_epi64(p, r);
    quads[2] = _mm512_unpacklo_epi64(q, s);
    quads[3] = _mm512_unpackhi_epi64(q, s);
}
static inline fvec f_zero(void) { return _mm512_setzero_ps(); }
static inline fvec f_set1(float x) { return _mm512_set1_ps(x); }
static inline fvec f_load(const float * x) { return _mm512_loadu_ps(x); }
static inline void f_store(float * x, fvec a) { _mm512_storeu_ps(x, a); }
static inline fvec f_add(fvec a, fvec b) { return _mm512_add_ps(a, b); }
static inline fvec f_mul(fvec a, fvec b) { return _mm512_mul_ps(a, b); }
static inline fvec f_fma(fvec a, fvec b, fvec c) { return _mm512_fmadd_ps(a, b, c); }
static inline fvec f_of_ints(ivec a) { return _mm512_cvtepi32_ps(a); }
static inline fvec f_of_halves(ivec a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); } /* lower halves */
static inline float f_of_half(uint16_t x) { return _cvtsh_ss(x); }
static inline ivec i_dot(ivec start, ivec w, ivec x) { return _mm512_dpbusd_epi32(start, w, x); }
#include "panel_products.inc"
const struct panel_kernel panel_kernel_avx512 = { "avx512", LANES, 1, spread, multiply_panel };
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int panel_products_avx512_is_not_for_this_compiler; /* a unit is never empty */
#endif
