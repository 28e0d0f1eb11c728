/* The event simulator, compiled: one replica's requests through a policy's decisions, and when each one began, gave its
 * first token and finished. What is decided and booked is what xcore/policies, event_simulator.py, lanes.py and
 * cells.py decide and book; tests/xsimulator/replay/test_compiled.py holds it to them request by request. event_loop.pyi
 * says what it takes.
 *
 * A goodput search asks for a hundred thousand requests at a time, hundreds of times. */
#include "event_pipeline.h"
#include "event_policies.h"

enum { TTFT, TPOT, LATENCY, BOUNDS };           /* bounds that may be missed */
enum { USED_BATCH, USED_BLOCKS, CANDIDATES, USED }; /* the largest used batch and blocks, the most candidates of a batch */
enum { COUNTS = 1, COUNTS_FOR_LATENCY = 2 };    /* flags of a request */

/* ---- records (record.py) and bounds ---- */

static void start(Ledger *l, const Pipeline *p, const Step *step, double now) {
    for (Py_ssize_t i = 0; i < step->encodes; i++) {
        Request *r = &l->requests[step->chunks[i].sequence];
        if (isnan(r->started)) r->started = larger(now, p->free_at[0]);
    }
}

static void book(Ledger *l, const Pipeline *p, const Step *step, Py_ssize_t iterations) {
    advance(l, step, iterations);
    l->turns.soonest = INFINITY;
    for (Py_ssize_t i = 0; i < step->encodes; i++) {
        Request *r = &l->requests[step->chunks[i].sequence];
        if (r->generated && isnan(r->first)) r->first = step->chunks[i].out;
        if (r->status == FINISHED) r->finish = step->chunks[i].out;
    }
    if (l->encoder_decoder)
        for (Py_ssize_t i = 0; i < step->decodes; i++) {
            Request *r = &l->requests[step->decode[i]];
            if (isnan(r->first)) r->first = step->first[micro_batch(p, step->decode[i])];
        }
    for (Py_ssize_t i = 0; i < l->finishes; i++) {
        Request *r = &l->requests[l->finished[i]];
        if (isnan(r->finish)) r->finish = p->token[micro_batch(p, l->finished[i])];
        if (l->turns.next) follow_turn(l, l->finished[i]);
    }
}

/* Bounds in seconds, and how many of the counting requests have missed each, and may miss it. */
typedef struct {
    const double *limit;
    double *missed;
    const double *allowed;
    double *used;           /* the largest batch, the most blocks, and the most candidates of an adjusted batch */
    Py_ssize_t first, last; /* earlier requests are checked: first tokens, last ones */
} Watch;

