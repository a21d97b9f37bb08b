/* Attention over the cells of a pool, as custom operations of ggml: what the sides share; see cell_attention.inc. */
#ifndef GGML_ENGINE_CELL_ATTENTION_H
#define GGML_ENGINE_CELL_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "ggml_tensor.h"

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
    int32_t n_slices; /* pieces of scratch, of cell_slice_floats each: at most so many threads work at once */
    int32_t n_queries; /* that a piece has room for: tokens times the heads of a group */
    int32_t merges;    /* attend itself adds up the parts */
    cell_to_float k_to_float, v_to_float; /* of converted ones: for n elements that are whole blocks */
    int32_t next_item, n_done; /* items handed out, threads that are done: both 0 between two runs */
};

/* What attend writes is followed by its scratch in the same tensor, f32 [outputs + cell_scratch_floats], so that ggml's
   allocator owns it and an operation never asks for memory. Without n_splits the outputs are [values, heads, tokens],
   with it [values + 2, heads * tokens, n_splits], behind those where it merges. */
enum {
    CELL_BLOCK = 64, /* rows at a time: their scores stay in the first cache */
    CELL_MOST_LANES = 8,
    CELL_LINE = 16, /* floats that threads share a cache line by */
};

static inline size_t cell_whole_lines(size_t n_floats) { return (n_floats + CELL_LINE - 1) / CELL_LINE * CELL_LINE; }

/* Floats from one query's lane to the next: whole vectors from any query on. */
static inline size_t cell_ld(size_t n_queries) {
    return (n_queries + CELL_MOST_LANES - 1) / CELL_MOST_LANES * CELL_MOST_LANES + CELL_MOST_LANES;
}

/* Scratch of one thread, for so many queries of n_dims floats and values of n_dims_v; struct item has its parts. */
static inline size_t cell_slice_floats(size_t n_queries, size_t n_dims, size_t n_dims_v) {
    const size_t ld = cell_ld(n_queries);
    return cell_whole_lines(n_queries * n_dims) + cell_whole_lines(ld * n_dims) + cell_whole_lines(n_queries * n_dims_v)
           + 5 * cell_whole_lines(ld) + cell_whole_lines(ld * CELL_BLOCK) + cell_whole_lines(CELL_BLOCK * n_dims)
           + cell_whole_lines(CELL_BLOCK * n_dims_v);
}

static inline size_t cell_scratch_floats(const struct cell_attention_params * p, size_t n_dims, size_t n_dims_v) {
    return (size_t) p->n_slices * cell_slice_floats((size_t) p->n_queries, n_dims, n_dims_v) + CELL_LINE;
}

/* One row of `tiles` in the plan: tokens [token, token + n_tokens) attend to n_spans spans from `span` on. */
struct cell_tile { int32_t token, n_tokens, span, n_spans; };

/* Rows [row, row + n_rows) hold consecutive positions from `position` on, and belong to these tokens' sequences. */
struct cell_span { int32_t row, n_rows, position, token, n_tokens; };

/* The plan, i32, is checked before it is followed: what names tokens or rows that there are not gives NaN. It is
   n_tiles, offset of the tiles, offset of the spans, then for each token the position up to which and the one from
   which on it sees: [n_tokens] and [n_tokens]. */
enum { CELL_PLAN_HEAD = 3, CELL_TILE_NUMBERS = 4, CELL_SPAN_NUMBERS = 5 };

typedef void (*cell_op)(struct ggml_tensor * dst, int ith, int nth, void * userdata);

struct cell_kernel { const char * name; int n_lanes; cell_op attend, merge; };

extern const struct cell_kernel cell_kernel_avx2, cell_kernel_neon;

#endif
