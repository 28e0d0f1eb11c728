/* One replica's continuous batching, first come first served, from event to event: between a sequence's end, an arrival
 * and a full cache every decode iteration takes as much longer than the one before, so that k of them are summed in
 * closed form. batching_run.pyi documents the arguments; tests/xmulti/sharing has the same loop iteration by
 * iteration. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../xcore/interpolation.h"

#define BLOCK 16

typedef struct {
    const double *prefill, *sampled, *decode, *ready;
    const Py_ssize_t *prompts, *outputs, *following, *arrivals;
    double *done, *generated, *computed;
    Py_ssize_t count, most, arrived, last_arrival;
    double now, until, work, busy, work_token, work_position;
    Py_ssize_t blocks, free, watermark, most_tokens, iterations, preemptions;
    int padded;
    Py_ssize_t *queue, front, waiting; /* a ring of `count` places */
    Py_ssize_t *running, batch;        /* by admission */
    Py_ssize_t *prompt, *left, *cached, *held;
    double *curve;
    Py_ssize_t points, room;
} Replica;

static void push_back(Replica *r, Py_ssize_t i) { r->queue[(r->front + r->waiting++) % r->count] = i; }

static void push_front(Replica *r, Py_ssize_t i) {
    r->front = (r->front + r->count - 1) % r->count;
    r->queue[r->front] = i;
    r->waiting++;
}

static void arrive(Replica *r) {
    while (r->arrived < r->last_arrival && r->ready[r->arrivals[r->arrived]] <= r->now)
        push_back(r, r->arrivals[r->arrived++]);
}

/* What computing positions 1 to n of a sequence takes, in multiply-adds. */
static double work_of(const Replica *r, double n) {
    return n * r->work_token + 0.5 * n * (n + 1.0) * r->work_position;
}

static int mark(Replica *r) {
    if (r->points == r->room) {
        Py_ssize_t room = 2 * r->room + 64;
        double *curve = realloc(r->curve, 2 * (size_t)room * sizeof(double));
        if (!curve) {
            PyErr_NoMemory();
            return 0;
        }
        r->curve = curve;
        r->room = room;
    }
    r->curve[2 * r->points] = r->now;
    r->curve[2 * r->points++ + 1] = r->work;
    return 1;
}

/* Sequences without outputs left end; the next round of each begins to wait. */
static void release_finished(Replica *r) {
    Py_ssize_t kept = 0, ended = 0;
    for (Py_ssize_t n = 0; n < r->batch; n++) {
        Py_ssize_t i = r->running[n];
        if (r->left[i]) {
            r->running[kept++] = i;
            continue;
        }
        if (!ended++) arrive(r); /* whatever came before waits in front of them */
        r->done[i] = r->now;
        r->free += r->held[i];
        if (r->following[i] >= 0) push_back(r, r->following[i]);
    }
    r->batch = kept;
}

/* Prompts from the front of the queue that go into one prefill. */
static Py_ssize_t admissible(const Replica *r) {
    Py_ssize_t count = 0, free = r->free, longest = 0, total = 0;
    while (count < r->waiting && r->batch + count < r->most) {
        Py_ssize_t length = r->prompt[r->queue[(r->front + count) % r->count]], need = (length + BLOCK - 1) / BLOCK;
        Py_ssize_t most = length > longest ? length : longest;
        Py_ssize_t tokens = r->padded ? (count + 1) * most : total + length;
        if ((count && tokens > r->most_tokens) || free - need < r->watermark) break;
        longest = most, total += length, free -= need, count++;
    }
    return count;
}

