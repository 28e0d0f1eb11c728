/* Linear interpolation on a rectangular grid, compiled ahead: a search looks up tables a hundred thousand times, and
 * must not wait for a compiler. interpolation.pyi documents the arguments. */
#include "interpolation.h"

static PyObject *linear(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[4];
    if (!take_arrays(arguments, nargs, 4, "rrrw", views)) return NULL;
    const double *points = views[0].buf, *values = views[1].buf, *x = views[2].buf;
    double *out = views[3].buf;
    Py_ssize_t count = size_of(&views[0]), queries = size_of(&views[2]);
    int fits = size_of(&views[1]) == count && count && size_of(&views[3]) == queries;
    if (fits)
        for (Py_ssize_t n = 0; n < queries; n++) {
            Cell at = cell(points, count, x[n]);
            out[n] = larger(lerp(values[at.below], values[at.above], at.fraction), 0.0);
        }
    release_arrays(views, 4);
    if (!fits) return size_error();
    Py_RETURN_NONE;
}

static PyObject *bilinear(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[6];
    if (!take_arrays(arguments, nargs, 6, "rrrrrw", views)) return NULL;
    const double *rows = views[0].buf, *columns = views[1].buf, *values = views[2].buf;
    const double *x = views[3].buf, *y = views[4].buf;
    double *out = views[5].buf;
    Py_ssize_t height = size_of(&views[0]), width = size_of(&views[1]), queries = size_of(&views[3]);
    int fits = height && width && size_of(&views[2]) == height * width && size_of(&views[4]) == queries &&
               size_of(&views[5]) == queries;
    if (fits)
        for (Py_ssize_t n = 0; n < queries; n++)
            out[n] = bilerp(values, width, cell(rows, height, x[n]), cell(columns, width, y[n]));
    release_arrays(views, 6);
    if (!fits) return size_error();
    Py_RETURN_NONE;
}

static PyObject *linear_at(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[2];
    if (!take_arrays(arguments, nargs, 3, "rr", views)) return NULL;
    const double *points = views[0].buf, *values = views[1].buf;
    double x = PyFloat_AsDouble(arguments[2]), value = 0.0;
    Py_ssize_t count = size_of(&views[0]);
    int fits = count && size_of(&views[1]) == count;
    if (fits) {
        Cell at = cell(points, count, x);
        value = larger(lerp(values[at.below], values[at.above], at.fraction), 0.0);
    }
    release_arrays(views, 2);
    return fits && !PyErr_Occurred() ? PyFloat_FromDouble(value) : size_error();
}

static PyObject *bilinear_at(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[3];
    if (!take_arrays(arguments, nargs, 5, "rrr", views)) return NULL;
    double x = PyFloat_AsDouble(arguments[3]), y = PyFloat_AsDouble(arguments[4]), value = 0.0;
    Py_ssize_t height = size_of(&views[0]), width = size_of(&views[1]);
    int fits = height && width && size_of(&views[2]) == height * width;
    if (fits) value = bilerp(views[2].buf, width, cell(views[0].buf, height, x), cell(views[1].buf, width, y));
    release_arrays(views, 3);
    return fits && !PyErr_Occurred() ? PyFloat_FromDouble(value) : size_error();
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
