// The best of a row of logits: what ggml_engine/ggml/candidates.py defines, and does without this where it is not built.
//
// One pass over the row finds the largest logit of each block and whether all are finite. The k-th largest of these
// maxima is a bound that at least k logits reach; only blocks that reach it are looked at again.

#include "best_logits.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK = 128 };

typedef struct best_logit best_t;

static int is_worse(best_t a, best_t b) { return a.logit < b.logit || (a.logit == b.logit && a.id > b.id); }

// The worst of `heap` is at its top: let what stands at `i` sink to where it belongs.
static void sink(best_t * heap, size_t n, size_t i) {
    const best_t moved = heap[i];
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && is_worse(heap[child + 1], heap[child])) child++;
        if (!is_worse(heap[child], moved)) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

static void push(best_t * heap, size_t * n, size_t k, best_t found) {
    if (*n < k) {
        size_t i = (*n)++;
        for (; i > 0 && is_worse(found, heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
        heap[i] = found;
    } else if (is_worse(heap[0], found)) {
        heap[0] = found;
        sink(heap, k, 0);
    }
}

// The largest of n logits; adds to `faults` 0 for finite ones, and NaN for others.
static float largest_of(const float * x, size_t n, float * faults) {
    float largest = x[0];
    for (size_t i = 0; i < n; i++) {
        largest = x[i] > largest ? x[i] : largest;
        *faults += x[i] - x[i];
    }
    return largest;
}

#ifdef __GNUC__ // and clang
// The same for a whole block, in 4 vectors of as many bytes as the processor's have: compilers cut longer ones to pieces.
#define DEFINE_LARGEST_OF_BLOCK(name, n_bytes, target)                                                                 \
    typedef float floats##n_bytes __attribute__((vector_size(n_bytes)));                                               \
    typedef int32_t ints##n_bytes __attribute__((vector_size(n_bytes)));                                               \
    target static float name(const float * x, float * faults) {                                                        \
        enum { LANES = (n_bytes) / 4, STEP = 4 * LANES };                                                              \
        floats##n_bytes most[4], sums[4];                                                                              \
        memcpy(most, x, sizeof most);                                                                                  \
        for (int v = 0; v < 4; v++) sums[v] = most[v] - most[v];                                                       \
        for (int i = STEP; i < BLOCK; i += STEP) {                                                                     \
            for (int v = 0; v < 4; v++) {                                                                              \
                floats##n_bytes each;                                                                                  \
                memcpy(&each, x + i + v * LANES, sizeof each);                                                         \
                const ints##n_bytes more = each > most[v];                                                             \
                most[v] = (floats##n_bytes) (((ints##n_bytes) each & more) | ((ints##n_bytes) most[v] & ~more));       \
                sums[v] += each - each;                                                                                \
            }                                                                                                          \
        }                                                                                                              \
        for (int v = 1; v < 4; v++) {                                                                                  \
            const ints##n_bytes more = most[v] > most[0];                                                              \
            most[0] = (floats##n_bytes) (((ints##n_bytes) most[v] & more) | ((ints##n_bytes) most[0] & ~more));        \
            sums[0] += sums[v];                                                                                        \
        }                                                                                                              \
        float largest = most[0][0];                                                                                    \
        for (int j = 0; j < LANES; j++) {                                                                              \
            largest = most[0][j] > largest ? most[0][j] : largest;                                                     \
            *faults += sums[0][j];                                                                                     \
        }                                                                                                              \
        return largest;                                                                                                \
    }
DEFINE_LARGEST_OF_BLOCK(largest_of_block, 16, )
#ifdef __x86_64__
DEFINE_LARGEST_OF_BLOCK(largest_of_block_avx2, 32, __attribute__((target("avx2"))))
#endif
#else
static float largest_of_block(const float * x, float * faults) { return largest_of(x, BLOCK, faults); }
#endif

// The largest logit of every block; 0 where all are finite, else NaN.
static float scan(const float * x, size_t n, float * maxima) {
    float (*of_block)(const float *, float *) = largest_of_block;
    float faults = 0.0f;
#if defined(__GNUC__) && defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) of_block = largest_of_block_avx2;
#endif
    size_t at = 0;
    for (; at + BLOCK <= n; at += BLOCK) maxima[at / BLOCK] = of_block(x + at, &faults);
    if (at < n) maxima[at / BLOCK] = largest_of(x + at, n - at, &faults);
    return faults;
}

int best_logits(const float * x, size_t n, size_t k, best_t * best) {
    const size_t n_blocks = (n + BLOCK - 1) / BLOCK;
    float * maxima = malloc(n_blocks * sizeof(float));
    if (maxima == NULL) return -1;
    if (scan(x, n, maxima) != 0.0f) { // NaN is not equal to 0 either
        free(maxima);
        return 0;
    }
    size_t n_found = 0;
    for (size_t b = 0; b < n_blocks; b++) push(best, &n_found, k, (best_t) {maxima[b], (int32_t) b});
    const int is_bounded = n_found == k;
    const float bound = best[0].logit;
    n_found = 0;
    for (size_t b = 0; b < n_blocks; b++) {
        if (is_bounded && maxima[b] < bound) continue;
        const size_t end = (b + 1) * BLOCK < n ? (b + 1) * BLOCK : n;
        for (size_t i = b * BLOCK; i < end; i++) {
            if (!is_bounded || x[i] >= bound) push(best, &n_found, k, (best_t) {x[i], (int32_t) i});
        }
    }
    free(maxima);
    for (size_t left = k; left-- > 1;) { // the worst one goes last
        const best_t worst = best[0];
        best[0] = best[left];
        best[left] = worst;
        sink(best, left, 0);
    }
    return 1;
}
