/* The recurrences that pipelines follow, cell by cell, compiled: a search runs thousands of them within a second.
 * recurrences.pyi documents the arguments; steady/pipeline.py, replay/cells.py and side.py use them.
 *
 * A cell starts when its stage is free and its input has arrived: max-plus recurrences, one order of the cells. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../xcore/interpolation.h"

enum { LONGEST_CYCLE = 12 }; /* phases of the longest cycle to look for */

/* Allocate zeros, which the caller frees; NULL, with an exception, if memory is exhausted. */
static double *zeros(Py_ssize_t count) {
    double *memory = calloc(count ? count : 1, sizeof(double));
    if (!memory) PyErr_NoMemory();
    return memory;
}

/* Run one item through the stages from `ready` on; return when it leaves the last one. */
static inline double pass(double ready, const double *seconds, const double *hop, double *free_at, Py_ssize_t stages) {
    for (Py_ssize_t s = 0; s < stages; s++) {
        if (s > 0) ready = larger(free_at[s], ready + hop[s]);
        ready += seconds[s];
        free_at[s] = ready;
    }
    return ready;
}

/* A side's decoding iterations: seconds of every stage, its rest interpolated and its layers' attention added. */
static PyObject *decode_seconds(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[10];
    if (!take_arrays(arguments, nargs, 10, "irrrrrrrrw", views)) return NULL;
    const Py_ssize_t *places = views[0].buf;
    const double *layers = views[1].buf, *sequences = views[2].buf, *rest = views[3].buf, *batches = views[4].buf;
    const double *contexts = views[5].buf, *attention = views[6].buf, *batch = views[7].buf, *context = views[8].buf;
    double *out = views[9].buf;
    Py_ssize_t side_stages = size_of(&views[0]), points = size_of(&views[2]), height = size_of(&views[4]);
    Py_ssize_t width = size_of(&views[5]), queries = size_of(&views[7]);
    Py_ssize_t stages = queries ? size_of(&views[9]) / queries : 0;
    int fits = side_stages && points && height && width && size_of(&views[1]) == side_stages &&
               size_of(&views[3]) == points * side_stages && size_of(&views[6]) == height * width &&
               size_of(&views[8]) == queries && size_of(&views[9]) == queries * stages;
    for (Py_ssize_t s = 0; fits && queries && s < side_stages; s++) fits = places[s] >= 0 && places[s] < stages;
    for (Py_ssize_t n = 0; fits && n < queries; n++) {
        double decoding = larger(batch[n], 1.0);
        Cell at = cell(sequences, points, decoding);
        double attended = bilerp(attention, width, cell(batches, height, decoding), cell(contexts, width, context[n]));
        const double *below = rest + at.below * side_stages, *above = rest + at.above * side_stages;
        for (Py_ssize_t s = 0; s < side_stages; s++)
            out[n * stages + places[s]] = larger(lerp(below[s], above[s], at.fraction), 0.0) + layers[s] * attended;
    }
    release_arrays(views, 10);
    if (!fits) return size_error();
    Py_RETURN_NONE;
}

/* Iterations of equal micro-batches: each lasts as long as its slowest stage has micro-batches to do, or as one
 * micro-batch takes around the pipeline. */
static PyObject *rounds(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[2];
    if (!take_arrays(arguments, nargs, 4, "rw", views)) return NULL;
    const double *seconds = views[0].buf;
    double *out = views[1].buf, micro_batches = PyFloat_AsDouble(arguments[2]), way = PyFloat_AsDouble(arguments[3]);
    Py_ssize_t iterations = size_of(&views[1]), stages = iterations ? size_of(&views[0]) / iterations : 0;
    int fits = size_of(&views[0]) == iterations * stages && !PyErr_Occurred();
    for (Py_ssize_t i = 0; fits && i < iterations; i++) {
        double around = way, slowest = 0.0;
        for (Py_ssize_t s = 0; s < stages; s++) {
            around += seconds[i * stages + s];
            slowest = larger(slowest, seconds[i * stages + s]);
        }
        out[i] = larger(micro_batches * slowest, around);
    }
    release_arrays(views, 2);
    if (!fits) return size_error();
    Py_RETURN_NONE;
}

