/* The panels of every kind of vectors that this processor has, against sums in the order of ggml's product of two rows:
   to the bit, over random and extreme blocks, shapes and strides, under sanitizers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "panel_products.h"

static uint64_t state;
static uint32_t below(uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t) (state >> 33) % n;
}

static const int block_bytes[] = { [PANEL_Q4_1] = 20, [PANEL_Q5_1] = 24, [PANEL_Q8_0] = 34, [PANEL_Q5_0] = 22 };

static float widened(uint16_t half) { /* normal numbers alone */
    return (half & 0x8000 ? -1.0f : 1.0f) * ldexpf((float) ((half & 0x3ff) | 0x400), ((half >> 10) & 31) - 25);
}
static float half_at(const char * at) {
    uint16_t half;
    memcpy(&half, at, 2);
    return widened(half);
}
static void put_half(char * at) {
    const uint16_t half = (uint16_t) (below(2) << 15 | (5 + below(14)) << 10 | below(1024));
    memcpy(at, &half, 2);
}

/* A weight of a block, by the file format's own description. */
static int weight_at(enum panel_type type, const char * block, int i) {
    if (type == PANEL_Q8_0) return ((const signed char *) block)[2 + i];
    const int is_signed = panel_is_signed(type), fifth = type == PANEL_Q5_1 || type == PANEL_Q5_0;
    const unsigned char * bits = (const unsigned char *) block + (is_signed ? 2 : 4), * nibbles = bits + (fifth ? 4 : 0);
    int value = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
    if (fifth) value |= (bits[i / 8] >> (i % 8) & 1) << 4;
    return value - (is_signed ? 16 : 0);
}

static float expected(enum panel_type type, const char * weight, const char * x, int n_blocks) {
    float lanes[8] = { 0 }, least = 0;
    for (int b = 0; b < n_blocks; ++b) {
        const char * w = weight + b * block_bytes[type], * y = x + b * (panel_is_signed(type) ? 34 : 36);
        const char * q = y + (panel_is_signed(type) ? 2 : 4);
        const float both = half_at(w) * half_at(y);
        for (int i = 0; i < 8; ++i) {
            int sum = 0;
            for (int j = 4 * i; j < 4 * i + 4; ++j) sum += weight_at(type, w, j) * ((const signed char *) q)[j];
            lanes[i] = fmaf(both, (float) sum, lanes[i]);
        }
        if (!panel_is_signed(type)) least = fmaf(half_at(w + 2), half_at(y + 2), least);
    }
    const float even = (lanes[0] + lanes[4]) + (lanes[2] + lanes[6]);
    const float odd = (lanes[1] + lanes[5]) + (lanes[3] + lanes[7]);
    return panel_is_signed(type) ? even + odd : even + odd + least;
}

/* A byte of weights: any, or of the least and the greatest that four, five and eight bits hold. */
static char weight_byte(int is_extreme) {
    static const unsigned char extremes[] = { 0, 0xff, 0x80, 0x7f };
    return (char) (is_extreme ? extremes[below(4)] : below(256));
}

/* Of activations: ggml packs to -127..127. */
static char activation(int is_extreme) {
    return (char) (is_extreme ? (below(8) ? 127 : -127) : (int) below(255) - 127);
}

#define CHECK(condition, ...) if (!(condition)) return printf(__VA_ARGS__), puts(""), 1

