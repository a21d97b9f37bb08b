/* The joint products alone, against plain sums: random shapes, threads and scratch, under sanitizers.

   Rows of weights are f32, or stand for a type of their own: then activations are packed to f64. Panels are plain sums,
   too, over f64 that was moved as if it were spread. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "joint_products.h"

static uint64_t state;
static int below(int n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int) ((state >> 33) % (uint64_t) n);
}
static float real(void) { return (float) (below(2001) - 1000) / 500; }

static void pack(const float * x, void * y, int64_t k) {
    for (int64_t i = 0; i < k; ++i) ((double *) y)[i] = (double) x[i];
}
static void dot_f32(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc) {
    (void) bs, (void) bx, (void) by, (void) nrc;
    float sum = 0;
    for (int i = 0; i < n; ++i) sum += ((const float *) x)[i] * ((const float *) y)[i];
    *s = sum;
}
static void dot_packed(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc) {
    (void) bs, (void) bx, (void) by, (void) nrc;
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += (double) ((const float *) x)[i] * ((const double *) y)[i];
    *s = (float) sum;
}

enum { MOVED = 24 }; /* bytes by which a spread row is longer */
static void spread(enum panel_type type, const void * packed, void * x, int64_t n_blocks) {
    (void) type;
    memmove(x, packed, (size_t) n_blocks * PANEL_BLOCK * sizeof(double));
}
static void multiply_panel(
    enum panel_type type, const char * weight, size_t weight_stride, int n_rows, int64_t n_blocks, const char * x,
    size_t x_stride, int64_t n_tokens, float * out, int64_t out_stride, void * memory);
static const struct panel_kernel kernel = { "plain", 8, spread, multiply_panel };
static void multiply_panel(
    enum panel_type type, const char * weight, size_t weight_stride, int n_rows, int64_t n_blocks, const char * x,
    size_t x_stride, int64_t n_tokens, float * out, int64_t out_stride, void * memory) {
    (void) type;
    memset(memory, n_rows, panel_bytes(kernel.n_lanes, n_blocks)); /* all of it is this thread's */
    for (int64_t t = 0; t < n_tokens; ++t) {
        for (int r = 0; r < n_rows; ++r) {
            dot_packed((int) n_blocks * PANEL_BLOCK, out + t * out_stride + r, 0, weight + (size_t) r * weight_stride, 0,
                       x + (size_t) t * x_stride, 0, 1);
        }
    }
}

static void shape(struct ggml_tensor * t, int64_t ne0, int64_t ne1) {
    memset(t, 0, sizeof(*t));
    t->ne[0] = ne0, t->ne[1] = ne1, t->ne[2] = t->ne[3] = 1;
    t->nb[0] = sizeof(float), t->nb[1] = (size_t) ne0 * sizeof(float);
    t->nb[2] = t->nb[3] = t->nb[1] * (size_t) ne1;
    t->data = malloc(t->nb[3]);
    for (int64_t i = 0; i < ne0 * ne1; ++i) ((float *) t->data)[i] = real();
}

struct run { struct ggml_tensor * dst; void * p; int ith, nth; };
static void * one(void * arg) {
    struct run * r = arg;
    joint_products(r->dst, r->ith, r->nth, r->p);
    return NULL;
}
static void compute(struct ggml_tensor * dst, void * p, int nth) {
    pthread_t threads[4];
    struct run runs[4];
    for (int i = 0; i < nth; ++i) {
        runs[i] = (struct run) { dst, p, i, nth };
        pthread_create(&threads[i], NULL, one, &runs[i]);
    }
    for (int i = 0; i < nth; ++i) pthread_join(threads[i], NULL);
}

static float expected(
    const struct joint_products_params * p, const struct ggml_tensor * x, const struct ggml_tensor * w,
    const struct ggml_tensor * norm, const struct ggml_tensor * added, int64_t token, int64_t row) {
    const int64_t n = x->ne[0];
    const float * in = (const float *) x->data + token * n, * weights = (const float *) w->data + row * n;
    double squares = 0, sum = 0;
    for (int64_t i = 0; i < n; ++i) squares += (double) in[i] * in[i];
    const double scale = p->has_norm ? 1 / sqrt(squares / (double) n + p->eps) : 1;
    for (int64_t i = 0; i < n; ++i) {
        sum += in[i] * scale * (p->has_norm ? ((const float *) norm->data)[i] : 1) * weights[i];
    }
    return (float) (sum + (p->has_sum ? ((const float *) added->data)[token * added->ne[0] + row] : 0));
}