/* Return whether a bound is already broken: too many requests have missed it, or have waited for longer than it. */
static int broken(Watch *w, const Ledger *l, double now) {
    for (Py_ssize_t i = 0; i < l->finishes; i++) {
        const Request *r = &l->requests[l->finished[i]];
        if (r->flags & COUNTS && r->tokens > 1)
            w->missed[TPOT] += (r->finish - r->first) / (double)(r->tokens - 1) > w->limit[TPOT];
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

/* Record the batch and the blocks that a step uses, and the candidates of its batch. */
static void note_use(Watch *w, const Policy *p, const Ledger *l, const Step *step) {
    Py_ssize_t batch = p->name == ORCA || p->name == CHUNKED ? residents(l) : step->encodes;
    w->used[USED_BATCH] = larger(w->used[USED_BATCH], (double)batch);
    w->used[USED_BLOCKS] = larger(w->used[USED_BLOCKS], (double)(l->pool.total - l->pool.available));
    w->used[CANDIDATES] = larger(w->used[CANDIDATES], (double)p->adjustment.most_candidates);
}

/* ---- the loops (event_simulator.py, lanes.py) ---- */

typedef enum { DONE, BROKEN, STUCK } End;

/* Run decode steps alone, until a request arrives that may be admitted. */
static Py_ssize_t decode_row(Ledger *l, Pipeline *p, Step *step, double *now) {
    double until = step->arrivals ? next_arrival(l, *now) : INFINITY;
    step->repeats = repeats(l, step);
    Py_ssize_t ran = run_decoding(p, l, step, *now, l->victim_count ? *now : until, now);
    for (Py_ssize_t i = 0; l->grows && ran > 1 && i < step->decodes; i++)
        extend(l, &l->requests[step->decode[i]], needed_tokens(l, &l->requests[step->decode[i]], ran));
    return ran;
}

/* Return whether a step samples any token. */
static int gives_tokens(const Ledger *l, const Step *step) {
    int gives = step->decodes > 0;
    for (Py_ssize_t i = 0; !gives && !l->encoder_decoder && i < step->encodes; i++) gives = step->chunks[i].completes;
    return gives;
}

/* `outs` holds the times at which the last token-giving steps left the pipeline, as many as may be in flight on it. */
static End colocated(Policy *policy, Ledger *l, Pipeline *p, Step *step, double *outs, Watch *watch) {
    double now = 0.0;
    Py_ssize_t underway = 2 * p->stages - 1, sent = 0;
    while (!idle(l)) {
        if (l->leavings && now >= done(p)) settle(l);
        next_step(policy, l, step, now);
        if (l->out_of_memory) return STUCK;
        note_use(watch, policy, l, step);
        for (Py_ssize_t i = 0; i < l->victim_count; i++) /* none returns before its last token is out */
            l->requests[l->victims[i]].ready = p->token[micro_batch(p, l->victims[i])];
        if (!step->encodes && !step->decodes) {
            now = next_arrival(l, now);
            if (l->leavings && done(p) < now) now = done(p);
            if (now == INFINITY) return STUCK;
            continue;
        }
        Py_ssize_t iterations = 1;
        start(l, p, step, now);
        if (p->stages > 1 && outs[(sent + 1) % underway] > now) step->repeats = 1;
        if (step->encodes) now = run_encoding(p, l, step, now);
        else iterations = decode_row(l, p, step, &now);
        if (p->stages > 1) {
            if (gives_tokens(l, step)) outs[sent++ % underway] = done(p);
            now = larger(now, outs[sent % underway]);
        }
        book(l, p, step, iterations);
        if (broken(watch, l, now)) return BROKEN;
    }
    return DONE;
}

/* The decoding side's next step, and when the next batch reaches it. */
static double next_decode(Ledger *l, Step *step, double now) {
    double arrives = l->sums.on ? join_arrived(l, now) : INFINITY;
    step->encodes = 0, step->decodes = l->sums.on ? l->decodings : 0;
    step->repeats = PY_SSIZE_T_MAX;
    if (l->sums.on) return arrives;
    for (Py_ssize_t i = 0; i < l->decodings; i++) {
        double ready = l->requests[l->decoding[i]].ready;
        if (ready <= now) step->decode[step->decodes++] = l->decoding[i];
        else if (ready < arrives) arrives = ready;
    }
    return arrives;
}

static End disaggregated(Policy *policy, Ledger *l, Pipeline *encode, Pipeline *decode, Grid *transfer, Step *steps,
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
            if (waits && l->turns.soonest < now) { /* after a micro-batch that ended before the others */
                encode_at = l->turns.soonest;
                continue;
            }
        }
        if (encode_at <= now) {
            prompts->encodes = prompts->decodes = 0;
            admit_batch(&policy->adjustment, l, prompts, policy->batch, now);
            note_use(watch, policy, l, prompts);
            waits = !prompts->encodes;
            if (waits) {
                encode_at = next_arrival(l, now);
            } else {
                start(l, encode, prompts, now);
                double next = run_encoding(encode, l, prompts, now), out = 0.0, computed = 0.0;
                for (Py_ssize_t i = 0; i < prompts->encodes; i++)
                    out = larger(out, prompts->chunks[i].out), computed += prompts->chunks[i].tokens;
                double seconds = along(transfer, computed);
                arrived = larger(out + seconds, arrived + seconds / 2);
                for (Py_ssize_t i = 0; i < prompts->encodes; i++) l->requests[prompts->chunks[i].sequence].ready = arrived;
                book(l, encode, prompts, 1);
                if (broken(watch, l, -INFINITY)) return BROKEN; /* decoding in the meantime is not booked yet */
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

static Step new_step(Memory *m, Py_ssize_t count, Py_ssize_t micro_batches) {
    return (Step){.chunks = reserve(m, count, sizeof(Chunk)),
                  .decode = reserve(m, count, sizeof(Py_ssize_t)),
                  .first = allocate(m, micro_batches, sizeof(double))};
}

/* Let the tables that every iteration reads keep their values. */
static void keep_values(Memory *m, Pipeline *p) {
    enum { EACH = 4 };
    double *known = allocate(m, (EACH * p->kinds + p->stages) * KNOWN, sizeof(double));
    for (Py_ssize_t k = 0; known && k < p->kinds; k++) {
        Kind *kind = &p->kind[k];
        Grid *grids[EACH] = {&kind->embedding, &kind->head, &kind->overhead, &kind->decoder.rest};
        for (int g = 0; g < EACH; g++, known += KNOWN)
            if (grids[g]->axes == 1) grids[g]->known = known;
    }
    for (Py_ssize_t s = 0; known && s < p->stages; s++, known += KNOWN)
        if (p->hop[s].axes == 1) p->hop[s].known = known;
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
    const double *place = read_array(r, p.stages);
    Kind *kinds = allocate(m, p.kinds, sizeof(Kind));
    p.place = allocate(m, p.stages, sizeof(Py_ssize_t));
    p.like = allocate(m, p.kinds, sizeof(Py_ssize_t));
    p.attention = allocate(m, p.kinds, sizeof(double));
    for (Py_ssize_t s = 0; p.place && !r->truncated && s < p.stages; s++) p.place[s] = (Py_ssize_t)place[s];
    p.hop = allocate(m, p.stages, sizeof(Grid));
    for (Py_ssize_t k = 0; kinds && k < p.kinds; k++) kinds[k] = read_kind(r);
    for (Py_ssize_t s = 0; p.hop && s < p.stages; s++) p.hop[s] = read_grid(r);
    p.kind = kinds;
    if (kinds && p.hop) keep_values(m, &p);
    for (Py_ssize_t k = 0; p.like && kinds && !r->truncated && k < p.kinds; k++)
        while (!same_grid(&kinds[p.like[k]].decoder.decode, &kinds[k].decoder.decode)) p.like[k]++;
    Py_ssize_t parts = p.micro_batches > p.encode_parts ? p.micro_batches : p.encode_parts;
    p.parts = allocate(m, parts, sizeof(Part));
    p.free_at = allocate(m, p.stages, sizeof(double));
    p.token = allocate(m, p.micro_batches, sizeof(double));
    p.seconds = allocate(m, parts * p.kinds, sizeof(double));
    p.outer = allocate(m, parts * p.kinds, sizeof(double));
    p.hops = allocate(m, parts * p.stages, sizeof(double));
    p.sorted = reserve(m, requests, sizeof(Chunk));
    p.origin = reserve(m, requests, sizeof(Py_ssize_t));
    p.busy = busy;
    return p;
}

/* An argument's place in `run`. */
enum { ARRIVALS, INPUTS, OUTPUTS, STEPS, FLAGS, SIDES, SETTINGS, LIMITS, ALLOWED, MISSED, AT_MOST, PLACES, PARENTS, SHARED, WARM,
       RECEIVED, PAUSES, NEXT, SESSIONS, TIMES, BUSY, ARRAYS };
/* And a setting's. */
enum { POLICY, BATCH, OTHER, KV_BLOCKS, BLOCK_SIZE, ENCODER_DECODER, GROWS, CACHES, SHARES_IN_STEP, AHEAD,
       DRAFTED, SHARE, TOKENS, WEIGHT, LEVEL, FOLLOWS, FRONT_END, SETTINGS_COUNT };
/* Figures of a request in `times`. */
enum { ARRIVED, STARTED, FIRST, FINISH, HIT, REUSED, PREEMPTIONS, FIGURES };

/* Create the pool of a ledger whose requests may hold up to `touched` different blocks. It keeps nothing about blocks
 * that no sequence can ever touch. */
static Pool pool(Memory *m, const double *settings, Py_ssize_t touched) {
    Pool p = {.available = (Py_ssize_t)settings[KV_BLOCKS], .size = (Py_ssize_t)settings[BLOCK_SIZE]};
    p.total = p.available;
    if (settings[CACHES] == 0.0) return p;
    Py_ssize_t known = p.total < touched ? p.total : touched;
    if (known >= INT32_MAX / 2) {
        m->failed = 1;
        return p;
    }
    for (p.buckets = 1024; p.buckets < known; p.buckets *= 2) {}
    p.blocks = allocate(m, known + 1, sizeof(Block));
    p.unpublished = allocate(m, known, sizeof(int32_t));
    p.first = allocate(m, p.buckets, sizeof(int32_t));
    p.last = allocate(m, p.buckets, sizeof(int32_t));
    return p;
}

/* Return whether a policy gives all decoding sequences a token in every iteration, and treats them alike otherwise. */
static int decodes_alike(const Ledger *l, const Policy *p) {
    if (l->grows || l->caches || l->encoder_decoder) return 0;
    if (p->name == WAA) return !l->drafted;
    return p->name == ORCA || p->name == RRA || (p->name == CHUNKED && p->other >= p->batch * (1 + l->drafted));
}

static Sums sums(Memory *m, const Ledger *l, const Policy *policy, Py_ssize_t micro_batches) {
    Sums s = {.on = decodes_alike(l, policy), .transferred = policy->name == WAA, .group_count = micro_batches};
    if (!s.on) return s;
    if (s.transferred) s.arriving = reserve(m, l->count, sizeof(Py_ssize_t));
    s.heap = reserve(m, l->count, sizeof(Last));
    s.groups = allocate(m, micro_batches, sizeof(Group));
    return s;
}

/* The adjustment of encoding batches, before the first one. */
static Adjustment adjustment(Memory *m, const double *settings, Py_ssize_t requests) {
    Adjustment a = {.share = settings[SHARE], .tokens = settings[TOKENS], .weight = settings[WEIGHT], .level = settings[LEVEL],
                    .follows = settings[FOLLOWS], .batch = (Py_ssize_t)settings[BATCH]};
    if (a.share < 0.0) return a;
    a.fewest = (a.batch + 3) / 4, a.most = 2 * a.batch;
    a.peeked = requests / PEEKED_BATCHES < a.batch ? requests : PEEKED_BATCHES * a.batch;
    a.candidates = reserve(m, a.peeked, sizeof *a.candidates);
    a.chosen = reserve(m, a.peeked, sizeof *a.chosen);
    a.others = reserve(m, a.peeked, sizeof *a.others);
    return a;
}

/* The turns of a closed loop, the first of which are known: those that arrive in finite time. */
static Turns turns(const Py_buffer *views, const Ledger *l) {
    Turns t = {.count = size_of(&views[SESSIONS]), .front_end = ((const double *)views[SETTINGS].buf)[FRONT_END]};
    if (!size_of(&views[NEXT])) return t;
    t.next = views[NEXT].buf, t.pauses = views[PAUSES].buf, t.sessions = views[SESSIONS].buf;
    while (t.begun < t.count && l->requests[t.sessions[t.begun]].arrival < INFINITY) t.begun++;
    return t;
}

static Ledger ledger(Memory *m, const Py_buffer *views, const double *settings) {
    const double *arrival = views[ARRIVALS].buf, *input = views[INPUTS].buf, *output = views[OUTPUTS].buf;
    const double *flags = views[FLAGS].buf, *steps = views[STEPS].buf;
    const Py_ssize_t *places = views[PLACES].buf;
    const double *warm = size_of(&views[WARM]) ? views[WARM].buf : NULL;
    const double *received = size_of(&views[RECEIVED]) ? views[RECEIVED].buf : NULL;
    Py_ssize_t count = size_of(&views[ARRIVALS]), touched = 0;
    Ledger l = {.count = count};
    l.drafted = (Py_ssize_t)settings[DRAFTED];
    l.encoder_decoder = settings[ENCODER_DECODER] != 0.0;
    l.early_termination = (int)settings[POLICY] != STATIC;
    l.grows = settings[GROWS] != 0.0;
    l.caches = settings[CACHES] != 0.0;
    l.shares_in_step = settings[SHARES_IN_STEP] != 0.0;
    l.prefixes = (Prefixes){views[PARENTS].buf, views[SHARED].buf};
    l.requests = reserve(m, count, sizeof(Request));
    l.encoding = reserve(m, count, sizeof(Py_ssize_t));
    l.decoding = reserve(m, count, sizeof(Py_ssize_t));
    l.finished = reserve(m, count, sizeof(Py_ssize_t));
    l.preempted = reserve(m, count, sizeof(Py_ssize_t));
    l.victims = reserve(m, count, sizeof(Py_ssize_t));
    l.leaving = reserve(m, count, sizeof(Py_ssize_t));
    l.queue = reserve(m, count, sizeof(Py_ssize_t));
    l.lingering = settings[AHEAD] != 0.0;
    l.pool = (Pool){.size = (Py_ssize_t)settings[BLOCK_SIZE]};
    for (Py_ssize_t i = 0; !m->failed && i < count; i++) {
        int32_t in = (int32_t)input[i], out = (int32_t)output[i], ends = (int32_t)steps[i];
        l.requests[i] = (Request){.arrival = arrival[i], .started = NAN, .first = NAN, .finish = NAN, .input = in,
                                  .output = ends, .tokens = out, .to_prefill = in, .flags = (int)flags[i],
                                  .growth = ends > 1 ? (double)(out - 1) / (ends - 1) : 1.0,
                                  .place = l.caches ? places[i] : 0, .warm = warm ? (int32_t)warm[i] : 0,
                                  .received = received ? (int32_t)received[i] : 0};
        if (l.caches) touched += most_blocks(&l, &l.requests[i]); /* a division is slow */
        if (arrival[i] < INFINITY) put(&l, i);
    }
    if (!m->failed) l.turns = turns(views, &l);
    l.pool = pool(m, settings, touched);
    return l;
}

/* Free the blocks of the requests that have not ended. */
static void free_requests(Ledger *l) {
    for (Py_ssize_t i = 0; l->caches && i < l->count; i++) free(l->requests[i].keys), free(l->requests[i].blocks);
}

/* Write the figures of the requests. */
static void report(const Ledger *l, double *figures) {
    for (Py_ssize_t i = 0; i < l->count; i++, figures += FIGURES) {
        const Request *r = &l->requests[i];
        figures[ARRIVED] = r->arrival, figures[STARTED] = r->started, figures[FIRST] = r->first, figures[FINISH] = r->finish;
        figures[HIT] = (double)r->hit, figures[REUSED] = (double)r->reused;
        figures[PREEMPTIONS] = (double)r->preemptions;
    }
}

/* Return whether all of an array's indices are from `least` to below `count`. */
static int within(const Py_buffer *view, Py_ssize_t least, Py_ssize_t count) {
    const Py_ssize_t *indices = view->buf;
    for (Py_ssize_t i = 0; i < size_of(view); i++)
        if (indices[i] < least || indices[i] >= count) return 0;
    return 1;
}

/* Return whether the arrays' sizes fit together, and prefixes name existing requests. */
static int sizes_fit(const Py_buffer *views) {
    Py_ssize_t count = size_of(&views[ARRIVALS]), known = size_of(&views[PARENTS]);
    const double *settings = views[SETTINGS].buf;
    if (!count || size_of(&views[SETTINGS]) != SETTINGS_COUNT || settings[BLOCK_SIZE] < 1.0) return 0;
    for (int a = INPUTS; a <= FLAGS; a++)
        if (size_of(&views[a]) != count) return 0;
    for (int a = LIMITS; a <= MISSED; a++)
        if (size_of(&views[a]) != BOUNDS) return 0;
    for (int a = WARM; a <= NEXT; a++)
        if (size_of(&views[a]) && size_of(&views[a]) != count) return 0;
    if (size_of(&views[AT_MOST]) != USED) return 0;
    if (size_of(&views[TIMES]) != FIGURES * count || size_of(&views[SHARED]) != known) return 0;
    if (!within(&views[NEXT], -1, count) || !within(&views[SESSIONS], 0, count)) return 0;
    if (size_of(&views[NEXT]) != size_of(&views[PAUSES])) return 0;
    if (settings[CACHES] == 0.0) return 1;
    const Py_ssize_t *places = views[PLACES].buf, *parents = views[PARENTS].buf;
    if (size_of(&views[PLACES]) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (places[i] < 0 || places[i] >= known) return 0;
    for (Py_ssize_t i = 0; i < known; i++)
        if (parents[i] >= i) return 0;
    return 1;
}

static End follow_requests(Policy *policy, Ledger *l, Pipeline *sides, Grid *transfer, Step *steps, double *outs,
                           Watch *watch) {
    End end = policy->name == WAA ? disaggregated(policy, l, &sides[0], &sides[1], transfer, steps, outs, watch)
                                  : colocated(policy, l, &sides[0], &steps[0], outs, watch);
    l->finishes = 0;
    return end == DONE && broken(watch, l, INFINITY) ? BROKEN : end;
}

static PyObject *run(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t nargs) {
    Py_buffer views[ARRAYS];
    if (!take_arrays(arguments, nargs, ARRAYS, "rrrrrrrrrwwiiirrriiww", views)) return NULL;
    const double *settings = views[SETTINGS].buf;
    Memory memory = {.count = 0};
    Reader packed = {views[SIDES].buf, (const double *)views[SIDES].buf + size_of(&views[SIDES]), 0};
    int fits = sizes_fit(views), out_of_memory = 0;
    End end = STUCK;
    double seconds = 0.0;
    if (fits) {
        Py_ssize_t count = size_of(&views[ARRIVALS]), stages = 0;
        Policy policy = {(int)settings[POLICY], (Py_ssize_t)settings[BATCH], (Py_ssize_t)settings[OTHER], 0,
                         adjustment(&memory, settings, count)};
        Ledger l = ledger(&memory, views, settings);
        Watch watch = {views[LIMITS].buf, views[MISSED].buf, views[ALLOWED].buf, views[AT_MOST].buf, 0, 0};
        Pipeline sides[2];
        int side_count = policy.name == WAA ? 2 : 1;
        for (int s = 0; s < side_count && fits; s++) {
            sides[s] = pipeline(&memory, &packed, count, (double *)views[BUSY].buf + stages);
            sides[s].ahead = settings[AHEAD] != 0.0;
            stages += sides[s].stages;
            fits = !packed.truncated && stages <= size_of(&views[BUSY]);
        }
        if (fits) {
            Grid transfer = read_grid(&packed);
            Py_ssize_t micro_batches = sides[side_count - 1].micro_batches;
            Step steps[2] = {new_step(&memory, count, micro_batches), new_step(&memory, count, micro_batches)};
            double *outs = allocate(&memory, 2 * sides[0].stages, sizeof(double));
            l.sums = sums(&memory, &l, &policy, micro_batches);
            fits = !packed.truncated && packed.next == packed.end && stages == size_of(&views[BUSY]);
            if (fits && !memory.failed) {
                Py_BEGIN_ALLOW_THREADS;
                end = follow_requests(&policy, &l, sides, &transfer, steps, outs, &watch);
                Py_END_ALLOW_THREADS;
                if (end == DONE) report(&l, views[TIMES].buf);
                free_requests(&l);
                out_of_memory = l.out_of_memory;
                for (int s = 0; s < side_count; s++)
                    seconds = larger(seconds, done(&sides[s]));
            }
        }
    }
    out_of_memory |= memory.failed;
    free_all(&memory);
    release_arrays(views, ARRAYS);
    if (!fits) return size_error();
    if (out_of_memory) return PyErr_NoMemory();
    if (end == STUCK) {
        PyErr_SetString(PyExc_RuntimeError, "a waiting request can never be admitted");
        return NULL;
    }
    if (end == BROKEN) Py_RETURN_NONE;
    return PyFloat_FromDouble(seconds);
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