static int check(const struct panel_kernel * kernel, enum panel_type type, int seed) {
    const int n_blocks = 1 + (int) below(20), n_rows = 1 + (int) below((uint32_t) kernel->n_lanes);
    const int n_tokens = (int) below(9), x_block = panel_is_signed(type) ? 34 : 36;
    const size_t stride = (size_t) (n_blocks * block_bytes[type]) + 2 * below(20);
    const size_t x_bytes = panel_x_bytes(type, n_blocks), packed_bytes = (size_t) (n_blocks * x_block);
    const size_t x_stride = x_bytes + 4 * below(5);
    const int64_t out_stride = n_rows + (int64_t) below(5);
    const int is_extreme = below(3) == 0;
    /* every allocation ends where the last byte is that may be touched */
    char * weight = malloc(stride * (size_t) (n_rows - 1) + (size_t) (n_blocks * block_bytes[type]));
    char * packed = malloc(packed_bytes * (size_t) n_tokens + 1);
    char * x = malloc(n_tokens ? x_stride * (size_t) (n_tokens - 1) + x_bytes : 1);
    float * out = malloc(n_tokens ? ((size_t) (out_stride * (n_tokens - 1)) + (size_t) n_rows) * sizeof(float) : 1);
    void * memory = malloc(panel_bytes(kernel->n_lanes, n_blocks));
    for (int r = 0; r < n_rows; ++r) {
        for (int b = 0; b < n_blocks; ++b) {
            char * block = weight + (size_t) r * stride + b * block_bytes[type];
            for (int i = 0; i < block_bytes[type]; ++i) block[i] = weight_byte(is_extreme);
            put_half(block);
            if (!panel_is_signed(type)) put_half(block + 2);
        }
    }
    for (int t = 0; t < n_tokens; ++t) {
        for (int b = 0; b < n_blocks; ++b) {
            char * block = packed + (size_t) t * packed_bytes + b * x_block;
            for (int i = 0; i < x_block; ++i) block[i] = activation(is_extreme);
            put_half(block);
            if (!panel_is_signed(type)) put_half(block + 2);
        }
        /* as joint products do: ggml's form is the end of the memory that it is spread over */
        char * row = x + (size_t) t * x_stride, * end = row + x_bytes - packed_bytes;
        memcpy(end, packed + (size_t) t * packed_bytes, packed_bytes);
        kernel->spread(type, end, row, n_blocks);
    }
    kernel->multiply(type, weight, stride, n_rows, n_blocks, x, x_stride, n_tokens, out, out_stride, memory);
    for (int t = 0; t < n_tokens; ++t) {
        for (int r = 0; r < n_rows; ++r) {
            const float wanted =
                expected(type, weight + (size_t) r * stride, packed + (size_t) t * packed_bytes, n_blocks);
            const float found = out[t * out_stride + r];
            CHECK(memcmp(&found, &wanted, sizeof(float)) == 0, "%s, type %d, seed %d: row %d of %d, token %d: %a, not %a",
                  kernel->name, (int) type, seed, r, n_rows, t, (double) found, (double) wanted);
        }
    }
    free(weight), free(packed), free(x), free(out), free(memory);
    return 0;
}

static float way_off;
static void dot(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc) {
    (void) bs, (void) bx, (void) by, (void) nrc;
    *s = expected(PANEL_Q4_1, x, y, n / PANEL_BLOCK);
    *s = nextafterf(*s, *s + way_off);
}
static void pack(const float * x, void * y, int64_t k) {
    for (int64_t b = 0; b < k / PANEL_BLOCK; ++b) {
        char * block = (char *) y + b * 36;
        const uint16_t scale = 0x2400, sum = 0x3c00; /* 2^-6 and 1: any numbers will do */
        memcpy(block, &scale, 2), memcpy(block + 2, &sum, 2);
        for (int i = 0; i < PANEL_BLOCK; ++i) block[4 + i] = (char) (x[b * PANEL_BLOCK + i] * 60);
    }
}

int main(int argc, char ** argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 100;
    const struct panel_kernel * widest = panel_kernel_of_processor(), * kernels[4];
    int n_kernels = 0;
    if (widest == NULL) return puts("no panels for this processor"), 2;
    kernels[n_kernels++] = &panel_kernel_avx2;
#if PANEL_HAS_AVXVNNI
    if (__builtin_cpu_supports("avxvnni")) kernels[n_kernels++] = &panel_kernel_avxvnni;
#endif
#if PANEL_HAS_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) kernels[n_kernels++] = &panel_kernel_avx512bw;
    if (widest == &panel_kernel_avx512) kernels[n_kernels++] = widest;
#endif
    for (int k = 0; k < n_kernels; ++k) {
        for (int i = 0; i < n; ++i) {
            state = (uint64_t) i + 1;
            for (enum panel_type type = PANEL_Q4_1; type <= PANEL_Q5_0; ++type) {
                if (check(kernels[k], type, i)) return 1;
            }
        }
        CHECK(panel_agrees(kernels[k], PANEL_Q4_1, dot, pack), "%s does not agree with its own order", kernels[k]->name);
        way_off = 1;
        CHECK(!panel_agrees(kernels[k], PANEL_Q4_1, dot, pack), "%s agrees with a last bit off", kernels[k]->name);
        way_off = 0;
    }
    printf("%d settings are right\n", n);
    return 0;
}