/* A phase: encoding micro-batches, then decoding iterations. */
typedef struct {
    const double *encode, *decode, *encode_hop, *decode_hop;
    Py_ssize_t encodes, iterations, variants, stages;
    Py_ssize_t micro_batches;
    Py_ssize_t joins; /* micro-batches that new sequences join, in turn if they are fewer than all */
    double *free_at;  /* [stages]: when each stage is free */
    double *previous; /* [micro_batches]: when each one's last token is out */
    double *out;      /* [cells]: when each cell leaves the last stage */
} Phase;

/* Return when the sequences that join a micro-batch have been encoded; 0 if none join. */
static double encoded_for(const Phase *p, Py_ssize_t micro_batch, Py_ssize_t turn) {
    if (!p->encodes) return 0.0;
    if (p->joins >= p->micro_batches) {
        Py_ssize_t share = (micro_batch + 1) * p->encodes / p->micro_batches - 1;
        if (share > p->encodes - 1) share = p->encodes - 1;
        return p->out[share > 0 ? share : 0];
    }
    Py_ssize_t place = ((micro_batch - turn) % p->micro_batches + p->micro_batches) % p->micro_batches;
    return place < p->joins ? p->out[place * p->encodes / p->joins] : 0.0;
}

/* Run a phase; returns when it starts. */
static double run_phase(const Phase *p, Py_ssize_t turn) {
    double started = p->free_at[0];
    Py_ssize_t cell = 0;
    for (; cell < p->encodes; cell++)
        p->out[cell] = pass(p->free_at[0], p->encode + cell * p->stages, p->encode_hop, p->free_at, p->stages);
    for (Py_ssize_t iteration = 0; iteration < p->iterations; iteration++)
        for (Py_ssize_t m = 0; m < p->micro_batches; m++, cell++) {
            double ready = larger(p->free_at[0], p->previous[m]);
            if (iteration == 0) ready = larger(ready, encoded_for(p, m, turn));
            if (cell == 0) started = ready;
            const double *seconds = p->decode + (iteration * p->variants + (p->variants > 1 ? m : 0)) * p->stages;
            p->out[cell] = p->previous[m] = pass(ready, seconds, p->decode_hop, p->free_at, p->stages);
        }
    return started;
}

/* Return the time by which a state [size] is later than an earlier one; negative if it differs between places. */
static double later_by(const double *state, const double *earlier, Py_ssize_t size) {
    double low = INFINITY, high = -INFINITY;
    for (Py_ssize_t i = 0; i < size; i++) {
        double later = state[i] - earlier[i];
        if (later < low) low = later;
        if (later > high) high = later;
        if (high - low > 1e-9 * high) return -1.0;
    }
    return high;
}

/* Run phases until the state repeats, at most `most`: the seconds per phase, and the last one's start. After `most`
 * phases, the mean over the later half is close. Writes `states` [most, stages + micro_batches]. */
static double settle(const Phase *p, Py_ssize_t most, double *states, double *started) {
    Py_ssize_t size = p->stages + p->micro_batches;
    *started = run_phase(p, 0);
    for (Py_ssize_t phase = 0; phase < most; phase++) {
        double *state = states + phase * size;
        memcpy(state, p->free_at, p->stages * sizeof(double));
        memcpy(state + p->stages, p->previous, p->micro_batches * sizeof(double));
        for (Py_ssize_t back = 1; back <= phase && back <= LONGEST_CYCLE; back++) {
            if (p->joins < p->micro_batches && back * p->joins % p->micro_batches) continue; /* next one's turn */
            double later = later_by(state, state - back * size, size);
            if (later >= 0.0) return later / back;
        }
        *started = run_phase(p, (phase + 1) * p->joins % p->micro_batches);
    }
    double longest = 0.0;
    const double *last = states + (most - 1) * size, *half = states + most / 2 * size;
    for (Py_ssize_t i = 0; i < size; i++) longest = larger(longest, last[i] - half[i]);
    return longest / larger(1.0, (double)(most - 1 - most / 2));
}