static int prefill(Replica *r, Py_ssize_t count) {
    double total = 0.0, squares = 0.0, longest = 0.0;
    for (Py_ssize_t n = 0; n < count; n++) {
        double length = (double)r->prompt[r->queue[(r->front + n) % r->count]];
        total += length, squares += length * length, longest = larger(longest, length);
    }
    const double *cost = r->prefill + 3 * count;
    double tokens = r->padded ? (double)count * longest : total;
    if (r->padded) squares = (double)count * longest * longest;
    double seconds = cost[0] + cost[1] * tokens + cost[2] * squares + r->sampled[count] * total;
    if (r->now + seconds > r->until) return 0;
    r->now += seconds, r->busy += seconds, r->iterations++;
    for (Py_ssize_t n = 0; n < count; n++) {
        Py_ssize_t i = r->queue[r->front], length = r->prompt[i];
        r->front = (r->front + 1) % r->count;
        r->waiting--;
        r->cached[i] = length;
        r->held[i] = (length + BLOCK - 1) / BLOCK;
        r->free -= r->held[i];
        r->running[r->batch++] = i;
        if ((double)length > r->computed[i]) {
            r->work += work_of(r, (double)length) - work_of(r, r->computed[i]);
            r->computed[i] = (double)length;
        }
        r->left[i]--, r->generated[i]++;
    }
    release_finished(r);
    return mark(r);
}

/* Blocks that k more iterations take, from how many sequences have 0 to 15 places left in their last block. */
static Py_ssize_t blocks_for(const Py_ssize_t slack[BLOCK], Py_ssize_t k) {
    Py_ssize_t need = 0;
    for (Py_ssize_t s = 0; s < BLOCK && s < k; s++) need += slack[s] * ((k - s - 1) / BLOCK + 1);
    return need;
}

static Py_ssize_t most_by_cache(Replica *r, Py_ssize_t k) {
    Py_ssize_t slack[BLOCK] = {0}, low = 0, high = k;
    for (Py_ssize_t n = 0; n < r->batch; n++) {
        Py_ssize_t i = r->running[n];
        slack[r->held[i] * BLOCK - r->cached[i]]++;
    }
    while (low < high) {
        Py_ssize_t middle = (low + high + 1) / 2;
        if (blocks_for(slack, middle) <= r->free) low = middle;
        else high = middle - 1;
    }
    return low;
}

static void preempt_last(Replica *r) {
    Py_ssize_t i = r->running[--r->batch];
    r->free += r->held[i];
    r->prompt[i] = r->cached[i] + 1; /* the token that it made last was never cached */
    r->preemptions++;
    push_front(r, i);
}

/* Seconds of k iterations, the first of which takes `first` and each next one `more` more. */
static double seconds_of(double first, double more, double k) { return k * first + more * k * (k - 1.0) / 2.0; }

