/* The policies' decisions, compiled (xcore/policies). */
#ifndef EXEGPT_EVENT_POLICIES_H
#define EXEGPT_EVENT_POLICIES_H
#include "event_adjustment.h"

typedef struct {
    int name;
    Py_ssize_t batch, other; /* max_num_seqs or encode_batch; prefills, budget or N_D */
    Py_ssize_t phase_ends;
    Adjustment adjustment;
} Policy;

/* Return up to `most` decoding residents, each with a block for its next token. */
static void decode_all(Ledger *l, Step *step, Py_ssize_t most) {
    Py_ssize_t decodes = l->decodings < most ? l->decodings : most, place = 0;
    step->decodes = decodes;
    if (l->sums.on) return;
    memcpy(step->decode, l->decoding, (size_t)decodes * sizeof *step->decode);
    if (l->grows)
        while (place < decodes &&
               grow(l, step->decode[place], 1 + l->requests[step->decode[place]].behind + l->drafted)) place++;
    if (l->grows) step->decodes = place;
}

/* Add the chunks of the prompts in prefill; return the rest of the budget. */
static Py_ssize_t continue_prompts(Ledger *l, Step *step, Py_ssize_t budget) {
    for (Py_ssize_t i = 0; i < l->encodings && budget > 0; i++) {
        Py_ssize_t left = l->requests[l->encoding[i]].to_prefill, tokens = left < budget ? left : budget;
        encode_chunk(step, l, l->encoding[i], tokens);
        budget -= tokens;
    }
    if (!l->grows) return budget;
    Py_ssize_t place = 0;
    while (place < step->encodes && grow(l, step->chunks[place].sequence, (Py_ssize_t)step->chunks[place].tokens)) place++;
    step->encodes = place;
    return budget;
}

static void next_chunked(const Policy *p, Ledger *l, Step *step, double now) {
    decode_all(l, step, p->other / (1 + l->drafted));
    Py_ssize_t budget = continue_prompts(l, step, p->other - step->decodes * (1 + l->drafted)), sequence;
    while (budget > 0 && residents(l) < p->batch && !l->victim_count && (sequence = admit(l, now, budget)) >= 0) {
        Py_ssize_t left = l->requests[sequence].to_prefill, tokens = left < budget ? left : budget;
        encode_chunk(step, l, sequence, tokens);
        budget -= tokens;
    }
    step->arrivals = budget > 0 && residents(l) < p->batch;
}

static void next_orca(const Policy *p, Ledger *l, Step *step, double now) {
    decode_all(l, step, l->decodings);
    Py_ssize_t room = p->batch - step->decodes - l->leavings;
    if (room > p->other) room = p->other;
    if (!l->victim_count) admit_prompts(l, step, room, now);
    step->arrivals = room > 0;
}

static void next_static(const Policy *p, Ledger *l, Step *step, double now) {
    if (l->decodings) decode_all(l, step, l->decodings);
    if (l->decodings) { /* unless the last unfinished row was preempted; finished rows are computed too */
        step->decodes = l->decodings;
        memcpy(step->decode, l->decoding, (size_t)l->decodings * sizeof *step->decode);
    } else {
        step->decodes = 0;
        admit_prompts(l, step, p->batch, now);
    }
}

static void next_rra(Policy *p, Ledger *l, Step *step, double now) {
    if (l->iterations >= p->phase_ends || !l->decodings) {
        p->phase_ends = l->iterations + p->other;
        admit_batch(&p->adjustment, l, step, p->batch, now);
        if (step->encodes) return;
    }
    decode_all(l, step, l->decodings);
    step->repeats = p->phase_ends - l->iterations;
}

/* Decide the next step; one without prompts and sequences means that nothing can run. */
static void next_step(Policy *p, Ledger *l, Step *step, double now) {
    step->encodes = step->decodes = step->arrivals = 0;
    step->repeats = PY_SSIZE_T_MAX;
    l->victim_count = 0;
    if (p->name == CHUNKED) next_chunked(p, l, step, now);
    else if (p->name == ORCA) next_orca(p, l, step, now);
    else if (p->name == STATIC) next_static(p, l, step, now);
    else next_rra(p, l, step, now);
}
#endif
