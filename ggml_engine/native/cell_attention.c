/* The module of Python that the compiled operations come in, as addresses for ggml: the attention that suits this
   processor, and joint products. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cell_attention.h"
#include "joint_products.h"

static const struct cell_kernel * choose(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        return &cell_kernel_avx2;
    }
#elif defined(__aarch64__) && defined(__GNUC__)
    return &cell_kernel_neon;
#endif
    return NULL;
}

PyDoc_STRVAR(kernel_doc, "kernel()\n--\n\n"
                         "(name, floats in a vector, address of attend, address of merge), or None without one for "
                         "this processor.");

static PyObject * kernel(PyObject * self, PyObject * args) {
    (void) self, (void) args;
    const struct cell_kernel * found = choose();
    if (found == NULL) Py_RETURN_NONE;
    return Py_BuildValue("(siKK)", found->name, found->n_lanes, (unsigned long long) (uintptr_t) found->attend,
                         (unsigned long long) (uintptr_t) found->merge);
}

PyDoc_STRVAR(scratch_doc, "scratch_floats(n_slices, n_queries, n_dims, n_dims_v)\n--\n\n"
                          "How many floats of scratch follow what attend writes.");

static PyObject * scratch_floats(PyObject * self, PyObject * args) {
    int n_slices, n_queries, n_dims, n_dims_v;
    (void) self;
    if (!PyArg_ParseTuple(args, "iiii", &n_slices, &n_queries, &n_dims, &n_dims_v)) return NULL;
    if (n_slices < 1 || n_queries < 1 || n_dims < 1 || n_dims_v < 1) {
        PyErr_SetString(PyExc_ValueError, "scratch_floats: every number must be at least 1");
        return NULL;
    }
    struct cell_attention_params params;
    params.n_slices = n_slices, params.n_queries = n_queries;
    return PyLong_FromSize_t(cell_scratch_floats(&params, (size_t) n_dims, (size_t) n_dims_v));
}

PyDoc_STRVAR(joint_doc, "joint_products()\n--\n\n"
                        "(most weights, bytes of the parameters, address), or None where no compiler made it.");

static PyObject * joint(PyObject * self, PyObject * args) {
    (void) self, (void) args;
#if defined(__GNUC__)
    return Py_BuildValue("(inK)", JOINT_MOST_WEIGHTS, (Py_ssize_t) sizeof(struct joint_products_params),
                         (unsigned long long) (uintptr_t) joint_products);
#else
    Py_RETURN_NONE;
#endif
}

static PyMethodDef methods[] = {
    {"kernel", kernel, METH_NOARGS, kernel_doc},
    {"scratch_floats", scratch_floats, METH_VARARGS, scratch_doc},
    {"joint_products", joint, METH_NOARGS, joint_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_cell_attention",
    .m_doc = "Attention over the cells of a pool.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__cell_attention(void) {
    PyObject * made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    if (PyModule_AddIntConstant(made, "PARAMS_BYTES", sizeof(struct cell_attention_params)) < 0 ||
        PyModule_AddIntConstant(made, "TENSOR_BYTES", sizeof(struct ggml_tensor)) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
