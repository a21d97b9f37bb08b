/* Products of several weights with the same few activations, the norm before them and the sum after them included.

   ggml takes a norm, each product and a sum as operations of their own, and its threads wait for each other after every
   one of them, in a product twice. Of one token there is little to do between. Here each thread norms and packs the
   activations for itself, which is less than a wait, and then takes rows of the weights as long as there are any. Of many
   tokens the threads pack some each, and wait once.

   Row by row the numbers are those of ggml: its own functions pack and multiply, or panels do (panel_products.inc), and
   the norm sums in the same order. Nothing here allocates. */
#include "joint_products.h"

#if defined(__GNUC__)
#include <math.h>
#include <string.h>

struct joint_input {
    float * rows;  /* f32 [tokens][k] */
    size_t stride; /* in bytes from one token to the next */
    char * forms[JOINT_MOST_WEIGHTS];
};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void norm(
    float * y, const float * x, const float * weight, int64_t n, float eps) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += (double) (x[i] * x[i]);
    const float mean = (float) (sum / (double) n);
    const float scale = 1.0f / sqrtf(mean + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

/* Where the activations lie that begin at `memory`. */
static struct joint_input place_input(
    const struct ggml_tensor * dst, const struct joint_products_params * p, float * memory) {
    const struct ggml_tensor * x = dst->src[0];
    const size_t n_dims = (size_t) x->ne[0], n_tokens = (size_t) x->ne[1];
    struct joint_input in = { .rows = x->data, .stride = x->nb[1] };
    if (p->has_norm) {
        in.rows = memory;
        in.stride = n_dims * sizeof(float);
        memory += joint_whole_lines(n_dims * n_tokens);
    }
    for (int i = 0; i < JOINT_MOST_WEIGHTS; ++i) {
        if (p->form_bytes[i] <= 0) continue;
        in.forms[i] = (char *) memory;
        memory += joint_form_floats(p, i, n_tokens);
    }
    return in;
}

static void take_token(
    const struct ggml_tensor * dst, const struct joint_products_params * p, const struct joint_input * in, int64_t t) {
    const struct ggml_tensor * x = dst->src[0];
    const int64_t n_dims = x->ne[0];
    float * row = (float *) ((char *) in->rows + (size_t) t * in->stride);
    if (p->has_norm) {
        const float * weight = dst->src[1 + p->n_weights]->data;
        norm(row, (const float *) ((const char *) x->data + (size_t) t * x->nb[1]), weight, n_dims, p->eps);
    }
    for (int i = 0; i < JOINT_MOST_WEIGHTS; ++i) {
        if (p->form_bytes[i] <= 0) continue;
        char * form = in->forms[i] + t * p->form_bytes[i];
        if (p->spreads[i] == PANEL_NONE) {
            p->pack[i](row, form, n_dims);
        } else {
            char * packed = form + p->form_bytes[i] - p->packed_bytes[i];
            p->pack[i](row, packed, n_dims);
            p->kernel->spread((enum panel_type) p->spreads[i], packed, form, n_dims / PANEL_BLOCK);
        }
    }
}

/* Of all tokens; where they are shared, all threads are here at once, as in any operation of ggml. */
static void take_input(const struct ggml_tensor * dst, struct joint_products_params * p, const struct joint_input * in) {
    const int32_t n_tokens = (int32_t) dst->src[0]->ne[1];
    if (!p->is_shared) {
        for (int32_t t = 0; t < n_tokens; ++t) take_token(dst, p, in, t);
        return;
    }
    for (int32_t t; (t = __atomic_fetch_add(&p->next_token, 1, __ATOMIC_RELAXED)) < n_tokens;) {
        take_token(dst, p, in, t);
        __atomic_fetch_add(&p->n_taken, 1, __ATOMIC_RELEASE);
    }
    while (__atomic_load_n(&p->n_taken, __ATOMIC_ACQUIRE) < n_tokens) relax();
}

/* Rows [begin, end) of weight i; its first output is `first` of `n_rows` a token. */
static void multiply(
    struct ggml_tensor * dst, const struct joint_products_params * p, const struct joint_input * in, int i,
    int64_t begin, int64_t end, int64_t first, int64_t n_rows, void * panel) {
    const struct ggml_tensor * weight = dst->src[1 + i];
    const int n_dims = (int) weight->ne[0], form = p->form[i];
    const int64_t n_tokens = dst->src[0]->ne[1];
    const char * x = form < 0 ? (const char *) in->rows : in->forms[form];
    const size_t stride = form < 0 ? in->stride : (size_t) p->form_bytes[form];
    if (p->panels[i] != PANEL_NONE) {
        const int n_lanes = p->kernel->n_lanes;
        for (int64_t r = begin; r < end; r += n_lanes) {
            p->kernel->multiply((enum panel_type) p->panels[i], (const char *) weight->data + (size_t) r * weight->nb[1],
                                weight->nb[1], end - r < n_lanes ? (int) (end - r) : n_lanes, n_dims / PANEL_BLOCK, x,
                                stride, n_tokens, (float *) dst->data + first + r, n_rows, panel);
        }
    }
    for (int64_t t = 0; t < n_tokens; ++t) {
        float * out = (float *) dst->data + t * n_rows + first;
        for (int64_t r = begin; r < end && p->panels[i] == PANEL_NONE; ++r) {
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
        const size_t n_input = joint_input_floats(p, (size_t) x->ne[0], (size_t) x->ne[1]);
        const size_t n_inputs = p->is_shared ? 1 : (size_t) p->n_slices;
        float * memory = (float *) (((uintptr_t) (out + n_out) + 63) & ~(uintptr_t) 63);
        const struct joint_input in = place_input(dst, p, memory + (p->is_shared ? 0 : (size_t) ith * n_input));
        float * panel = memory + n_inputs * n_input + (size_t) ith * joint_panel_floats(p, (size_t) x->ne[0]);
        take_input(dst, p, &in);
        for (int64_t item; (item = __atomic_fetch_add(&p->next_item, 1, __ATOMIC_RELAXED)) < n_items;) {
            int64_t first = 0, rest = item;
            int i = 0;
            for (int64_t n; rest >= (n = (dst->src[1 + i]->ne[1] + chunk - 1) / chunk); ++i) {
                rest -= n;
                first += dst->src[1 + i]->ne[1];
            }
            const int64_t begin = rest * chunk, all = dst->src[1 + i]->ne[1];
            multiply(dst, p, &in, i, begin, begin + chunk < all ? begin + chunk : all, first, n_rows, panel);
        }
    }
    /* ggml's threads wait for each other after every operation: the last one leaves the numbers as they were */
    if (__atomic_add_fetch(&p->n_done, 1, __ATOMIC_ACQ_REL) == nth) {
        __atomic_store_n(&p->next_item, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&p->next_token, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&p->n_taken, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&p->n_done, 0, __ATOMIC_RELEASE);
    }
}
#endif