static void mean_and_deviation(const double *x, Py_ssize_t count, double *mean, double *deviation) {
    double sum = 0.0, squares = 0.0;
    for (Py_ssize_t i = 0; i < count; i++) sum += x[i];
    *mean = sum / count;
    for (Py_ssize_t i = 0; i < count; i++) squares += (x[i] - *mean) * (x[i] - *mean);
    *deviation = sqrt(squares / count);
}

/* Compute a phase's figures from its cells' ends and its start. */
static PyObject *summary(const Phase *p, double started, double period, double *decoded) {
    Py_ssize_t cells = p->encodes + p->iterations * p->micro_batches;
    for (Py_ssize_t i = 0; i < cells; i++) p->out[i] -= started;
    const double *iterations = p->out + p->encodes;
    for (Py_ssize_t i = 0; i < p->iterations; i++) {
        decoded[i] = iterations[i * p->micro_batches];
        for (Py_ssize_t m = 1; m < p->micro_batches; m++)
            decoded[i] = larger(decoded[i], iterations[i * p->micro_batches + m]);
    }
    double encoded = 0.0, first_encoded[2] = {0.0, 0.0}, first_decoded[2];
    if (p->encodes) {
        encoded = p->out[p->encodes - 1];
        mean_and_deviation(p->out, p->encodes, &first_encoded[0], &first_encoded[1]);
    }
    mean_and_deviation(iterations, p->micro_batches, &first_decoded[0], &first_decoded[1]);
    return Py_BuildValue("dd(dd)(dd)", period, encoded, first_encoded[0], first_encoded[1], first_decoded[0],
                         first_decoded[1]);
}

static PyObject *run_phases(Phase *p, Py_ssize_t most, double *decoded) {
    Py_ssize_t size = p->stages + p->micro_batches, cells = p->encodes + p->iterations * p->micro_batches;
    double *memory = zeros(size + cells + most * size), started;
    if (!memory) return NULL;
    p->free_at = memory;
    p->previous = memory + p->stages;
    p->out = memory + size;
    double period = 0.0;
    if (most > 1) {
        period = settle(p, most, memory + size + cells, &started);
    } else {
        started = run_phase(p, 0);
        for (Py_ssize_t s = 0; s < p->stages; s++) period = larger(period, p->free_at[s]);
    }
    PyObject *result = summary(p, started, period, decoded);
    free(memory);
    return result;
}

static PyObject *phases(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[5];
    if (!take_arrays(arguments, nargs, 8, "rrrrw", views)) return NULL;
    Phase p = {.encode = views[0].buf, .decode = views[1].buf, .encode_hop = views[2].buf, .decode_hop = views[3].buf};
    p.stages = size_of(&views[2]);
    p.iterations = size_of(&views[4]);
    p.micro_batches = PyLong_AsSsize_t(arguments[5]);
    p.joins = PyLong_AsSsize_t(arguments[6]);
    Py_ssize_t most = PyLong_AsSsize_t(arguments[7]);
    Py_ssize_t sizes = p.stages * p.iterations;
    int fits = sizes && p.micro_batches > 0 && p.joins > 0 && most > 0 && size_of(&views[3]) == p.stages;
    if (fits) {
        p.encodes = size_of(&views[0]) / p.stages;
        p.variants = size_of(&views[1]) / sizes;
        fits = (p.variants == 1 || p.variants == p.micro_batches) && size_of(&views[1]) == sizes * p.variants &&
               size_of(&views[0]) == p.encodes * p.stages;
    }
    PyObject *result = NULL;
    if (fits) result = run_phases(&p, most, views[4].buf);
    else size_error();
    release_arrays(views, 5);
    return result;
}

static PyObject *iterations(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[5];
    if (!take_arrays(arguments, nargs, 5, "rrwww", views)) return NULL;
    const double *seconds = views[0].buf, *hop = views[1].buf;
    double *previous = views[2].buf, *starts = views[3].buf, *ends = views[4].buf;
    Py_ssize_t stages = size_of(&views[1]), micro_batches = size_of(&views[2]), cells = size_of(&views[0]);
    Py_ssize_t row = stages * micro_batches;
    double *free_at = zeros(stages);
    int fits = free_at && row && cells % row == 0 && size_of(&views[3]) == cells && size_of(&views[4]) == cells;
    if (fits) {
        for (Py_ssize_t i = 0; i < cells; i += stages) {
            Py_ssize_t m = i % row / stages;
            double ready = previous[m];
            for (Py_ssize_t s = 0; s < stages; s++) {
                ready = larger(free_at[s], s ? ready + hop[s] : ready);
                starts[i + s] = ready;
                ends[i + s] = free_at[s] = ready += seconds[i + s];
            }
            previous[m] = ready;
        }
    }
    free(free_at);
    release_arrays(views, 5);
    if (!fits) return size_error();
    Py_RETURN_NONE;
}

