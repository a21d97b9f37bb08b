/* For AArch64, where vectors of four floats and conversion from f16 are always there. */
#include "cell_attention.h"
#if defined(__aarch64__) && defined(__GNUC__)
#include <arm_neon.h>
#include <float.h>
#include <math.h>
#include <string.h>
#define LANES 4
#define SCORE_VECS 6 /* by 4 rows: 24 of 32 registers hold sums */
#define MIX_VECS 4   /* by 6 queries */
typedef float32x4_t vec;
static inline vec v_load(const float * x) { return vld1q_f32(x); }
static inline void v_store(float * x, vec a) { vst1q_f32(x, a); }
static inline vec v_set1(float x) { return vdupq_n_f32(x); }
static inline vec v_add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec v_sub(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec v_mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec v_div(vec a, vec b) { return vdivq_f32(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
static inline vec v_max(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); } /* vmaxq would give any NaN */
static inline vec v_round(vec a) { return vrndnq_f32(a); }
static inline vec v_exp2i(vec n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline vec v_zero_below(vec x, float limit, vec y) {
    return vbslq_f32(vcltq_f32(x, vdupq_n_f32(limit)), vdupq_n_f32(0.0f), y);
}
static inline vec v_keep(vec x, float r, vec lo, vec hi) {
    const vec i = vdupq_n_f32(r);
    return vbslq_f32(vandq_u32(vcgeq_f32(i, lo), vcleq_f32(i, hi)), x, vdupq_n_f32(-__builtin_inff()));
}
static inline vec v_load_f16(const uint16_t * x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
static inline void v_sum4(float * out, vec a, vec b, vec c, vec d) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
static inline float v_sum(vec a) { return vaddvq_f32(a); }
#include "cell_products.inc"
#include "cell_attention.inc"
const struct cell_kernel cell_kernel_neon = { "neon", LANES, attend, merge };
#else
typedef int cell_attention_neon_is_not_for_this_compiler; /* a unit is never empty */
#endif
