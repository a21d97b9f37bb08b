/* The compiled attention against a plain sum in doubles, over random plans, and over plans that are nonsense.

   Built and run by test_cell_attention_c.py, with sanitizers: every tensor is exactly as large as it says. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cell_attention.h"

#if defined(__aarch64__)
#define KERNEL cell_kernel_neon
#else
#define KERNEL cell_kernel_avx2
#endif

static uint64_t state = 1;
static int below(int n) { /* a number of [0, n) */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int) ((state >> 33) % (uint64_t) n);
}
static float real(void) { return (float) below(20001) / 10000.0f - 1; }

static float half_to_float(uint16_t h) { /* of finite ones that are not subnormal, or 0 */
    const uint32_t size = h & 0x7fff ? ((uint32_t) (h & 0x7fff) << 13) + (112u << 23) : 0;
    const uint32_t bits = (uint32_t) (h & 0x8000) << 16 | size;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static uint16_t random_half(void) { return (uint16_t) (below(2) << 15 | (10 + below(6)) << 10 | below(1024)); }
static void bytes_to_float(const void * x, float * y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = (float) ((const int8_t *) x)[i] / 64;
}

static const size_t size_of_kind[] = { 1, 2, 4 };
static float element(const char * at, int kind, int64_t i) {
    if (kind == CELL_ROWS_CONVERTED) return (float) ((const int8_t *) at)[i] / 64;
    return kind == CELL_ROWS_F16 ? half_to_float(((const uint16_t *) at)[i]) : ((const float *) at)[i];
}

static void shape(struct ggml_tensor * t, size_t size, int64_t a, int64_t b, int64_t c) {
    memset(t, 0, sizeof(*t));
    t->ne[0] = a, t->ne[1] = b, t->ne[2] = c, t->ne[3] = 1;
    t->nb[0] = size, t->nb[1] = size * (size_t) a, t->nb[2] = t->nb[1] * (size_t) b, t->nb[3] = t->nb[2] * (size_t) c;
    t->data = malloc(t->nb[3] ? t->nb[3] : 1);
}

/* [n_dims, n_rows, n_heads] whose rows hold all heads */
static void pool(struct ggml_tensor * t, int kind, int n_dims, int n_rows, int n_heads) {
    shape(t, size_of_kind[kind], n_dims, n_heads, n_rows);
    const size_t head = t->nb[1], row = t->nb[2];
    t->ne[1] = n_rows, t->ne[2] = n_heads, t->nb[1] = row, t->nb[2] = head;
    for (size_t i = 0; i < (size_t) n_dims * (size_t) n_rows * (size_t) n_heads; ++i) {
        if (kind == CELL_ROWS_CONVERTED) ((int8_t *) t->data)[i] = (int8_t) (below(128) - 64);
        else if (kind == CELL_ROWS_F16) ((uint16_t *) t->data)[i] = random_half();
        else ((float *) t->data)[i] = real();
    }
}

struct setting {
    struct cell_attention_params p;
    struct ggml_tensor q, k, v, plan, sinks, dst, merged;
    int n_tokens, has_sinks;
};

static void random_setting(struct setting * s, int n_rows) {
    static const int dims[] = { 8, 16, 24, 40, 64, 72, 128 };
    memset(s, 0, sizeof(*s));
    s->n_tokens = 1 + below(40);
    s->has_sinks = below(3) == 0;
    const int D = dims[below(7)], Dv = below(2) ? D : dims[below(7)], n_head_kv = 1 + below(3), G = 1 + below(9);
    s->p = (struct cell_attention_params) {
        .scale = 0.05f + (float) below(100) / 100, .softcap = below(3) ? 0.0f : 3.0f, .n_head_kv = n_head_kv,
        .n_splits = below(2) ? 1 : 2 + below(6), .k_rows = below(3), .v_rows = below(3), .n_slices = 1 + below(3),
        .n_queries = G * (1 + below(16)), .merges = (int32_t) (state >> 40 & 1), .k_to_float = bytes_to_float, .v_to_float = bytes_to_float,
    };
    shape(&s->q, 4, D, n_head_kv * G, s->n_tokens);
    for (int i = 0; i < D * n_head_kv * G * s->n_tokens; ++i) ((float *) s->q.data)[i] = real();
    pool(&s->k, s->p.k_rows, D, n_rows, n_head_kv);
    pool(&s->v, s->p.v_rows, Dv, n_rows, n_head_kv);
    shape(&s->sinks, 4, n_head_kv * G, 1, 1);
    for (int i = 0; i < n_head_kv * G; ++i) ((float *) s->sinks.data)[i] = real();
    const int64_t rows = (int64_t) n_head_kv * G * s->n_tokens;
    const int64_t n_whole = s->p.n_splits == 1 || s->p.merges ? rows * Dv : 0;
    const int64_t n_out = n_whole + (s->p.n_splits > 1 ? rows * (Dv + 2) * s->p.n_splits : 0);
    shape(&s->dst, 4, n_out + (int64_t) cell_scratch_floats(&s->p, (size_t) D, (size_t) Dv), 1, 1);
    shape(&s->merged, 4, Dv, n_head_kv * G, s->n_tokens);
    s->dst.src[0] = &s->q, s->dst.src[1] = &s->k, s->dst.src[2] = &s->v, s->dst.src[3] = &s->plan;
    if (s->has_sinks && n_whole > 0) s->dst.src[4] = &s->sinks;
    s->merged.src[0] = &s->dst;
    if (s->has_sinks) s->merged.src[1] = &s->sinks;
    memset(s->dst.data, 0xff, s->dst.nb[3]); /* NaN: what is read before it is written shows */
}

static void drop(struct setting * s) {
    struct ggml_tensor * all[] = { &s->q, &s->k, &s->v, &s->plan, &s->sinks, &s->dst, &s->merged };
    for (int i = 0; i < 7; ++i) free(all[i]->data);
}

struct run { struct ggml_tensor * dst; cell_op op; void * p; int ith, nth; };
static void * one(void * arg) {
    struct run * r = arg;
    r->op(r->dst, r->ith, r->nth, r->p);
    return NULL;
}
static void compute(struct ggml_tensor * dst, cell_op op, void * p, int nth) {
    pthread_t threads[4];
    struct run runs[4];
    for (int i = 0; i < nth; ++i) {
        runs[i] = (struct run) { dst, op, p, i, nth };
        pthread_create(&threads[i], NULL, one, &runs[i]);
    }
    for (int i = 0; i < nth; ++i) pthread_join(threads[i], NULL);
}

static const float * outputs(struct setting * s) {
    const int nth = 1 + below(4);
    compute(&s->dst, KERNEL.attend, &s->p, nth);
    if (s->p.n_splits == 1 || s->p.merges) return s->dst.data;
    compute(&s->merged, KERNEL.merge, &s->p, nth);
    return s->merged.data;
}

/* What a token sees: rows, by the plan's own words. Returns the largest error of its heads. */
static double error_of(const struct setting * s, int token, const int * rows, int n, const float * out) {
    const int D = (int) s->q.ne[0], Dv = (int) s->v.ne[0], n_head = (int) s->q.ne[1], G = n_head / s->p.n_head_kv;
    double worst = 0, * weights = malloc((size_t) n * sizeof(double));
    for (int h = 0; h < n_head; ++h) {
        const float * q = (const float *) s->q.data + ((size_t) token * (size_t) n_head + (size_t) h) * (size_t) D;
        double top = s->has_sinks ? ((float *) s->sinks.data)[h] : -1e300, sum = 0;
        for (int i = 0; i < n; ++i) {
            const char * k = (const char *) s->k.data + (size_t) rows[i] * s->k.nb[1] + (size_t) (h / G) * s->k.nb[2];
            double x = 0;
            for (int d = 0; d < D; ++d) x += (double) q[d] * element(k, s->p.k_rows, d);
            x *= s->p.scale;
            if (s->p.softcap > 0) x = s->p.softcap * tanh(x / s->p.softcap);
            weights[i] = x;
            top = x > top ? x : top;
        }
        for (int i = 0; i < n; ++i) sum += weights[i] = exp(weights[i] - top);
        if (s->has_sinks) sum += exp(((float *) s->sinks.data)[h] - top);
        for (int d = 0; d < Dv; ++d) {
            double y = 0;
            for (int i = 0; i < n; ++i) {
                const size_t at = (size_t) rows[i] * s->v.nb[1] + (size_t) (h / G) * s->v.nb[2];
                y += weights[i] * element((const char *) s->v.data + at, s->p.v_rows, d);
            }
            const size_t at = ((size_t) token * (size_t) n_head + (size_t) h) * (size_t) Dv + (size_t) d;
            const double error = fabs(y / sum - out[at]);
            if (!(error <= worst)) worst = error;
        }
    }
    free(weights);
    return worst;
}

enum { MOST_ROWS = 700, MOST_NUMBERS = 20000 };

/* Tiles of random sizes, each with spans for runs of its tokens; seen[token] gets the rows. */
static int random_plan(struct setting * s, int n_rows, int * seen, int * n_seen) {
    static int32_t numbers[MOST_NUMBERS], spans[MOST_NUMBERS];
    int n = CELL_PLAN_HEAD + 2 * s->n_tokens, n_spans = 0, n_tiles = 0;
    int32_t * until = numbers + CELL_PLAN_HEAD, * from = until + s->n_tokens;
    for (int t = 0; t < s->n_tokens; ++t) {
        until[t] = 20 + below(n_rows), from[t] = below(3) ? 0 : below(20), n_seen[t] = 0;
    }
    for (int token = 0; token < s->n_tokens;) {
        const int left = s->n_tokens - token, n_tokens = 1 + below(left < 20 ? left : 20), first = n_spans;
        for (int i = 1 + below(5); i > 0; --i) {
            /* the first one is seen by everybody, so that no token is without rows */
            const int for_all = i == 1, at = for_all ? 0 : below(n_tokens);
            const int many = for_all ? n_tokens : 1 + below(n_tokens - at);
            const int row = below(n_rows - 21);
            const int len = for_all ? 21 + below(n_rows - row - 20) : below(n_rows - row + 1);
            const int position = for_all ? 0 : below(200);
            const int32_t span[] = { row, len, position, token + at, many };
            memcpy(spans + CELL_SPAN_NUMBERS * n_spans++, span, sizeof(span));
            for (int t = token + at; t < token + at + many; ++t) {
                for (int r = 0; r < len; ++r) {
                    if (position + r < from[t] || position + r > until[t]) continue;
                    seen[t * 5 * MOST_ROWS + n_seen[t]++] = row + r;
                }
            }
        }
        const int32_t tile[] = { token, n_tokens, first, n_spans - first };
        memcpy(numbers + n, tile, sizeof(tile)), n += CELL_TILE_NUMBERS, ++n_tiles;
        token += n_tokens;
    }
    numbers[0] = n_tiles, numbers[1] = CELL_PLAN_HEAD + 2 * s->n_tokens, numbers[2] = n;
    shape(&s->plan, 4, n + CELL_SPAN_NUMBERS * n_spans, 1, 1);
    memcpy(s->plan.data, numbers, (size_t) n * 4);
    memcpy((int32_t *) s->plan.data + n, spans, (size_t) n_spans * sizeof(struct cell_span));
    return n + CELL_SPAN_NUMBERS * n_spans;
}

static int is_any(const float * x, size_t n, int (*wanted)(float)) {
    for (size_t i = 0; i < n; ++i) if (wanted(x[i])) return 1;
    return 0;
}
static int is_nan(float x) { return isnan(x); }

#define CHECK(condition, ...) if (!(condition)) return printf(__VA_ARGS__), puts(""), 1

static int check_random(int seed) {
    static int seen[40 * 5 * MOST_ROWS], n_seen[40];
    struct setting s;
    const int n_rows = 22 + below(MOST_ROWS - 22);
    random_setting(&s, n_rows);
    random_plan(&s, n_rows, seen, n_seen);
    for (int again = 0; again < 2; ++again) {
        const float * out = outputs(&s);
        CHECK(s.p.next_item == 0 && s.p.n_done == 0, "seed %d: counters are left", seed);
        for (int t = 0; t < s.n_tokens; ++t) {
            const double error = error_of(&s, t, seen + t * 5 * MOST_ROWS, n_seen[t], out);
            CHECK(error < 2e-5, "seed %d, token %d: error %g (head %d, %d; heads %d on %d; splits %d; kinds %d, %d)",
                  seed, t, error, (int) s.q.ne[0], (int) s.v.ne[0], (int) s.q.ne[1], s.p.n_head_kv, s.p.n_splits,
                  s.p.k_rows, s.p.v_rows);
        }
    }
    drop(&s);
    return 0;
}

/* Numbers of a good plan are replaced: whatever comes out, nothing else may be touched (the sanitizers look). */
static int check_nonsense(int seed) {
    static int seen[40 * 5 * MOST_ROWS], n_seen[40];
    static const int32_t wild[] = { -1, INT32_MAX, INT32_MIN, 1 << 20, 0, 3 };
    struct setting s;
    const int n_rows = 22 + below(200);
    random_setting(&s, n_rows);
    const int n = random_plan(&s, n_rows, seen, n_seen);
    for (int i = 1 + below(8); i > 0; --i) {
        ((int32_t *) s.plan.data)[below(3) ? below(n) : below(CELL_PLAN_HEAD)] = below(2) ? wild[below(6)] : below(n);
    }
    outputs(&s);
    CHECK(s.p.next_item == 0 && s.p.n_done == 0, "seed %d: counters are left", seed);
    drop(&s);
    return 0;
}

/* A span of rows that there are not gives NaN for its tile, and so does a tensor without room for scratch. */
static int check_refusals(int seed) {
    static int seen[40 * 5 * MOST_ROWS], n_seen[40];
    struct setting s;
    random_setting(&s, 100);
    random_plan(&s, 100, seen, n_seen);
    int32_t * plan = s.plan.data;
    const size_t n = (size_t) (s.v.ne[0] * s.q.ne[1]);
    plan[plan[2]] = 100; /* the first row of the first span */
    plan[plan[2] + 1] = 1;
    CHECK(is_any(outputs(&s), n, is_nan), "seed %d: rows outside are answered", seed);
    plan[plan[2]] = 0;
    s.dst.ne[0] -= 1;
    CHECK(is_any(outputs(&s), n, is_nan), "seed %d: too little scratch is not noticed", seed);
    drop(&s);
    return 0;
}

int main(int argc, char ** argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 100;
    for (int i = 0; i < n; ++i) {
        state = (uint64_t) i + 1;
        if (check_random(i) || check_nonsense(i) || check_refusals(i)) return 1;
    }
    printf("%d settings are right\n", n);
    return 0;
}