static PyObject *tandem(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[4];
    if (!take_arrays(arguments, nargs, 5, "rrww", views)) return NULL;
    const double *seconds = views[0].buf, *hop = views[1].buf;
    double *starts = views[2].buf, *outs = views[3].buf;
    Py_ssize_t stages = size_of(&views[1]), items = size_of(&views[2]), most = PyLong_AsSsize_t(arguments[4]);
    double *free_at = zeros(stages);
    int fits = free_at && stages && most > 0 && size_of(&views[0]) == items * stages && size_of(&views[3]) == items;
    for (Py_ssize_t i = 0; fits && i < items; i++) {
        starts[i] = larger(free_at[0], i >= most ? outs[i - most] : 0.0);
        outs[i] = pass(starts[i], seconds + i * stages, hop, free_at, stages);
    }
    free(free_at);
    release_arrays(views, 4);
    if (!fits) return size_error();
    Py_RETURN_NONE;
}

static PyObject *follow(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[7];
    if (!take_arrays(arguments, nargs, 10, "rrwwwww", views)) return NULL;
    const double *seconds = views[0].buf, *hops = views[1].buf;
    double *ready = views[2].buf, *free_at = views[3].buf, *busy = views[4].buf;
    double *starts = views[5].buf, *ends = views[6].buf;
    double now = PyFloat_AsDouble(arguments[7]), until = PyFloat_AsDouble(arguments[8]);
    long ahead = PyLong_AsLong(arguments[9]);
    Py_ssize_t micro_batches = size_of(&views[2]), stages = size_of(&views[3]), row = micro_batches * stages, ran = 0;
    Py_ssize_t most = row ? size_of(&views[0]) / row : 0;
    int fits = row && size_of(&views[0]) == most * row && size_of(&views[1]) == row &&
               size_of(&views[4]) == stages && size_of(&views[5]) == most * row && size_of(&views[6]) == most * row &&
               !PyErr_Occurred();
    while (fits && ran < most) {
        const double *iteration = seconds + ran * row;
        for (Py_ssize_t p = 0; p < micro_batches; p++) {
            double at = larger(now, ready[p]);
            for (Py_ssize_t s = 0; s < stages; s++) {
                Py_ssize_t place = ran * row + p * stages + s;
                at = larger(at + hops[p * stages + s], free_at[s]);
                starts[place] = at;
                ends[place] = free_at[s] = at += iteration[p * stages + s];
                busy[s] += iteration[p * stages + s];
            }
            ready[p] = at;
        }
        now = ahead ? starts[ran * row] : larger(now, free_at[0]);
        ran++;
        if (now >= until) break;
    }
    release_arrays(views, 7);
    if (!fits) return size_error();
    return Py_BuildValue("nd", ran, now);
}

/* Run iterations one after the other through a pipeline, micro-batch by micro-batch, each row `repeats` times. */
typedef struct {
    const double *seconds, *hops, *waits, *gives;
    double *free_at; /* [stages]: when each stage is free; behind it `token` and `outs` */
    double *token;   /* [micro_batches]: when each one's last token is out */
    double *outs;    /* [underway]: when the last token-giving iterations were out */
    Py_ssize_t micro_batches, stages, underway, sent;
} Rows;

/* Run a row once. A decoding micro-batch waits for its token. A row of empty micro-batches waits for all stages. The
 * next row begins when the first stage is free and few enough rows are in flight. */
