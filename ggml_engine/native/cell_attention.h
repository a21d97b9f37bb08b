/* Attention over the cells of a pool, as custom operations of ggml. What the two sides share; see cell_attention.inc. */
#ifndef GGML_ENGINE_CELL_ATTENTION_H
#define GGML_ENGINE_CELL_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

/* as in ggml.h; a test compares the Python side's declaration of it with the installed header */
struct ggml_tensor {
    int type;
    void * buffer;
    int64_t ne[4];
    size_t nb[4];
    int op;
    int32_t op_params[16];
    int32_t flags;
    struct ggml_tensor * src[10];
    struct ggml_tensor * view_src;
    size_t view_offs;
    void * data;
    char name[64];
    void * extra;
    char padding[8];
};

typedef void (*cell_to_float)(const void * x, float * y, int64_t k);

/* How rows are stored. */
enum cell_rows { CELL_ROWS_CONVERTED = 0, CELL_ROWS_F16 = 1, CELL_ROWS_F32 = 2 };

/* What is constant for a graph's operation: ggml hands its address to every thread. */
struct cell_attention_params {
    float scale;   /* of the scores */
    float softcap; /* 0: none */
    int32_t n_head_kv;
    int32_t n_splits; /* parts that the rows of every tile are cut into, so that few tiles occupy many threads */
    int32_t k_rows, v_rows;               /* enum cell_rows */
    cell_to_float k_to_float, v_to_float; /* of converted ones: for n elements that are whole blocks */
};

/* One row of `tiles` in the plan: tokens [token, token + n_tokens) attend to n_spans spans from `span` on. */
struct cell_tile { int32_t token, n_tokens, span, n_spans; };

/* Rows [row, row + n_rows) hold consecutive positions from `position` on, and belong to these tokens' sequences. */
struct cell_span { int32_t row, n_rows, position, token, n_tokens; };

/* The plan, i32: n_tiles, offset of the tiles, offset of the spans, then for each token the position up to which and
   the one from which on it sees: [n_tokens] and [n_tokens]. */
enum { CELL_PLAN_HEAD = 3 };

typedef void (*cell_op)(struct ggml_tensor * dst, int ith, int nth, void * userdata);

struct cell_kernel { const char * name; int n_lanes; cell_op attend, merge; };

extern const struct cell_kernel cell_kernel_avx2;

#endif
