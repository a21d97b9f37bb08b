/* ggml's tensor, for custom operations: they get the address of the one that they compute. */
#ifndef GGML_ENGINE_GGML_TENSOR_H
#define GGML_ENGINE_GGML_TENSOR_H

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

#endif