static void run_row(Rows *rows, Py_ssize_t row) {
    int some = 0;
    for (Py_ssize_t m = 0; m < rows->micro_batches; m++) {
        Py_ssize_t cell = row * rows->micro_batches + m;
        const double *seconds = rows->seconds + cell * rows->stages, *hops = rows->hops + cell * rows->stages;
        if (rows->waits[cell] < 0.0) continue;
        double ready = larger(rows->waits[cell] > 0.0 ? rows->token[m] : 0.0, rows->free_at[0]);
        rows->free_at[0] = ready += seconds[0];
        for (Py_ssize_t s = 1; s < rows->stages; s++)
            rows->free_at[s] = ready = larger(rows->free_at[s], ready + hops[s]) + seconds[s];
        rows->token[m] = ready;
        some = 1;
    }
    for (Py_ssize_t s = 1; !some && s < rows->stages; s++) rows->free_at[0] = larger(rows->free_at[0], rows->free_at[s]);
    if (rows->stages > 1) {
        if (rows->gives[row]) rows->outs[rows->sent++ % rows->underway] = rows->free_at[rows->stages - 1];
        rows->free_at[0] = larger(rows->free_at[0], rows->outs[rows->sent % rows->underway]);
    }
    for (Py_ssize_t m = 0; m < rows->micro_batches; m++)
        if (rows->waits[row * rows->micro_batches + m] < 0.0) rows->token[m] = rows->free_at[0];
}

/* Repeat a row: once one repeat has moved everything by the same time, the rest run at once. Writes `before`. */
static void run_again(Rows *rows, Py_ssize_t row, double repeats, double *before) {
    Py_ssize_t size = rows->stages + rows->micro_batches;
    for (double left = repeats; left > 0.0; left -= 1.0) {
        memcpy(before, rows->free_at, size * sizeof(double));
        run_row(rows, row);
        double later = later_by(rows->free_at, before, size);
        if (later < 0.0) continue;
        for (Py_ssize_t i = 0; i < size + rows->underway; i++) rows->free_at[i] += later * (left - 1.0);
        return;
    }
}

static PyObject *repeated(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[8];
    if (!take_arrays(arguments, nargs, 8, "rrrrrwww", views)) return NULL;
    Rows rows = {.seconds = views[0].buf, .hops = views[1].buf, .waits = views[3].buf, .gives = views[4].buf};
    const double *repeats = views[2].buf;
    double *firsts = views[5].buf, *lasts = views[6].buf, *frees = views[7].buf;
    Py_ssize_t count = size_of(&views[2]), cells = size_of(&views[3]);
    int fits = count && cells && cells % count == 0 && size_of(&views[0]) >= cells && size_of(&views[0]) % cells == 0 &&
               size_of(&views[1]) == size_of(&views[0]) && size_of(&views[4]) == count && size_of(&views[5]) == cells &&
               size_of(&views[6]) == cells && size_of(&views[7]) == count;
    if (fits) {
        rows.micro_batches = cells / count, rows.stages = size_of(&views[0]) / cells;
        rows.underway = 2 * rows.stages - 1;
        Py_ssize_t size = rows.stages + rows.micro_batches;
        fits = (rows.free_at = zeros(2 * size + rows.underway)) != NULL;
        rows.token = rows.free_at + rows.stages, rows.outs = rows.free_at + size;
    }
    for (Py_ssize_t row = 0; fits && row < count; row++) {
        run_row(&rows, row);
        memcpy(firsts + row * rows.micro_batches, rows.token, rows.micro_batches * sizeof(double));
        run_again(&rows, row, repeats[row] - 1.0, rows.outs + rows.underway);
        memcpy(lasts + row * rows.micro_batches, rows.token, rows.micro_batches * sizeof(double));
        frees[row] = rows.free_at[0];
    }
    free(rows.free_at);
    release_arrays(views, 8);
    if (!fits) return size_error();
    Py_RETURN_NONE;
}

/* A queue of rising numbers of iterations: nearly all are added in order. */
typedef struct {
    double *values;
    Py_ssize_t first, end;
} Queue;

static void push(Queue *queue, double value) {
    Py_ssize_t place = queue->end++;
    for (; place > queue->first && queue->values[place - 1] > value; place--)
        queue->values[place] = queue->values[place - 1];
    queue->values[place] = value;
}

