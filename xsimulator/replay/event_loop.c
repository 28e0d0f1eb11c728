/* The event simulator, compiled: one replica's requests through a policy's decisions, and when each one began, gave its
 * first token and finished. What is decided and booked is what exegpt/policies, event_simulator.py, lanes.py and
 * cells.py decide and book; tests/xsimulator/replay/test_compiled.py holds it to them request by request. event_loop.pyi
 * says what it takes.
 *
 * A goodput search asks for a hundred thousand requests at a time, hundreds of times. */
#include "event_pipeline.h"

enum { TTFT, TPOT, LATENCY, BOUNDS };           /* what may be missed */
enum { COUNTS = 1, COUNTS_FOR_LATENCY = 2 };    /* flags of a request */

/* ---- records (record.py) and bounds ---- */

static void start(Ledger *l, const Step *step, double now) {
    for (Py_ssize_t i = 0; i < step->encodes; i++)
        if (step->chunks[i].past == 0.0) l->requests[step->chunks[i].sequence].started = now;
}

static void book(Ledger *l, const Pipeline *p, const Step *step, Py_ssize_t iterations) {
    advance(l, step, iterations);
    for (Py_ssize_t i = 0; i < step->encodes; i++) {
        Request *r = &l->requests[step->chunks[i].sequence];
        if (r->generated) r->first = step->chunks[i].out;
        if (r->finished) r->finish = step->chunks[i].out;
    }
    if (l->encoder_decoder)
        for (Py_ssize_t i = 0; i < step->decodes; i++) {
            Request *r = &l->requests[step->decode[i]];
            if (isnan(r->first)) r->first = step->first[micro_batch(p, step->decode[i])];
        }
    for (Py_ssize_t i = 0; i < l->finishes; i++) {
        Request *r = &l->requests[l->finished[i]];
        if (isnan(r->finish)) r->finish = p->token[micro_batch(p, l->finished[i])];
    }
}

/* Bounds in seconds, and how many of the requests that count have missed each and may. */
typedef struct {
    const double *limit;
    double *missed;
    const double *allowed;
    Py_ssize_t first, last; /* requests before these were checked for their first token, and their last */
} Watch;

/* Whether a bound is already broken: too many have missed it, or wait for longer than it already. */
static int broken(Watch *w, const Ledger *l, double now) {
    for (Py_ssize_t i = 0; i < l->finishes; i++) {
        const Request *r = &l->requests[l->finished[i]];
        if (r->flags & COUNTS && r->output > 1)
            w->missed[TPOT] += (r->finish - r->first) / (double)(r->output - 1) > w->limit[TPOT];
    }
    for (; w->first < l->count && now - l->requests[w->first].arrival > w->limit[TTFT]; w->first++) {
        const Request *r = &l->requests[w->first];
        w->missed[TTFT] += r->flags & COUNTS && !(r->first - r->arrival <= w->limit[TTFT]);
    }
    for (; w->last < l->count && now - l->requests[w->last].arrival > w->limit[LATENCY]; w->last++) {
        const Request *r = &l->requests[w->last];
        w->missed[LATENCY] += r->flags & COUNTS_FOR_LATENCY && !(r->finish - r->arrival <= w->limit[LATENCY]);
    }
    for (int b = 0; b < BOUNDS; b++)
        if (w->missed[b] > w->allowed[b]) return 1;
    return 0;
}

/* ---- the loops (event_simulator.py, lanes.py) ---- */

typedef enum { DONE, BROKEN, STUCK } End;

static End colocated(Policy *policy, Ledger *l, Pipeline *p, Step *step, Watch *watch) {
    double now = 0.0;
    while (!idle(l)) {
        next_step(policy, l, step, now);
        if (!step->encodes && !step->decodes) {
            now = next_arrival(l, now);
            if (now == INFINITY) return STUCK;
            continue;
        }
        Py_ssize_t iterations = 1;
        start(l, step, now);
        if (step->encodes) now = run_encoding(p, l, step, now);
        else iterations = run_decoding(p, l, step, now, step->arrivals ? next_arrival(l, now) : INFINITY, &now);
        book(l, p, step, iterations);
        if (broken(watch, l, now)) return BROKEN;
    }
    return DONE;
}

/* The decoding side's next step, and when the next batch reaches it. */
static double next_decode(const Ledger *l, Step *step, double now) {
    double arrives = INFINITY;
    step->encodes = step->decodes = 0;
    step->repeats = PY_SSIZE_T_MAX;
    for (Py_ssize_t i = 0; i < l->decodings; i++) {
        double ready = l->requests[l->decoding[i]].ready;
        if (ready <= now) step->decode[step->decodes++] = l->decoding[i];
        else if (ready < arrives) arrives = ready;
    }
    return arrives;
}

