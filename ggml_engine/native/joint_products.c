/* Products of several weights with the same few activations, the norm before them and the sum after them included.

   ggml takes a norm, each product and a sum as operations of their own, and its threads wait for each other after every
   one of them, in a product twice. Of one token there is little to do between. Here each thread norms and packs the
   activations for itself, which is less than a wait, and then takes rows of the weights as long as there are any.

   Row by row the numbers are those of ggml: its own functions pack and multiply, and the norm sums in the same order.
   Nothing here allocates. */
#include "joint_products.h"

#if defined(__GNUC__)
#include <math.h>
#include <string.h>

struct joint_input {
    const float * rows; /* f32 [tokens][k] */
    size_t stride;      /* in bytes from one token to the next */
    const char * forms[JOINT_MOST_WEIGHTS];
};

static void norm(
    float * y, const float * x, const float * weight, int64_t n, float eps) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += (double) (x[i] * x[i]);
    const float mean = (float) (sum / (double) n);
    const float scale = 1.0f / sqrtf(mean + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

/* What a thread needs of the activations, in its own scratch. */
static struct joint_input take_input(
    const struct ggml_tensor * dst, const struct joint_products_params * p, float * memory) {
    const struct ggml_tensor * x = dst->src[0];
    const int64_t n_dims = x->ne[0], n_tokens = x->ne[1];
    struct joint_input in = { .rows = x->data, .stride = x->nb[1] };
    if (p->has_norm) {
        const float * weight = dst->src[1 + p->n_weights]->data;
        for (int64_t t = 0; t < n_tokens; ++t) {
            norm(memory + t * n_dims, (const float *) ((const char *) x->data + (size_t) t * x->nb[1]), weight, n_dims,
                 p->eps);
        }
        in.rows = memory;
        in.stride = (size_t) n_dims * sizeof(float);
        memory += joint_whole_lines((size_t) (n_dims * n_tokens));
    }
    for (int i = 0; i < JOINT_MOST_WEIGHTS; ++i) {
        if (p->form_bytes[i] <= 0) continue;
        in.forms[i] = (const char *) memory;
        for (int64_t t = 0; t < n_tokens; ++t) {
            p->pack[i]((const float *) ((const char *) in.rows + (size_t) t * in.stride),
                       (char *) memory + t * p->form_bytes[i], n_dims);
        }
        memory += joint_form_floats(p, i, (size_t) n_tokens);
    }
    return in;
}

/* Rows [begin, end) of weight i; its first output is `first` of `n_rows` a token. */
static void multiply(
    struct ggml_tensor * dst, const struct joint_products_params * p, const struct joint_input * in, int i,
    int64_t begin, int64_t end, int64_t first, int64_t n_rows) {
    const struct ggml_tensor * weight = dst->src[1 + i];
    const int n_dims = (int) weight->ne[0], form = p->form[i];
    const char * x = form < 0 ? (const char *) in->rows : in->forms[form];
    const size_t stride = form < 0 ? in->stride : (size_t) p->form_bytes[form];
    for (int64_t t = 0; t < dst->src[0]->ne[1]; ++t) {
        float * out = (float *) dst->data + t * n_rows + first;
        for (int64_t r = begin; r < end; ++r) {
            p->dot[i](n_dims, out + r, 0, (const char *) weight->data + (size_t) r * weight->nb[1], 0,
                      x + (size_t) t * stride, 0, 1);
        }
        if (p->has_sum) {
            const struct ggml_tensor * added = dst->src[1 + p->n_weights + p->has_norm];
            const float * row = (const float *) ((const char *) added->data + (size_t) t * added->nb[1]) + first;
            for (int64_t r = begin; r < end; ++r) out[r] += row[r];
        }
    }
}

void joint_products(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    struct joint_products_params * p = userdata;
    const struct ggml_tensor * x = dst->src[0];
    int64_t n_rows = 0, n_items = 0;
    for (int i = 0; i < p->n_weights; ++i) n_rows += dst->src[1 + i]->ne[1];
    /* ggml's pieces: 64 rows, fewer where these would be too few for the threads to end together */
    const int64_t chunk = n_rows < (int64_t) 64 * 4 * nth ? 16 : 64;
    for (int i = 0; i < p->n_weights; ++i) n_items += (dst->src[1 + i]->ne[1] + chunk - 1) / chunk;
    float * out = dst->data;
    const int64_t n_out = n_rows * x->ne[1];
    const size_t n_scratch = joint_scratch_floats(p, (size_t) x->ne[0], (size_t) x->ne[1]);
    if (dst->ne[0] < n_out + (int64_t) n_scratch) {
        for (int64_t i = ith; i < n_out; i += nth) out[i] = NAN;
    } else if (ith < p->n_slices) {
        const size_t slice = joint_slice_floats(p, (size_t) x->ne[0], (size_t) x->ne[1]);
        float * memory = (float *) (((uintptr_t) (out + n_out) + 63) & ~(uintptr_t) 63) + (size_t) ith * slice;
        const struct joint_input in = take_input(dst, p, memory);
        for (int64_t item; (item = __atomic_fetch_add(&p->next_item, 1, __ATOMIC_RELAXED)) < n_items;) {
            int64_t first = 0, rest = item;
            int i = 0;
            for (int64_t n; rest >= (n = (dst->src[1 + i]->ne[1] + chunk - 1) / chunk); ++i) {
                rest -= n;
                first += dst->src[1 + i]->ne[1];
            }
            const int64_t begin = rest * chunk, all = dst->src[1 + i]->ne[1];
            multiply(dst, p, &in, i, begin, begin + chunk < all ? begin + chunk : all, first, n_rows);
        }
    }
    /* ggml's threads wait for each other after every operation: the last one leaves the numbers as they were */
    if (__atomic_add_fetch(&p->n_done, 1, __ATOMIC_ACQ_REL) == nth) {
        __atomic_store_n(&p->next_item, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&p->n_done, 0, __ATOMIC_RELEASE);
    }
}
#endif