/* Prompts that share iterations, first come, first served. An iteration has `budget`, of which each decoding sequence
 * takes `share`. A prompt's sequence decodes for its `stays`, then the next prompt takes its slot. */
typedef struct {
    const double *lengths, *stays; /* [prompts] */
    double budget, share, idle;
    Py_ssize_t residents;
    double *starts, *ends;         /* [prompts]: its first and its last iteration */
    double *iterations;            /* [most]: iterations with prompts or empty slots */
    double *at, *prompt;           /* [most]: the iteration and the prompt of each chunk */
    double *froms, *untils;        /* [most]: where in the prompt each chunk begins and ends */
    Py_ssize_t most, count, parts;
    Queue slots;                   /* the iterations from which slots are free */
    Queue decoding;                /* the last iterations of decoding sequences */
    Py_ssize_t prefilled;          /* prompts whose last iteration is over */
} Slots;

/* Begin iteration `now`; return how many sequences decode in it. Negative if there are too many iterations. */
static double begin_iteration(Slots *s, double now, Py_ssize_t prompt) {
    if (s->count == s->most) return -1.0;
    for (; s->prefilled < prompt && s->ends[s->prefilled] < now; s->prefilled++)
        push(&s->decoding, s->ends[s->prefilled] + s->stays[s->prefilled]);
    while (s->decoding.first < s->decoding.end && s->decoding.values[s->decoding.first] < now) s->decoding.first++;
    s->iterations[s->count++] = now;
    return (double)(s->decoding.end - s->decoding.first);
}

/* Follow the prompts; false if the arrays are too short for the iterations or the chunks. */
static int take_turns(Slots *s, Py_ssize_t prompts) {
    double now = -1.0, room = 0.0;
    for (Py_ssize_t j = 0; j < prompts; j++) {
        double arrival = j < s->residents ? 0.0 : s->slots.values[s->slots.first++];
        for (double done = 0.0; done < s->lengths[j];) {
            if (room <= 0.0 || arrival > now) {
                for (double empty = larger(arrival - s->idle, now + 1.0); empty < arrival; empty += 1.0)
                    if (begin_iteration(s, empty, j) < 0.0) return 0;
                now = larger(arrival, now + 1.0);
                double decoding = begin_iteration(s, now, j);
                if (decoding < 0.0) return 0;
                room = s->budget - s->share * decoding;
                if (room <= 0.0) continue;
            }
            if (s->parts == s->most) return 0;
            if (done == 0.0) s->starts[j] = now;
            double part = s->lengths[j] - done < room ? s->lengths[j] - done : room;
            s->at[s->parts] = now, s->prompt[s->parts] = (double)j;
            s->froms[s->parts] = done;
            s->untils[s->parts++] = done += part;
            room -= part;
        }
        s->ends[j] = now;
        push(&s->slots, now + s->stays[j] + s->idle + 1.0);
    }
    return 1;
}

static PyObject *slots(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[9];
    if (!take_arrays(arguments, nargs, 13, "rrwwwwwww", views)) return NULL;
    Slots s = {.lengths = views[0].buf, .stays = views[1].buf, .starts = views[2].buf, .ends = views[3].buf};
    s.iterations = views[4].buf, s.at = views[5].buf, s.prompt = views[6].buf;
    s.froms = views[7].buf, s.untils = views[8].buf;
    s.budget = PyFloat_AsDouble(arguments[9]), s.share = PyFloat_AsDouble(arguments[10]);
    s.idle = PyFloat_AsDouble(arguments[11]), s.residents = PyLong_AsSsize_t(arguments[12]);
    s.most = size_of(&views[4]);
    Py_ssize_t prompts = size_of(&views[0]);
    int fits = s.residents > 0 && !PyErr_Occurred();
    for (int i = 1; fits && i < 4; i++) fits = size_of(&views[i]) == prompts;
    for (int i = 5; fits && i < 9; i++) fits = size_of(&views[i]) == s.most;
    double *memory = fits ? zeros(2 * prompts) : NULL;
    s.slots.values = memory, s.decoding.values = memory ? memory + prompts : NULL;
    int followed = memory && take_turns(&s, prompts);
    free(memory);
    release_arrays(views, 9);
    if (!fits || !memory) return size_error();
    return followed ? Py_BuildValue("nn", s.count, s.parts) : Py_BuildValue("nn", (Py_ssize_t)0, (Py_ssize_t)0);
}

