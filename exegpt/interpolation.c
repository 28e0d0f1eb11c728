/* Linear interpolation on a rectangular grid, compiled: a search asks tables a hundred thousand times, and asking must
 * not cost a compiler's start. interpolation.pyi says what each function takes. */
#include "interpolation.h"

static PyObject *linear(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer views[4];
    if (!take_arrays(arguments, given, 4, "rrrw", views)) return NULL;
    const double *points = views[0].buf, *values = views[1].buf, *x = views[2].buf;
    double *out = views[3].buf;
    Py_ssize_t count = size_of(&views[0]), asked = size_of(&views[2]);
    int fits = size_of(&views[1]) == count && count && size_of(&views[3]) == asked;
    if (fits)
        for (Py_ssize_t n = 0; n < asked; n++) {
            Cell at = cell(points, count, x[n]);
            out[n] = larger(between(values[at.below], values[at.above], at.up), 0.0);
        }
    drop_arrays(views, 4);
    if (!fits) return misfit();
    Py_RETURN_NONE;
}

static PyObject *bilinear(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer views[6];
    if (!take_arrays(arguments, given, 6, "rrrrrw", views)) return NULL;
    const double *rows = views[0].buf, *columns = views[1].buf, *values = views[2].buf;
    const double *x = views[3].buf, *y = views[4].buf;
    double *out = views[5].buf;
    Py_ssize_t high = size_of(&views[0]), wide = size_of(&views[1]), asked = size_of(&views[3]);
    int fits = high && wide && size_of(&views[2]) == high * wide && size_of(&views[4]) == asked &&
               size_of(&views[5]) == asked;
    if (fits)
        for (Py_ssize_t n = 0; n < asked; n++)
            out[n] = within(values, wide, cell(rows, high, x[n]), cell(columns, wide, y[n]));
    drop_arrays(views, 6);
    if (!fits) return misfit();
    Py_RETURN_NONE;
}

static PyObject *linear_at(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer views[2];
    if (!take_arrays(arguments, given, 3, "rr", views)) return NULL;
    const double *points = views[0].buf, *values = views[1].buf;
    double x = PyFloat_AsDouble(arguments[2]), found = 0.0;
    Py_ssize_t count = size_of(&views[0]);
    int fits = count && size_of(&views[1]) == count;
    if (fits) {
        Cell at = cell(points, count, x);
        found = larger(between(values[at.below], values[at.above], at.up), 0.0);
    }
    drop_arrays(views, 2);
    return fits && !PyErr_Occurred() ? PyFloat_FromDouble(found) : misfit();
}

static PyObject *bilinear_at(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer views[3];
    if (!take_arrays(arguments, given, 5, "rrr", views)) return NULL;
    double x = PyFloat_AsDouble(arguments[3]), y = PyFloat_AsDouble(arguments[4]), found = 0.0;
    Py_ssize_t high = size_of(&views[0]), wide = size_of(&views[1]);
    int fits = high && wide && size_of(&views[2]) == high * wide;
    if (fits) found = within(views[2].buf, wide, cell(views[0].buf, high, x), cell(views[1].buf, wide, y));
    drop_arrays(views, 3);
    return fits && !PyErr_Occurred() ? PyFloat_FromDouble(found) : misfit();
}

static PyMethodDef functions[] = {
    FUNCTION(linear, "Values over one axis."),
    FUNCTION(bilinear, "Values over two axes."),
    FUNCTION(linear_at, "The value at one place on an axis."),
    FUNCTION(bilinear_at, "The value at one place on two axes."),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "interpolation",
    .m_doc = "Linear interpolation on a rectangular grid.",
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit_interpolation(void) { return PyModuleDef_Init(&module); }
