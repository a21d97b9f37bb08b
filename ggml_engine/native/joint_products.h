/* Products of several weights with the same few activations, as one custom operation of ggml; see joint_products.c. */
#ifndef GGML_ENGINE_JOINT_PRODUCTS_H
#define GGML_ENGINE_JOINT_PRODUCTS_H

#include "ggml_tensor.h"

enum {
    JOINT_MOST_WEIGHTS = 4,
    JOINT_LINE = 16, /* floats that threads share a cache line by */
};

/* ggml's own functions of a type (ggml_type_traits_cpu). */
typedef void (*joint_from_float)(const float * x, void * y, int64_t k);
typedef void (*joint_vec_dot)(
    int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);

/* What is constant for a graph's operation: ggml hands its address to every thread. The sources are the activations
   f32 [k, tokens], the weights [k, rows] each, then the norm's weight f32 [k] and what is added f32 [rows, tokens],
   where there are any. */
struct joint_products_params {
    float eps; /* of the norm */
    int32_t n_weights, has_norm, has_sum;
    int32_t n_slices;                     /* pieces of scratch: at most so many threads work at once */
    int32_t next_item, n_done;            /* items handed out, threads that are done: both 0 between two runs */
    int32_t form[JOINT_MOST_WEIGHTS];     /* of the activations that a weight is multiplied with: an index, or -1 for f32 */
    int64_t form_bytes[JOINT_MOST_WEIGHTS]; /* of a row of activations in a form */
    joint_from_float pack[JOINT_MOST_WEIGHTS]; /* into a form */
    joint_vec_dot dot[JOINT_MOST_WEIGHTS];     /* of a weight's row with activations */
};

/* The outputs f32 [all rows, tokens], weight after weight, are followed by the scratch in the same tensor. */
static inline size_t joint_whole_lines(size_t n_floats) {
    return (n_floats + JOINT_LINE - 1) / JOINT_LINE * JOINT_LINE;
}

static inline size_t joint_form_floats(const struct joint_products_params * p, int form, size_t n_tokens) {
    return joint_whole_lines((size_t) p->form_bytes[form] * n_tokens / sizeof(float) + 1);
}

/* Scratch of one thread: the normed activations, and every form. */
static inline size_t joint_slice_floats(const struct joint_products_params * p, size_t n_dims, size_t n_tokens) {
    size_t n = p->has_norm ? joint_whole_lines(n_dims * n_tokens) : 0;
    for (int i = 0; i < JOINT_MOST_WEIGHTS; ++i) {
        if (p->form_bytes[i] > 0) n += joint_form_floats(p, i, n_tokens);
    }
    return n;
}

static inline size_t joint_scratch_floats(const struct joint_products_params * p, size_t n_dims, size_t n_tokens) {
    return (size_t) p->n_slices * joint_slice_floats(p, n_dims, n_tokens) + JOINT_LINE;
}

void joint_products(struct ggml_tensor * dst, int ith, int nth, void * userdata);

#endif
