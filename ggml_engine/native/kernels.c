/* The module of Python that everything compiled comes in: as addresses for ggml the attention that suits this processor,
   joint products, and the panels that these multiply by; as functions of Python's the search for the best logits
   and the filter of the libraries' log. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "best_logits.h"
#include "cell_attention.h"
#include "joint_products.h"
#include "log_filter.h"
#include "panel_products.h"
#include "processor.h"

static const struct cell_kernel * choose(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (processor_has_avx2_fma_f16c()) return &cell_kernel_avx2;
#elif defined(__aarch64__) && defined(__GNUC__)
    return &cell_kernel_neon;
#endif
    return NULL;
}

PyDoc_STRVAR(attention_doc, "cell_attention()\n--\n\n"
                         "(name, floats in a vector, address of attend, address of merge), or None without one for "
                         "this processor.");

static PyObject * attention(PyObject * self, PyObject * args) {
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

PyDoc_STRVAR(joint_scratch_doc, "joint_scratch(params, n_dims, n_tokens, /)\n--\n\n"
                                "How many floats of scratch follow what an operation of these parameters writes.");

static PyObject * joint_scratch(PyObject * self, PyObject * args) {
    Py_buffer given;
    Py_ssize_t n_dims, n_tokens;
    struct joint_products_params params;
    (void) self;
    if (!PyArg_ParseTuple(args, "y*nn", &given, &n_dims, &n_tokens)) return NULL;
    const int fits = given.len == (Py_ssize_t) sizeof(params) && n_dims > 0 && n_tokens > 0;
    if (fits) memcpy(&params, given.buf, sizeof(params));
    PyBuffer_Release(&given);
    if (!fits || params.n_weights < 1 || params.n_weights > JOINT_MOST_WEIGHTS) {
        PyErr_Format(PyExc_ValueError, "joint_scratch: %zd bytes of parameters, %zd dimensions, %zd tokens", given.len,
                     n_dims, n_tokens);
        return NULL;
    }
    return PyLong_FromSize_t(joint_scratch_floats(&params, (size_t) n_dims, (size_t) n_tokens));
}

PyDoc_STRVAR(panels_doc, "panel_products()\n--\n\n"
                         "(name, address, bytes of 32 activations for types with a least value and for signed ones), or "
                         "None without any for this processor.");

static PyObject * panels(PyObject * self, PyObject * args) {
    (void) self, (void) args;
    const struct panel_kernel * found = panel_kernel_of_processor();
    if (found == NULL) Py_RETURN_NONE;
    return Py_BuildValue("(sKii)", found->name, (unsigned long long) (uintptr_t) found,
                         (int) sizeof(struct panel_x_least), (int) sizeof(struct panel_x_signed));
}

PyDoc_STRVAR(agrees_doc, "panel_agrees(number, dot, pack, /)\n--\n\n"
                         "Whether panels of the type of this number multiply as ggml's functions at these addresses, to the bit.");

static PyObject * agrees(PyObject * self, PyObject * args) {
    int type;
    unsigned long long dot, pack;
    (void) self;
    if (!PyArg_ParseTuple(args, "iKK", &type, &dot, &pack)) return NULL;
    const struct panel_kernel * found = panel_kernel_of_processor();
    if (type <= PANEL_NONE || type > PANEL_Q5_0 || dot == 0 || pack == 0) {
        PyErr_Format(PyExc_ValueError, "panel_agrees: type %d of 1 to %d and two addresses", type, PANEL_Q5_0);
        return NULL;
    }
    if (found == NULL) Py_RETURN_FALSE;
#if defined(__GNUC__)
    return PyBool_FromLong(panel_agrees(found, (enum panel_type) type, (panel_dot) (uintptr_t) dot,
                                        (panel_pack) (uintptr_t) pack));
#else
    Py_RETURN_FALSE;
#endif
}

PyDoc_STRVAR(filter_doc, "filter_log(least, callback, /)\n--\n\n"
                         "Lets lines of ggml's level `least` and above go on to the callback at this address; the address of "
                         "the callback that does, or None where no compiler made it.");

static PyObject * filter_log(PyObject * self, PyObject * args) {
    int least;
    unsigned long long callback;
    (void) self;
    if (!PyArg_ParseTuple(args, "iK", &least, &callback)) return NULL;
#if defined(__GNUC__)
    log_filter_set(least, (log_callback) (uintptr_t) callback);
    return PyLong_FromUnsignedLongLong((unsigned long long) (uintptr_t) log_filter);
#else
    Py_RETURN_NONE;
#endif
}

PyDoc_STRVAR(best_doc, "best_logits(row, n_tokens, n_best)\n--\n\n"
                       "The ids and the logits of the n_best largest of the first n_tokens of a row f32, as bytes; "
                       "None where some are not finite.");

static PyObject * best(PyObject * self, PyObject * const * args, Py_ssize_t n_args) {
    (void) self;
    if (n_args != 3) {
        PyErr_SetString(PyExc_TypeError, "best_logits takes a row and two numbers");
        return NULL;
    }
    const Py_ssize_t n = PyLong_AsSsize_t(args[1]);
    if (n == -1 && PyErr_Occurred()) return NULL;
    const Py_ssize_t k = PyLong_AsSsize_t(args[2]);
    if (k == -1 && PyErr_Occurred()) return NULL;
    Py_buffer row;
    if (PyObject_GetBuffer(args[0], &row, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return NULL;
    PyObject * made = NULL;
    struct best_logit * found = NULL;
    if (row.format == NULL || strcmp(row.format, "f") != 0) {
        PyErr_SetString(PyExc_TypeError, "a row of logits is f32");
        goto done;
    }
    if (k < 1 || k > n || n > INT32_MAX || n > row.len / (Py_ssize_t) sizeof(float)) {
        PyErr_Format(PyExc_ValueError, "the best %zd of %zd logits, of %zd bytes", k, n, row.len);
        goto done;
    }
    found = malloc((size_t) k * sizeof(struct best_logit));
    if (found == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    const int status = best_logits(row.buf, (size_t) n, (size_t) k, found);
    if (status < 0) {
        PyErr_NoMemory();
    } else if (status == 0) {
        made = Py_NewRef(Py_None);
    } else {
        PyObject * ids = PyBytes_FromStringAndSize(NULL, k * (Py_ssize_t) sizeof(int32_t));
        PyObject * logits = PyBytes_FromStringAndSize(NULL, k * (Py_ssize_t) sizeof(float));
        if (ids != NULL && logits != NULL) {
            int32_t * to_ids = (int32_t *) PyBytes_AS_STRING(ids);
            float * to_logits = (float *) PyBytes_AS_STRING(logits);
            for (Py_ssize_t i = 0; i < k; i++) to_ids[i] = found[i].id, to_logits[i] = found[i].logit;
            made = PyTuple_Pack(2, ids, logits);
        }
        Py_XDECREF(ids);
        Py_XDECREF(logits);
    }
done:
    free(found);
    PyBuffer_Release(&row);
    return made;
}

static PyMethodDef methods[] = {
    {"cell_attention", attention, METH_NOARGS, attention_doc},
    {"scratch_floats", scratch_floats, METH_VARARGS, scratch_doc},
    {"joint_products", joint, METH_NOARGS, joint_doc},
    {"joint_scratch", joint_scratch, METH_VARARGS, joint_scratch_doc},
    {"panel_products", panels, METH_NOARGS, panels_doc},
    {"panel_agrees", agrees, METH_VARARGS, agrees_doc},
    {"filter_log", filter_log, METH_VARARGS, filter_doc},
    {"best_logits", (PyCFunction) (void (*)(void)) best, METH_FASTCALL, best_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_kernels",
    .m_doc = "What of the package is compiled.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__kernels(void) {
    PyObject * made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    if (PyModule_AddIntConstant(made, "SOURCES_CRC", SOURCES_CRC) < 0 ||
        PyModule_AddIntConstant(made, "TENSOR_BYTES", sizeof(struct ggml_tensor)) < 0 ||
        PyModule_AddIntConstant(made, "ATTENTION_PARAMS_BYTES", sizeof(struct cell_attention_params)) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