static End disaggregated(const Policy *policy, Ledger *l, Pipeline *encode, Pipeline *decode, const Grid *transfer, Step *steps,
                 double *outs, Watch *watch) {
    Step *prompts = &steps[0], *tokens = &steps[1];
    Py_ssize_t underway = 2 * encode->stages - 1, sent = 0, ran = 0;
    double encode_at = 0.0, decode_at = INFINITY, arrived = 0.0;
    int waits = 0;
    while (!idle(l)) {
        double now = decode_at < encode_at ? decode_at : encode_at;
        if (now == INFINITY) return STUCK;
        if (decode_at == now && ran) {
            book(l, decode, tokens, ran);
            ran = 0;
            if (l->finishes && waits) encode_at = now;
            if (broken(watch, l, now)) return BROKEN;
        }
        if (encode_at <= now) {
            prompts->encodes = prompts->decodes = 0;
            admit_prompts(l, prompts, policy->batch, now);
            waits = !prompts->encodes;
            if (waits) {
                encode_at = next_arrival(l, now);
            } else {
                start(l, prompts, now);
                double next = run_encoding(encode, l, prompts, now), out = 0.0, computed = 0.0;
                for (Py_ssize_t i = 0; i < prompts->encodes; i++)
                    out = larger(out, prompts->chunks[i].out), computed += prompts->chunks[i].tokens;
                double seconds = along(transfer, computed);
                arrived = larger(out + seconds, arrived + seconds / 2);
                for (Py_ssize_t i = 0; i < prompts->encodes; i++) l->requests[prompts->chunks[i].sequence].ready = arrived;
                book(l, encode, prompts, 1);
                if (broken(watch, l, -INFINITY)) return BROKEN; /* what decodes meanwhile is not booked yet */
                outs[sent++ % underway] = out;
                encode_at = larger(next, sent >= underway ? outs[sent % underway] : 0.0);
                if (decode_at == INFINITY) decode_at = arrived;
            }
        }
        if (decode_at <= now) {
            double arrives = next_decode(l, tokens, now);
            if (!tokens->decodes) decode_at = arrives;
            else ran = run_decoding(decode, l, tokens, now, arrives < encode_at ? arrives : encode_at, &decode_at);
        }
    }
    return DONE;
}

/* ---- from Python ---- */

/* Memory that is freed together. */
typedef struct {
    void *blocks[48];
    int count, failed;
} Memory;

static void *allocate(Memory *m, Py_ssize_t count, size_t size) {
    void *block = m->count < 48 ? calloc(count > 0 ? count : 1, size) : NULL;
    if (block) m->blocks[m->count++] = block;
    else m->failed = 1;
    return block;
}

static void free_all(Memory *m) {
    while (m->count) free(m->blocks[--m->count]);
}

static Step new_step(Memory *m, Py_ssize_t count, Py_ssize_t micro_batches) {
    return (Step){.chunks = allocate(m, count, sizeof(Chunk)),
                  .decode = allocate(m, count, sizeof(Py_ssize_t)),
                  .first = allocate(m, micro_batches, sizeof(double))};
}

static Pipeline pipeline(Memory *m, Reader *r, Py_ssize_t requests, double *busy) {
    Pipeline p = {.stages = (Py_ssize_t)read_number(r)};
    p.micro_batches = (Py_ssize_t)read_number(r);
    p.encode_parts = (Py_ssize_t)read_number(r);
    p.takes_over = read_number(r) != 0.0;
    p.kinds = (Py_ssize_t)read_number(r);
    if (r->truncated || p.stages < 1 || p.micro_batches < 1 || p.kinds < 1 || p.encode_parts < 0) {
        r->truncated = 1;
        return p;
    }
    p.place = read_array(r, p.stages);
    Kind *kinds = allocate(m, p.kinds, sizeof(Kind));
    p.hop = allocate(m, p.stages, sizeof(Grid));
    for (Py_ssize_t k = 0; kinds && k < p.kinds; k++) kinds[k] = read_kind(r);
    for (Py_ssize_t s = 0; p.hop && s < p.stages; s++) p.hop[s] = read_grid(r);
    p.kind = kinds;
    Py_ssize_t parts = p.micro_batches > p.encode_parts ? p.micro_batches : p.encode_parts;
    p.parts = allocate(m, parts, sizeof(Part));
    p.free_at = allocate(m, p.stages, sizeof(double));
    p.token = allocate(m, p.micro_batches, sizeof(double));
    p.seconds = allocate(m, parts * p.kinds, sizeof(double));
    p.outer = allocate(m, parts * p.kinds, sizeof(double));
    p.hops = allocate(m, parts * p.stages, sizeof(double));
    p.sorted = allocate(m, requests, sizeof(Chunk));
    p.busy = busy;
    return p;
}

