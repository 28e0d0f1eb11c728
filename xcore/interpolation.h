/* Common part of the compiled modules: arrays from Python, memory, and a value's place on a grid. */
#ifndef EXEGPT_INTERPOLATION_H
#define EXEGPT_INTERPOLATION_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

/* A cell of one axis: the points before and after a value, and the value's share of the way between them. Beyond the
 * grid, the outermost cell is extrapolated. */
typedef struct {
    Py_ssize_t below, above;
    double fraction;
} Cell;

static inline Cell cell(const double *points, Py_ssize_t count, double x) {
    Py_ssize_t low = 0, high = count - 1;
    if (high == 0) return (Cell){0, 0, 0.0};
    while (high - low > 1) {
        Py_ssize_t middle = (low + high) / 2;
        if (points[middle] <= x) low = middle;
        else high = middle;
    }
    return (Cell){low, low + 1, (x - points[low]) / (points[low + 1] - points[low])};
}

static inline double larger(double a, double b) { return a > b ? a : b; }

static inline double lerp(double below, double above, double fraction) {
    return below * (1.0 - fraction) + above * fraction;
}

/* `values` [rows, columns] in a cell of each axis; never negative. */
static inline double bilerp(const double *values, Py_ssize_t columns, Cell row, Cell column) {
    const double *near = values + row.below * columns, *far = values + row.above * columns;
    return larger(lerp(lerp(near[column.below], near[column.above], column.fraction),
                       lerp(far[column.below], far[column.above], column.fraction), row.fraction), 0.0);
}

static inline void release_arrays(Py_buffer *views, int count) {
    while (count--) PyBuffer_Release(&views[count]);
}

/* Get the first arguments as contiguous arrays, one for each letter of `kinds`: 'r' doubles, 'w' doubles that are
 * written, 'i' integers of Py_ssize_t's size. Returns false, with an exception set and nothing held, if an argument has
 * another type. */
static inline int take_arrays(PyObject *const *arguments, Py_ssize_t nargs, Py_ssize_t expected, const char *kinds,
                              Py_buffer *views) {
    if (nargs != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, nargs);
        return 0;
    }
    for (int i = 0; kinds[i]; i++) {
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (kinds[i] == 'w' ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(arguments[i], &views[i], flags)) {
            release_arrays(views, i);
            return 0;
        }
        char type = views[i].format ? views[i].format[0] : 'B';
        if (kinds[i] == 'i' ? (type != 'l' && type != 'q') || views[i].itemsize != sizeof(Py_ssize_t) : type != 'd') {
            PyErr_Format(PyExc_TypeError, "argument %d holds elements of type '%c'", i + 1, type);
            release_arrays(views, i + 1);
            return 0;
        }
    }
    return 1;
}

/* Set an exception unless one is set. */
static inline PyObject *size_error(void) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "sizes don't fit together");
    return NULL;
}

static inline Py_ssize_t size_of(const Py_buffer *view) { return view->len / view->itemsize; }

/* Memory that is freed together. */
typedef struct {
    void *blocks[64];
    int count, failed;
} Memory;

static inline void *kept(Memory *m, void *block) {
    if (block && m->count < 64) return m->blocks[m->count++] = block;
    free(block);
    m->failed = 1;
    return NULL;
}

static inline void *allocate(Memory *m, Py_ssize_t count, size_t size) { return kept(m, calloc(count > 0 ? count : 1, size)); }

/* Allocate memory that is written before it is read: zeros would take longer than a replay that soon breaks a bound. */
static inline void *reserve(Memory *m, Py_ssize_t count, size_t size) {
    size_t most = count > 0 ? (size_t)count : 1;
    return kept(m, most <= SIZE_MAX / size ? malloc(most * size) : NULL);
}

static inline void free_all(Memory *m) {
    while (m->count) free(m->blocks[--m->count]);
}

/* An entry of a module's functions. */
#define FUNCTION(name, text) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, text}
#endif