/* The most iterations, up to k, that take no longer than `seconds`. */
static Py_ssize_t most_within(double first, double more, Py_ssize_t k, double seconds) {
    Py_ssize_t low = 0, high = k;
    while (low < high) {
        Py_ssize_t middle = (low + high + 1) / 2;
        if (seconds_of(first, more, (double)middle) <= seconds) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* Decode iterations until something happens; 0 where the next one would end after `until`. */
static int decode(Replica *r) {
    Py_ssize_t k, total = 0, longest = 0, least = PY_SSIZE_T_MAX;
    while (!(k = most_by_cache(r, 1))) preempt_last(r);
    for (Py_ssize_t n = 0; n < r->batch; n++) {
        Py_ssize_t i = r->running[n], length = r->cached[i] + 1;
        total += length;
        if (length > longest) longest = length;
        if (r->left[i] < least) least = r->left[i];
    }
    k = most_by_cache(r, least);
    const double *cost = r->decode + 3 * r->batch;
    double first = cost[0] + cost[1] * (double)total + cost[2] * (double)longest;
    double more = cost[1] * (double)r->batch + cost[2];
    if (!r->waiting && r->arrived < r->last_arrival) { /* an arrival may be admitted after the iteration it falls in */
        Py_ssize_t before = most_within(first, more, k, r->ready[r->arrivals[r->arrived]] - r->now);
        if (before < k) k = before + 1;
    }
    if (r->until < INFINITY) k = most_within(first, more, k, r->until - r->now);
    if (!k) return 0;
    double seconds = seconds_of(first, more, (double)k);
    r->now += seconds, r->busy += seconds, r->iterations += k;
    r->work += (double)(k * r->batch) * r->work_token +
               r->work_position * seconds_of((double)total, (double)r->batch, (double)k);
    for (Py_ssize_t n = 0; n < r->batch; n++) {
        Py_ssize_t i = r->running[n];
        r->cached[i] += k, r->left[i] -= k;
        r->generated[i] += (double)k;
        r->computed[i] = (double)r->cached[i];
        Py_ssize_t held = (r->cached[i] + BLOCK - 1) / BLOCK;
        r->free -= held - r->held[i];
        r->held[i] = held;
    }
    release_finished(r);
    return mark(r);
}

static int run_replica(Replica *r) {
    if (!mark(r)) return 0;
    for (;;) {
        arrive(r);
        if (!r->batch && !r->waiting) {
            if (r->arrived == r->last_arrival) return 1;
            double next = r->ready[r->arrivals[r->arrived]];
            if (!(next < r->until)) return 1;
            r->now = next;
            if (!mark(r)) return 0;
            continue;
        }
        Py_ssize_t count = admissible(r);
        if (!count && !r->batch) {
            PyErr_SetString(PyExc_ValueError, "a sequence doesn't fit in the cache");
            return 0;
        }
        if (!(count ? prefill(r, count) : decode(r))) return 1;
    }
}

static PyObject *batching_run(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer v[12];
    if (!take_arrays(arguments, nargs, 12, "rrrriiiirwww", v)) return NULL;
    const double *settings = v[8].buf;
    Py_ssize_t count = size_of(&v[4]), arrivals = size_of(&v[7]), most = size_of(&v[1]) - 1;
    int fits = size_of(&v[8]) == 8 && most > 0 && size_of(&v[0]) == 3 * (most + 1) && size_of(&v[2]) == 3 * (most + 1) &&
               arrivals <= count;
    for (int k = 3; k < 12; k++) fits = fits && (k == 7 || k == 8 || size_of(&v[k]) == count);
    PyObject *answer = NULL;
    if (!fits) size_error();
    else if (count) {
        Py_ssize_t *room = malloc(5 * (size_t)count * sizeof(Py_ssize_t) + (size_t)(count + most) * sizeof(Py_ssize_t));
        Replica r = {.prefill = v[0].buf, .sampled = v[1].buf, .decode = v[2].buf, .ready = v[3].buf, .prompts = v[4].buf,
                     .outputs = v[5].buf, .following = v[6].buf, .arrivals = v[7].buf, .done = v[9].buf,
                     .generated = v[10].buf, .computed = v[11].buf, .count = count, .most = most,
                     .last_arrival = arrivals, .now = settings[0], .until = settings[1],
                     .blocks = (Py_ssize_t)settings[2], .free = (Py_ssize_t)settings[2],
                     .watermark = (Py_ssize_t)settings[3], .most_tokens = (Py_ssize_t)settings[4],
                     .padded = settings[5] != 0.0, .work_token = settings[6], .work_position = settings[7]};
        if (!room) PyErr_NoMemory();
        else {
            r.queue = room, r.prompt = room + count, r.left = room + 2 * count, r.cached = room + 3 * count;
            r.held = room + 4 * count, r.running = room + 5 * count;
            memcpy(r.prompt, r.prompts, (size_t)count * sizeof(Py_ssize_t));
            memcpy(r.left, r.outputs, (size_t)count * sizeof(Py_ssize_t));
            run_replica(&r);
            if (!PyErr_Occurred())
                answer = Py_BuildValue("(y#dnn)", (char *)r.curve, 2 * r.points * (Py_ssize_t)sizeof(double), r.busy,
                                       r.iterations, r.preemptions);
            free(r.curve);
            free(room);
        }
    }
    else answer = Py_BuildValue("(y#dnn)", "", (Py_ssize_t)0, 0.0, (Py_ssize_t)0, (Py_ssize_t)0);
    release_arrays(v, 12);
    return answer;
}

static PyMethodDef functions[] = {
    FUNCTION(batching_run, "What a replica does with its calls."),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "batching_run",
    .m_doc = "A replica's continuous batching from event to event.",
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit_batching_run(void) { return PyModuleDef_Init(&module); }