static Ledger ledger(Memory *m, const Py_buffer *views, const double *settings) {
    const double *arrival = views[0].buf, *input = views[1].buf, *output = views[2].buf, *flags = views[3].buf;
    Py_ssize_t count = size_of(&views[0]), block_size = (Py_ssize_t)settings[4];
    Ledger l = {.count = count, .free_blocks = (Py_ssize_t)settings[3]};
    l.encoder_decoder = settings[5] != 0.0;
    l.early_termination = (int)settings[0] != STATIC;
    l.requests = allocate(m, count, sizeof(Request));
    l.encoding = allocate(m, count, sizeof(Py_ssize_t));
    l.decoding = allocate(m, count, sizeof(Py_ssize_t));
    l.finished = allocate(m, count, sizeof(Py_ssize_t));
    for (Py_ssize_t i = 0; !m->failed && i < count; i++) {
        Py_ssize_t in = (Py_ssize_t)input[i], out = (Py_ssize_t)output[i];
        Py_ssize_t tokens = in + out - 1 + l.encoder_decoder;
        l.requests[i] = (Request){.arrival = arrival[i], .started = NAN, .first = NAN, .finish = NAN,
                                  .input = in, .output = out, .flags = (int)flags[i],
                                  .blocks = (tokens + block_size - 1) / block_size};
    }
    return l;
}

static PyObject *run(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[11];
    if (!take_arrays(arguments, nargs, 11, "rrrrrrrrwww", views)) return NULL;
    Py_ssize_t count = size_of(&views[0]);
    const double *settings = views[5].buf;
    Memory memory = {.count = 0};
    Reader sides = {views[4].buf, (const double *)views[4].buf + size_of(&views[4]), 0};
    int fits = count && size_of(&views[1]) == count && size_of(&views[2]) == count && size_of(&views[3]) == count &&
               size_of(&views[5]) == 6 && size_of(&views[6]) == BOUNDS && size_of(&views[7]) == BOUNDS &&
               size_of(&views[8]) == BOUNDS && size_of(&views[9]) == 3 * count && settings[4] >= 1.0;
    End end = STUCK;
    if (fits) {
        Policy policy = {(int)settings[0], (Py_ssize_t)settings[1], (Py_ssize_t)settings[2], 0};
        Ledger l = ledger(&memory, views, settings);
        Watch watch = {views[6].buf, views[8].buf, views[7].buf, 0, 0};
        double *busy = views[10].buf;
        Pipeline first = pipeline(&memory, &sides, count, busy), second = first;
        fits = !sides.truncated && first.stages <= size_of(&views[10]);
        if (fits && policy.name == WAA) {
            second = pipeline(&memory, &sides, count, busy + first.stages);
            fits = !sides.truncated && first.stages + second.stages == size_of(&views[10]);
        }
        if (fits) {
            Grid transfer = read_grid(&sides);
            Step steps[2] = {new_step(&memory, count, second.micro_batches),
                             new_step(&memory, count, second.micro_batches)};
            double *outs = allocate(&memory, 2 * first.stages, sizeof(double));
            fits = !sides.truncated && sides.next == sides.end;
            if (fits && !memory.failed) {
                Py_BEGIN_ALLOW_THREADS;
                end = policy.name == WAA ? disaggregated(&policy, &l, &first, &second, &transfer, steps, outs, &watch)
                                         : colocated(&policy, &l, &first, &steps[0], &watch);
                l.finishes = 0;
                if (end == DONE && broken(&watch, &l, INFINITY)) end = BROKEN;
                Py_END_ALLOW_THREADS;
                double *times = views[9].buf;
                for (Py_ssize_t i = 0; i < count; i++) {
                    times[3 * i] = l.requests[i].started;
                    times[3 * i + 1] = l.requests[i].first;
                    times[3 * i + 2] = l.requests[i].finish;
                }
            }
        }
    }
    free_all(&memory);
    release_arrays(views, 11);
    if (memory.failed) return PyErr_NoMemory();
    if (!fits) return size_error();
    if (end == STUCK) {
        PyErr_SetString(PyExc_RuntimeError, "a waiting request can never be admitted");
        return NULL;
    }
    return PyBool_FromLong(end == DONE);
}

static PyMethodDef functions[] = {
    FUNCTION(run, "Requests through a replica."),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "event_loop",
    .m_doc = "The event simulator, compiled.",
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit_event_loop(void) { return PyModuleDef_Init(&module); }
