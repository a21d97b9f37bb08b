/* Which panels suit this processor, and whether they multiply as ggml does. */
#include "panel_products.h"

#include <string.h>

#include "processor.h"

const struct panel_kernel * panel_kernel_of_processor(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (!processor_has_avx2_fma_f16c()) return NULL;
#if PANEL_HAS_AVX512
    const int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) return &panel_kernel_avx512;
#endif
#if PANEL_HAS_AVXVNNI
    if (__builtin_cpu_supports("avxvnni")) return &panel_kernel_avxvnni;
#endif
#if PANEL_HAS_AVX512
    if (has_avx512) return &panel_kernel_avx512bw;
#endif
    return &panel_kernel_avx2;
#else
    return NULL;
#endif
}

#if defined(__GNUC__)
enum { CHECK_BLOCKS = 3, CHECK_ROWS = 17, CHECK_TOKENS = 4, CHECK_MOST_BLOCK_BYTES = 36, CHECK_MOST_LANES = 16 };

static uint32_t next_random(uint32_t * state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

int panel_agrees(const struct panel_kernel * kernel, enum panel_type type, panel_dot dot, panel_pack pack) {
    enum { N = CHECK_BLOCKS * PANEL_BLOCK };
    const int block_bytes = panel_block_bytes(type);
    _Alignas(64) char weight[CHECK_ROWS * CHECK_BLOCKS * CHECK_MOST_BLOCK_BYTES];
    _Alignas(64) char packed[CHECK_TOKENS][CHECK_BLOCKS * CHECK_MOST_BLOCK_BYTES];
    struct panel_x_signed x[CHECK_TOKENS][CHECK_BLOCKS]; /* the larger of both forms */
    float found[CHECK_TOKENS][CHECK_ROWS], wanted[CHECK_TOKENS][CHECK_ROWS], values[N];
    _Alignas(64) char memory[CHECK_BLOCKS * CHECK_MOST_LANES * (PANEL_BLOCK + 2 * sizeof(float))];
    const size_t stride = (size_t) (CHECK_BLOCKS * block_bytes);
    uint32_t state = 1;
    for (int i = 0; i < CHECK_ROWS * CHECK_BLOCKS; ++i) {
        char * block = weight + i * block_bytes;
        for (int j = 0; j < block_bytes; ++j) block[j] = (char) next_random(&state);
        for (int j = 0; j < (panel_is_signed(type) ? 1 : 2); ++j) { /* scales from 2^-7 to 1, of both signs */
            const uint16_t half = (uint16_t) ((next_random(&state) & 0x83ff) | (8 + next_random(&state) % 7) << 10);
            memcpy(block + 2 * j, &half, 2);
        }
    }
    for (int t = 0; t < CHECK_TOKENS; ++t) {
        for (int i = 0; i < N; ++i) values[i] = (float) ((int32_t) (next_random(&state) % 2001) - 1000) / 700.0f;
        pack(values, packed[t], N);
        kernel->spread(type, packed[t], x[t], CHECK_BLOCKS);
        for (int r = 0; r < CHECK_ROWS; ++r) {
            dot(N, &wanted[t][r], 0, weight + (size_t) r * stride, 0, packed[t], 0, 1);
        }
    }
    for (int r = 0; r < CHECK_ROWS; r += kernel->n_lanes) {
        const int n = CHECK_ROWS - r < kernel->n_lanes ? CHECK_ROWS - r : kernel->n_lanes;
        kernel->multiply(type, weight + (size_t) r * stride, stride, n, CHECK_BLOCKS, (const char *) x, sizeof(x[0]),
                         CHECK_TOKENS, &found[0][r], CHECK_ROWS, memory);
    }
    return memcmp(found, wanted, sizeof(found)) == 0;
}
#endif