static PyObject *transfers(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[4];
    if (!take_arrays(arguments, nargs, 6, "irrw", views)) return NULL;
    const Py_ssize_t *order = views[0].buf;
    const double *prepared = views[1].buf, *seconds = views[2].buf;
    double *arrived = views[3].buf;
    Py_ssize_t count = size_of(&views[0]), senders = PyLong_AsSsize_t(arguments[4]);
    Py_ssize_t receivers = PyLong_AsSsize_t(arguments[5]);
    int fits = senders > 0 && receivers > 0 && !PyErr_Occurred();
    for (int i = 1; fits && i < 4; i++) fits = size_of(&views[i]) == count;
    for (Py_ssize_t i = 0; fits && i < count; i++) fits = order[i] >= 0 && order[i] < count;
    double *free_at = fits ? zeros(senders + receivers) : NULL;
    for (Py_ssize_t turn = 0; free_at && turn < count; turn++) {
        Py_ssize_t item = order[turn];
        double *sender = &free_at[item % senders], *receiver = &free_at[senders + turn % receivers];
        *sender = *receiver = arrived[item] = larger(larger(prepared[item], *sender), *receiver) + seconds[item];
    }
    int failed = fits && !free_at;
    free(free_at);
    release_arrays(views, 4);
    if (failed) return PyErr_NoMemory();
    if (!fits) return size_error();
    Py_RETURN_NONE;
}

/* Return the share of a mixture of normal distributions at or below x. */
static double share_below(const double *mean, const double *deviation, const double *p, Py_ssize_t count, double x) {
    double share = 0.0;
    for (Py_ssize_t i = 0; i < count; i++) {
        double beyond = x - mean[i], far = 6.0 * deviation[i];
        if (beyond >= far) share += p[i];
        else if (beyond > -far) share += p[i] * 0.5 * erfc(-beyond / (deviation[i] * 1.4142135623730951));
    }
    return share;
}

static PyObject *mixture_quantile(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[3];
    if (!take_arrays(arguments, nargs, 4, "rrr", views)) return NULL;
    const double *mean = views[0].buf, *deviation = views[1].buf, *p = views[2].buf;
    double q = PyFloat_AsDouble(arguments[3]), low = INFINITY, high = -INFINITY;
    Py_ssize_t count = size_of(&views[0]);
    int fits = count && size_of(&views[1]) == count && size_of(&views[2]) == count && !PyErr_Occurred();
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        low = mean[i] - 9.0 * deviation[i] < low ? mean[i] - 9.0 * deviation[i] : low;
        high = larger(high, mean[i] + 9.0 * deviation[i]);
    }
    while (fits && high - low > 1e-6 * (fabs(high) + fabs(low)) + 1e-300) {
        double middle = 0.5 * (low + high);
        if (share_below(mean, deviation, p, count, middle) < q - 1e-12) low = middle;
        else high = middle;
    }
    release_arrays(views, 3);
    if (!fits) return size_error();
    return PyFloat_FromDouble(high);
}

static PyMethodDef functions[] = {
    FUNCTION(decode_seconds, "Decoding iterations on a side's stages."),
    FUNCTION(rounds, "Iterations of equal micro-batches."),
    FUNCTION(phases, "A phase in a pipeline that repeats it."),
    FUNCTION(iterations, "Iterations alone, from an empty pipeline."),
    FUNCTION(tandem, "Items one after the other through stages."),
    FUNCTION(follow, "Iterations until the first stage is free at some time."),
    FUNCTION(repeated, "Iterations one after the other, each of them repeated."),
    FUNCTION(slots, "Prompts that share iterations."),
    FUNCTION(transfers, "Items that senders give to receivers in turns."),
    FUNCTION(mixture_quantile, "A quantile of a mixture of normal distributions."),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "recurrences",
    .m_doc = "The recurrences that pipelines follow.",
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit_recurrences(void) { return PyModuleDef_Init(&module); }