#define CHECK(condition, ...) if (!(condition)) return printf(__VA_ARGS__), puts(""), 1

static int check(int seed) {
    struct joint_products_params p = { .eps = 1e-5f };
    struct ggml_tensor x, w[JOINT_MOST_WEIGHTS], norm, added, dst;
    const int has_panels = below(2);
    const int64_t n_dims = has_panels ? PANEL_BLOCK * (1 + below(3)) : 1 + below(90), n_tokens = 1 + below(9);
    const int nth = 1 + below(4), has_form = below(3) > 0;
    p.n_weights = 1 + below(JOINT_MOST_WEIGHTS), p.has_norm = below(2), p.n_slices = 1 + below(4);
    p.has_sum = p.n_weights == 1 && below(2);
    p.is_shared = below(2), p.kernel = &kernel;
    if (has_panels) {
        p.form_bytes[1] = n_dims * (int64_t) sizeof(double) + MOVED, p.packed_bytes[1] = n_dims * (int64_t) sizeof(double);
        p.pack[1] = pack, p.spreads[1] = PANEL_Q4_1;
    }
    if (has_form) p.form_bytes[0] = n_dims * (int64_t) sizeof(double), p.pack[0] = pack;
    shape(&x, n_dims, n_tokens);
    shape(&norm, n_dims, 1);
    int64_t n_rows = 0;
    for (int i = 0; i < p.n_weights; ++i) {
        shape(&w[i], n_dims, 1 + below(300));
        n_rows += w[i].ne[1];
        p.form[i] = has_form && below(2) ? 0 : -1;
        p.dot[i] = p.form[i] < 0 ? dot_f32 : dot_packed;
        if (has_panels && below(2)) p.form[i] = 1, p.panels[i] = PANEL_Q4_1;
    }
    shape(&added, n_rows, n_tokens);
    shape(&dst, n_rows * n_tokens + (int64_t) joint_scratch_floats(&p, (size_t) n_dims, (size_t) n_tokens), 1);
    dst.src[0] = &x;
    for (int i = 0; i < p.n_weights; ++i) dst.src[1 + i] = &w[i];
    if (p.has_norm) dst.src[1 + p.n_weights] = &norm;
    if (p.has_sum) dst.src[1 + p.n_weights + p.has_norm] = &added;
    for (int again = 0; again < 2; ++again) {
        memset(dst.data, 0xff, dst.nb[3]); /* NaN: what is left out shows */
        compute(&dst, &p, nth);
        CHECK(p.next_item + p.n_done + p.next_token + p.n_taken == 0, "seed %d: counters are left", seed);
        for (int64_t t = 0; t < n_tokens; ++t) {
            const float * out = (const float *) dst.data + t * n_rows;
            for (int i = 0; i < p.n_weights; out += w[i++].ne[1]) {
                for (int64_t r = 0; r < w[i].ne[1]; ++r) {
                    const float wanted = expected(&p, &x, &w[i], &norm, &added, t, r);
                    CHECK(fabsf(out[r] - wanted) < 1e-3f, "seed %d: weight %d, token %d, row %d: %g, not %g", seed, i,
                          (int) t, (int) r, (double) out[r], (double) wanted);
                }
            }
        }
    }
    dst.ne[0] -= 1;
    compute(&dst, &p, nth);
    for (int64_t i = 0; i < n_rows * n_tokens; ++i) {
        CHECK(isnan(((float *) dst.data)[i]), "seed %d: too little scratch is not noticed", seed);
    }
    free(x.data), free(norm.data), free(added.data), free(dst.data);
    for (int i = 0; i < p.n_weights; ++i) free(w[i].data);
    return 0;
}

int main(int argc, char ** argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 100;
    for (int i = 0; i < n; ++i) {
        state = (uint64_t) i + 1;
        if (check(i)) return 1;
    }
    printf("%d settings are right\n", n);
    return 0;
}
