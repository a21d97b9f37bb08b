/* Products of several weights with the same few activations, as one custom operation of ggml; see joint_products.c. */
#ifndef GGML_ENGINE_JOINT_PRODUCTS_H
#define GGML_ENGINE_JOINT_PRODUCTS_H

#include "ggml_tensor.h"
#include "panel_products.h"

enum {
    JOINT_MOST_WEIGHTS = 4,
    JOINT_LINE = 16, /* floats that threads share a cache line by */
};

/* What is constant for a graph's operation: ggml hands its address to every thread. The sources are the activations
   f32 [k, tokens], the weights [k, rows] each, then the norm's weight f32 [k] and what is added f32 [rows, tokens],
   where there are any. */
struct joint_products_params {
    float eps; /* of the norm */
    int32_t n_weights, has_norm, has_sum;
    int32_t n_slices;    /* pieces of scratch: at most so many threads work at once */
    int32_t is_shared;   /* the threads take the activations together and wait for each other; else each has its own */
    int32_t next_item, n_done;   /* items handed out, threads that are done: both 0 between two runs */
    int32_t next_token, n_taken; /* tokens handed out, and taken: as these, where the activations are shared */
    int32_t form[JOINT_MOST_WEIGHTS];    /* of the activations that a weight is multiplied with: an index, or -1 for f32 */
    int32_t panels[JOINT_MOST_WEIGHTS];  /* enum panel_type of a weight that is multiplied by panels, else PANEL_NONE */
    int32_t spreads[JOINT_MOST_WEIGHTS]; /* the same of a form, for ggml's that is spread for panels */
    int64_t form_bytes[JOINT_MOST_WEIGHTS];   /* of a row of activations in a form */
    int64_t packed_bytes[JOINT_MOST_WEIGHTS]; /* of one that ggml has packed and that is not spread yet */
    panel_pack pack[JOINT_MOST_WEIGHTS];      /* into a form */
    panel_dot dot[JOINT_MOST_WEIGHTS];        /* of a weight's row with activations */
    const struct panel_kernel * kernel;       /* of the panels, where there are any */
};

/* The outputs f32 [all rows, tokens], weight after weight, are followed by the scratch in the same tensor. */
static inline size_t joint_whole_lines(size_t n_floats) {
    return (n_floats + JOINT_LINE - 1) / JOINT_LINE * JOINT_LINE;
}

static inline size_t joint_form_floats(const struct joint_products_params * p, int form, size_t n_tokens) {
    return joint_whole_lines((size_t) p->form_bytes[form] * n_tokens / sizeof(float) + 1);
}

/* The activations: normed, where there is a norm, and in every form. */
static inline size_t joint_input_floats(const struct joint_products_params * p, size_t n_dims, size_t n_tokens) {
    size_t n = p->has_norm ? joint_whole_lines(n_dims * n_tokens) : 0;
    for (int i = 0; i < JOINT_MOST_WEIGHTS; ++i) {
        if (p->form_bytes[i] > 0) n += joint_form_floats(p, i, n_tokens);
    }
    return n;
}

/* A panel of each thread. */
static inline size_t joint_panel_floats(const struct joint_products_params * p, size_t n_dims) {
    for (int i = 0; i < p->n_weights; ++i) {
        if (p->panels[i] == PANEL_NONE) continue;
        return joint_whole_lines(panel_bytes(p->kernel->n_lanes, (int64_t) n_dims / PANEL_BLOCK) / sizeof(float));
    }
    return 0;
}

static inline size_t joint_scratch_floats(const struct joint_products_params * p, size_t n_dims, size_t n_tokens) {
    const size_t n_inputs = p->is_shared ? 1 : (size_t) p->n_slices;
    return n_inputs * joint_input_floats(p, n_dims, n_tokens) + (size_t) p->n_slices * joint_panel_floats(p, n_dims) +
           JOINT_LINE;
}

void joint_products(struct ggml_tensor * dst, int ith, int nth, void * userdata);

#endif
