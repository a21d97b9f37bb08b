/* Products of a weight with many activations by panels: see panel_products.inc. */
#ifndef GGML_ENGINE_PANEL_PRODUCTS_H
#define GGML_ENGINE_PANEL_PRODUCTS_H

#include <stddef.h>
#include <stdint.h>

/* Which compilers know the instructions, and their names at run time. */
#if defined(__x86_64__) && defined(__clang__)
#define PANEL_HAS_AVX512 1
#elif defined(__x86_64__) && defined(__GNUC__)
#define PANEL_HAS_AVX512 (__GNUC__ >= 8)
#define PANEL_HAS_AVXVNNI (__GNUC__ >= 11)
#endif

enum {
    PANEL_BLOCK = 32, /* weights that share a scale, in all of these types */
    PANEL_QUADS = 8,  /* of a block: what an instruction multiplies and sums for one row */
};

/* Types whose blocks are unpacked into panels. Those without a least value are signed. */
enum panel_type { PANEL_NONE, PANEL_Q4_1, PANEL_Q5_1, PANEL_Q8_0, PANEL_Q5_0 };

/* 32 activations of a token as the multiplication reads them, for types with a least value and for signed ones.
   Weights of these are shifted to be unsigned, or they are 16 bits wide: see panel_products.inc. */
struct panel_x_least {
    float d, s; /* ggml's scale, and its scale times the sum */
    int8_t q[PANEL_BLOCK];
};
struct panel_x_signed {
    float d;
    union {
        struct {
            int32_t start[PANEL_QUADS]; /* the sum of a quad, times minus what its weights are shifted by */
            int8_t q[PANEL_BLOCK];
        } shifted;
        int16_t wide[PANEL_BLOCK]; /* of a quad the first, third, second and fourth */
    };
};

struct panel_kernel {
    const char * name;
    int n_lanes; /* rows of a panel */
    /* A row of activations in ggml's form, q8_1 or q8_0, into a panel's; the former may be the end of the latter's memory. */
    void (*spread)(enum panel_type type, const void * packed, void * x, int64_t n_blocks);
    /* Up to n_lanes rows of a weight, times tokens: out[t * out_stride + row]. The memory holds panel_bytes. */
    void (*multiply)(
        enum panel_type type, const char * weight, size_t weight_stride, int n_rows, int64_t n_blocks, const char * x,
        size_t x_stride, int64_t n_tokens, float * out, int64_t out_stride, void * memory);
};

static inline int panel_is_signed(enum panel_type type) { return type == PANEL_Q8_0 || type == PANEL_Q5_0; }

/* Of 32 weights in a file. */
static inline int panel_block_bytes(enum panel_type type) {
    static const int n_bytes[] = {
        [PANEL_Q4_1] = 4 + 16, [PANEL_Q5_1] = 4 + 4 + 16, [PANEL_Q8_0] = 2 + 32, [PANEL_Q5_0] = 2 + 4 + 16,
    };
    return n_bytes[type];
}

static inline size_t panel_x_bytes(enum panel_type type, int64_t n_blocks) {
    return (size_t) n_blocks * (panel_is_signed(type) ? sizeof(struct panel_x_signed) : sizeof(struct panel_x_least));
}

/* Scales, least values and quads of as many rows as a panel has. */
static inline size_t panel_bytes(int n_lanes, int64_t n_blocks) {
    return (size_t) n_blocks * (size_t) n_lanes * (PANEL_BLOCK + 2 * sizeof(float));
}

extern const struct panel_kernel panel_kernel_avx2, panel_kernel_avxvnni, panel_kernel_avx512bw, panel_kernel_avx512;

/* The widest that this processor has, NULL without any. */
const struct panel_kernel * panel_kernel_of_processor(void);

/* ggml's own functions of a type (ggml_type_traits_cpu). */
typedef void (*panel_pack)(const float * x, void * y, int64_t k);
typedef void (*panel_dot)(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);

/* Whether random rows come out as ggml's own product of two rows makes them, to the bit. Activations are finite: of NaN
   ggml's packing may make -128, whose sign its signed products lose. It depends on how ggml was
   compiled: with which instructions, and whether these fuse products with sums. */
int panel_agrees(const struct panel_kernel * kernel, enum panel_type type, panel_dot dot, panel_pack pack);

#endif
