/* The ledger and the policies' decisions, compiled (exegpt/policies). */
#ifndef EXEGPT_EVENT_LEDGER_H
#define EXEGPT_EVENT_LEDGER_H
#include "../cost/iteration_costs.h"

enum { STATIC, ORCA, CHUNKED, RRA, WAA }; /* policies */

/* ---- the ledger (exegpt/batching/ledger.py), first come, first served ---- */

typedef struct {
    double arrival, ready, started, first, finish;
    Py_ssize_t input, output, cached, generated, blocks;
    int flags, finished;
} Request;

typedef struct {
    Request *requests;
    Py_ssize_t count, admitted, arrived, free_blocks, iterations, encodings, decodings, finishes;
    Py_ssize_t *encoding, *decoding, *finished; /* sequences, [count] each */
    int early_termination, encoder_decoder;
} Ledger;

/* One iteration, or several alike. */
typedef struct {
    Chunk *chunks;
    Py_ssize_t *decode;
    Py_ssize_t encodes, decodes, repeats;
    int arrivals;
    double *first; /* [micro-batches]: when the first iteration's tokens came out */
} Step;

static int idle(const Ledger *l) { return !l->encodings && !l->decodings && l->admitted == l->count; }

static void arrive(Ledger *l, double now) {
    while (l->arrived < l->count && l->requests[l->arrived].arrival <= now) l->arrived++;
}

static double next_arrival(Ledger *l, double now) {
    arrive(l, now);
    return l->arrived < l->count ? l->requests[l->arrived].arrival : INFINITY;
}

static void encode_chunk(Ledger *l, Step *step, Py_ssize_t sequence, Py_ssize_t tokens) {
    const Request *r = &l->requests[sequence];
    step->chunks[step->encodes++] =
        (Chunk){sequence, (double)tokens, (double)r->cached, r->cached + tokens >= r->input, 0.0};
}

/* Take the first waiting request in; negative where there is none or its blocks are not free. */
static Py_ssize_t admit(Ledger *l, double now) {
    arrive(l, now);
    if (l->admitted == l->arrived || l->requests[l->admitted].blocks > l->free_blocks) return -1;
    l->free_blocks -= l->requests[l->admitted].blocks;
    l->encoding[l->encodings++] = l->admitted;
    return l->admitted++;
}

/* Whole prompts, up to `most`. */
static void admit_prompts(Ledger *l, Step *step, Py_ssize_t most, double now) {
    Py_ssize_t sequence;
    while (most-- > 0 && (sequence = admit(l, now)) >= 0) encode_chunk(l, step, sequence, l->requests[sequence].input);
}

static void finish(Ledger *l, Py_ssize_t sequence) {
    l->requests[sequence].finished = 1;
    l->finished[l->finishes++] = sequence;
}

/* Finished sequences leave; of static batches only when all have finished. */
static void release(Ledger *l) {
    if (!l->finishes) return;
    if (!l->early_termination) {
        if (l->encodings) return;
        for (Py_ssize_t i = 0; i < l->decodings; i++)
            if (!l->requests[l->decoding[i]].finished) return;
    }
    Py_ssize_t kept = 0;
    for (Py_ssize_t i = 0; i < l->decodings; i++) {
        Request *r = &l->requests[l->decoding[i]];
        if (r->finished) l->free_blocks += r->blocks;
        else l->decoding[kept++] = l->decoding[i];
    }
    l->decodings = kept;
}

/* Book a step's work; `finished` then holds the sequences that ended in it. */
static void advance(Ledger *l, const Step *step, Py_ssize_t iterations) {
    l->finishes = 0;
    int completed = 0;
    for (Py_ssize_t i = 0; i < step->encodes; i++) {
        Py_ssize_t sequence = step->chunks[i].sequence;
        Request *r = &l->requests[sequence];
        r->cached += (Py_ssize_t)step->chunks[i].tokens;
        if (r->cached < r->input) continue;
        completed = 1;
        l->decoding[l->decodings++] = sequence;
        r->generated = !l->encoder_decoder;
        if (r->generated >= r->output) finish(l, sequence);
    }
    if (completed) {
        Py_ssize_t kept = 0;
        for (Py_ssize_t i = 0; i < l->encodings; i++)
            if (l->requests[l->encoding[i]].cached < l->requests[l->encoding[i]].input)
                l->encoding[kept++] = l->encoding[i];
        l->encodings = kept;
    }
    if (step->decodes) l->iterations += iterations;
    for (Py_ssize_t i = 0; i < step->decodes; i++) {
        Request *r = &l->requests[step->decode[i]];
        if (r->finished) continue;
        r->cached += iterations, r->generated += iterations;
        if (r->generated >= r->output) finish(l, step->decode[i]);
    }
    release(l);
}

/* ---- policies (exegpt/policies) ---- */

typedef struct {
    int name;
    Py_ssize_t batch, other; /* max_num_seqs or encode_batch; prefills, budget or N_D */
    Py_ssize_t phase_ends;
} Policy;

static void decode_all(const Ledger *l, Step *step, Py_ssize_t most) {
    step->decodes = l->decodings < most ? l->decodings : most;
    memcpy(step->decode, l->decoding, step->decodes * sizeof *step->decode);
}

static void next_chunked(const Policy *p, Ledger *l, Step *step, double now) {
    decode_all(l, step, p->other);
    Py_ssize_t budget = p->other - step->decodes, sequence;
    for (Py_ssize_t i = 0; i < l->encodings && budget > 0; i++) {
        const Request *r = &l->requests[l->encoding[i]];
        Py_ssize_t left = r->input - r->cached, tokens = left < budget ? left : budget;
        encode_chunk(l, step, l->encoding[i], tokens);
        budget -= tokens;
    }
    while (budget > 0 && l->encodings + l->decodings < p->batch && (sequence = admit(l, now)) >= 0) {
        Py_ssize_t left = l->requests[sequence].input, tokens = left < budget ? left : budget;
        encode_chunk(l, step, sequence, tokens);
        budget -= tokens;
    }
    step->arrivals = budget > 0 && l->encodings + l->decodings < p->batch;
}

/* The next step; without prompts and sequences, nothing can run. */
static void next_step(Policy *p, Ledger *l, Step *step, double now) {
    step->encodes = step->decodes = step->arrivals = 0;
    step->repeats = PY_SSIZE_T_MAX;
    if (p->name == CHUNKED) {
        next_chunked(p, l, step, now);
    } else if (p->name == ORCA) {
        Py_ssize_t room = p->batch - l->decodings < p->other ? p->batch - l->decodings : p->other;
        decode_all(l, step, l->decodings);
        admit_prompts(l, step, room, now);
        step->arrivals = room > 0;
    } else if (p->name == STATIC) {
        if (l->decodings) decode_all(l, step, l->decodings);
        else admit_prompts(l, step, p->batch, now);
    } else { /* RRA */
        if (l->iterations >= p->phase_ends || !l->decodings) {
            p->phase_ends = l->iterations + p->other;
            admit_prompts(l, step, p->batch, now);
            if (step->encodes) return;
        }
        decode_all(l, step, l->decodings);
        step->repeats = p->phase_ends - l->iterations;
    }
}
#endif
