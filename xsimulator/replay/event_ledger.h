/* The ledger, compiled (xcore/batching/ledger.py). */
#ifndef EXEGPT_EVENT_LEDGER_H
#define EXEGPT_EVENT_LEDGER_H
#include "../cost/iteration_costs.h"
#include "event_pool.h"

enum { STATIC, ORCA, CHUNKED, RRA, WAA }; /* policies */

/* ---- the ledger (xcore/batching/ledger.py), first come, first served ---- */

typedef enum { WAITING, PREFILL, DECODE, PREEMPTED, FINISHED } Status;

/* The fields that every iteration reads come first, together: there are a hundred thousand requests. */
typedef struct {
    Status status;
    int32_t input, output, cached, generated, behind, to_prefill, recomputed; /* sequence.py; output: iterations */
    int32_t tokens;                   /* of the output: as many as iterations, unless an iteration may give several */
    int32_t held, published;          /* KV blocks, and how many of them are published */
    double arrival, ready, started, first, finish;
    double growth;                    /* tokens that each decode iteration gives */
    int32_t hit, reused, preemptions; /* tokens found in the cache: when it was first admitted, and in all */
    int32_t warm;                     /* tokens of its prompt that are always in the cache, apart from the pool */
    int32_t received;                 /* tokens of its prompt whose keys and values come with it */
    int32_t passed_over;
    int32_t flags;
    int64_t *keys;                    /* keys of its full blocks, from when it is first in the queue to its end */
    int32_t *blocks;                  /* blocks that it holds, if prefixes are cached */
    Py_ssize_t place;                 /* its text among the prefixes' */
} Request;

/* Prefixes that the requests' prompts share (xcore/traces/prefixes.py). */
typedef struct {
    const Py_ssize_t *parents, *shared; /* by request of the whole list: another one or -1, and tokens shared with it */
} Prefixes;

/* A closed loop (following_turns.py): agents run sessions, each of whose turns arrives after the end of the last one. */
typedef struct {
    const Py_ssize_t *next;     /* [requests]: the next turn of the session, or -1; NULL: arrivals are known */
    const double *pauses;       /* [requests]: seconds from the end before a turn to its arrival */
    const Py_ssize_t *sessions; /* first turns, in the order in which agents begin them */
    Py_ssize_t count, begun;
    double front_end;           /* seconds from a turn's end in the engine to its end for the agent */
    double soonest;             /* when the first of the turns that follow the latest step arrives */
} Turns;

/* A decoding sequence, the iteration of its last token, and how many joined before it. */
typedef struct {
    int64_t iteration, joined;
    Py_ssize_t sequence;
} Last;

/* A micro-batch's decoding sequences, their tokens in the cache, and the tokens that an iteration adds to these. */
typedef struct { double decodes, cached, growth; } Group;

/* Decoding sequences as sums, if each of them gets one token in every iteration. An iteration's bookkeeping then takes
 * the same time for any number of them. Where other stages encode, sequences join when their keys and values have
 * arrived. */
typedef struct {
    int on, transferred;
    Py_ssize_t *arriving, first, end; /* encoded sequences, [count], in order of arrival: those from first to end join later */
    int64_t iteration, joined;
    Last *heap; /* [decodings]: the earliest first */
    Group *groups;
    Py_ssize_t group_count;
} Sums;

typedef struct {
    Request *requests;
    Py_ssize_t count, admitted, arrived, known, iterations, encodings, decodings, finishes;
    Py_ssize_t *encoding, *decoding, *finished; /* sequences, [count] each */
    Py_ssize_t *queue; /* by arrival, [count]: `admitted` at least are no longer new, `arrived` have arrived, `known` will */
    Py_ssize_t *preempted, preemptions;         /* waiting again; the next one to return is the last */
    Py_ssize_t *victims, victim_count;          /* preempted by the latest decision */
    Py_ssize_t *leaving, leavings;              /* finished in the latest step, their slots and blocks not free yet */
    Pool pool;
    Prefixes prefixes;
    Turns turns;
    Sums sums;
    int early_termination, encoder_decoder, grows, caches, shares_in_step, lingering, out_of_memory;
    Py_ssize_t drafted; /* draft tokens for which each sequence has blocks */
} Ledger;

/* One iteration, or several equal ones. */
typedef struct {
    Chunk *chunks;
    Py_ssize_t *decode;
    Py_ssize_t encodes, decodes, repeats;
    int arrivals;
    double *first; /* [micro-batches]: when the first iteration's tokens came out */
} Step;

static Py_ssize_t residents(const Ledger *l) {
    return l->encodings + l->decodings + l->leavings + l->sums.end - l->sums.first;
}

static int idle(const Ledger *l) {
    return !l->encodings && !l->decodings && l->sums.first == l->sums.end && !l->preemptions && l->admitted == l->count;
}

/* Return whether a request comes before another one in the queue (fcfs.py). */
static int is_before(const Ledger *l, Py_ssize_t sequence, Py_ssize_t other) {
    double arrival = l->requests[sequence].arrival, others = l->requests[other].arrival;
    return arrival < others || (arrival == others && sequence < other);
}

/* Put a request whose arrival is known into the queue. */
static void put(Ledger *l, Py_ssize_t sequence) {
    Py_ssize_t place = l->known++;
    for (; place > l->admitted && is_before(l, sequence, l->queue[place - 1]); place--) l->queue[place] = l->queue[place - 1];
    l->queue[place] = sequence;
    l->arrived += place < l->arrived;
}

/* Put the agent's next turn into the queue, after one of its turns has ended. */
static void follow_turn(Ledger *l, Py_ssize_t sequence) {
    Turns *t = &l->turns;
    Py_ssize_t next = t->next[sequence];
    if (next < 0 && t->begun < t->count) next = t->sessions[t->begun++];
    if (next < 0 || l->requests[next].arrival != INFINITY || l->known >= l->count) return;
    double arrival = l->requests[next].arrival = l->requests[sequence].finish + t->front_end + t->pauses[next];
    if (arrival < t->soonest) t->soonest = arrival;
    put(l, next);
}

static void arrive(Ledger *l, double now) {
    while (l->arrived < l->known && l->requests[l->queue[l->arrived]].arrival <= now) l->arrived++;
}

/* Return the first waiting request; negative if none has arrived. Preempted requests come before all that never ran. */
static Py_ssize_t first_waiting(Ledger *l, double now) {
    arrive(l, now);
    if (l->preemptions) return l->preempted[l->preemptions - 1];
    return l->admitted < l->arrived ? l->queue[l->admitted] : -1;
}

/* Return when the next request arrives, or the last token of the first preempted one. */
static double next_arrival(Ledger *l, double now) {
    arrive(l, now);
    double next = l->arrived < l->known ? l->requests[l->queue[l->arrived]].arrival : INFINITY;
    if (l->preemptions) {
        double ready = l->requests[l->preempted[l->preemptions - 1]].ready;
        if (ready > now && ready < next) next = ready;
    }
    return next;
}

static void encode_chunk(Step *step, const Ledger *l, Py_ssize_t sequence, Py_ssize_t tokens) {
    const Request *r = &l->requests[sequence];
    step->chunks[step->encodes++] =
        (Chunk){sequence, (double)tokens, (double)r->cached, tokens >= r->to_prefill, 0.0};
}

/* ---- blocks ---- */

static Py_ssize_t most_blocks(const Ledger *l, const Request *r) {
    return blocks_for(&l->pool, (Py_ssize_t)r->input + r->tokens - 1 + l->encoder_decoder + l->drafted);
}

/* Build the keys of all full blocks that a sequence may reach. Each names the request that its tokens come from, and
 * the place there. Returns 0 if memory is exhausted. */
static int find_keys(Ledger *l, Request *r) {
    if (r->keys) return 1;
    Py_ssize_t end = (r->input + r->tokens) / l->pool.size, owner = r->place;
    r->keys = malloc((size_t)(end + 1) * sizeof *r->keys);
    r->blocks = malloc((size_t)most_blocks(l, r) * sizeof *r->blocks);
    if (!r->keys || !r->blocks) return 0;
    while (end > 0) {
        Py_ssize_t parent = l->prefixes.parents[owner];
        Py_ssize_t begin = parent < 0 ? 0 : l->prefixes.shared[owner] / l->pool.size;
        for (Py_ssize_t j = begin; j < end; j++) r->keys[j] = (int64_t)owner << 32 | j;
        if (begin < end) end = begin;
        owner = parent;
    }
    return 1;
}

/* Publish the full blocks of a resident's first tokens. */
static inline void publish(Ledger *l, Request *r, Py_ssize_t tokens) {
    if (tokens < (r->published + 1) * l->pool.size) return; /* a division is slow */
    Py_ssize_t full = tokens / l->pool.size, keys = (r->input + r->tokens) / l->pool.size;
    if (full > keys) full = keys;
    for (; r->published < full; r->published++)
        publish_block(&l->pool, r->blocks[r->published], r->keys[r->published]);
}

static void allocate_blocks(Ledger *l, Request *r, Py_ssize_t count) {
    if (l->caches) while (count-- > 0) r->blocks[r->held++] = take_block(&l->pool);
    else l->pool.available -= count, r->held += (int32_t)count;
}

/* Free the last block first: the end of a prefix is lost before its beginning. */
static void free_blocks(Ledger *l, Request *r) {
    if (l->caches) while (r->held) free_block(&l->pool, r->blocks[--r->held]);
    else if (r->held) l->pool.available += r->held - r->warm / l->pool.size, r->held = 0;
}

/* Write the cached blocks of a prompt to its `blocks`, and return their number. The last token is left out: its
 * computation gives the next token. */
static Py_ssize_t find_prefix(const Ledger *l, Request *r) {
    Py_ssize_t most = (r->to_prefill - 1) / l->pool.size, found = 0;
    int32_t block;
    while (found < most && (block = find_block(&l->pool, r->keys[found]))) r->blocks[found++] = block;
    return found;
}

static void reuse(Ledger *l, Request *r, Py_ssize_t found) {
    for (Py_ssize_t i = 0; i < found && l->caches; i++) hold_block(&l->pool, r->blocks[i]);
    r->held = r->published = (int32_t)found;
    r->cached = (int32_t)(found * l->pool.size);
    r->to_prefill -= r->cached;
    r->reused += r->cached;
    if (r->status == WAITING) r->hit = r->cached;
}

/* Return the tokens that are prefilled before a request decodes: the prompt, and the output before a preemption. */
static inline int32_t known_tokens(const Request *r) { return r->input + (int32_t)(r->growth * r->recomputed + 1e-6); }

/* Return the tokens for which a sequence has blocks before `iterations` decode iterations in a row. */
static inline Py_ssize_t needed_tokens(const Ledger *l, const Request *r, Py_ssize_t iterations) {
    if (r->growth == 1.0) return iterations + l->drafted;
    return 1 + (Py_ssize_t)ceil(r->growth * (double)(iterations - 1)) + l->drafted;
}

/* Admit a waiting request, with `chunk` tokens of its prompt in this step; negative if its blocks are not free. */
static Py_ssize_t admit_request(Ledger *l, Py_ssize_t sequence, Py_ssize_t chunk) {
    Py_ssize_t found = 0;
    Request *r = &l->requests[sequence];
    Py_ssize_t known = known_tokens(r) + l->encoder_decoder;
    Py_ssize_t missing = l->grows ? blocks_for(&l->pool, known) : most_blocks(l, r);
    if (l->caches) {
        if (!find_keys(l, r)) {
            l->out_of_memory = 1;
            return -1;
        }
        found = find_prefix(l, r);
        for (Py_ssize_t i = 0; i < found; i++) missing -= l->pool.blocks[r->blocks[i]].holders > 0;
    } else if (r->warm) {
        found = r->warm / l->pool.size;
        missing -= found;
    }
    if (missing > l->pool.available) return -1;
    if (found) reuse(l, r, found);
    if (r->received && r->status == WAITING) r->cached = r->received, r->to_prefill -= r->received;
    Py_ssize_t prefilled = r->to_prefill < chunk ? r->to_prefill : chunk;
    Py_ssize_t blocks = l->grows ? blocks_for(&l->pool, r->cached + prefilled) : most_blocks(l, r);
    allocate_blocks(l, r, blocks - found);
    if (r->status == PREEMPTED) l->preemptions--;
    r->status = PREFILL;
    while (l->admitted < l->known && l->requests[l->queue[l->admitted]].status != WAITING) l->admitted++;
    l->encoding[l->encodings++] = sequence;
    if (l->caches && l->shares_in_step) publish(l, r, r->cached + prefilled);
    return sequence;
}

/* Admit the first waiting request; negative if there is none or its blocks are not free. */
static Py_ssize_t admit(Ledger *l, double now, Py_ssize_t chunk) {
    Py_ssize_t sequence = first_waiting(l, now);
    return sequence < 0 || l->requests[sequence].ready > now ? -1 : admit_request(l, sequence, chunk);
}

/* Admit up to `most` whole prompts. */
static void admit_prompts(Ledger *l, Step *step, Py_ssize_t most, double now) {
    Py_ssize_t sequence;
    while (most-- > 0 && (sequence = admit(l, now, PY_SSIZE_T_MAX)) >= 0)
        encode_chunk(step, l, sequence, l->requests[sequence].to_prefill);
}

/* Allocate the blocks for `tokens` more cached tokens if they are free; a finished row of a static batch needs none. */
static int extend(Ledger *l, Request *r, Py_ssize_t tokens) {
    if (r->status == FINISHED) return 1;
    Py_ssize_t missing = blocks_for(&l->pool, r->cached + tokens) - r->held;
    if (missing > l->pool.available) return 0;
    if (missing > 0) allocate_blocks(l, r, missing);
    if (l->caches && l->shares_in_step) publish(l, r, r->cached + tokens);
    return 1;
}

/* Return the tokens that a decoding sequence has in the cache. */
static inline double context_of(const Request *r) {
    return r->growth == 1.0 ? (double)r->cached : (double)r->input + r->growth * (double)(r->generated - 1);
}

/* ---- decoding sequences as sums ---- */

static inline Group *group_of(const Ledger *l, Py_ssize_t sequence) {
    return &l->sums.groups[l->sums.group_count == 1 ? 0 : sequence % l->sums.group_count]; /* a division is slow */
}

/* Return whether one sequence ends before another, or in the same iteration and has joined before it. */
static inline int ends_before(const Last *a, const Last *b) {
    return a->iteration < b->iteration || (a->iteration == b->iteration && a->joined < b->joined);
}

/* Start to decode a sequence whose prompt is done. */
static void join(Ledger *l, Py_ssize_t sequence) {
    Request *r = &l->requests[sequence];
    Group *group = group_of(l, sequence);
    Last *heap = l->sums.heap, last = {l->sums.iteration + r->output - r->generated, l->sums.joined++, sequence};
    Py_ssize_t place = l->decodings++;
    for (; place && ends_before(&last, &heap[(place - 1) / 2]); place = (place - 1) / 2)
        heap[place] = heap[(place - 1) / 2];
    heap[place] = last;
    group->decodes += 1.0, group->cached += context_of(r), group->growth += r->growth;
}

/* Remove the sequence whose last token comes first. */
static Py_ssize_t leave(Ledger *l) {
    Last *heap = l->sums.heap;
    Py_ssize_t sequence = heap[0].sequence, count = --l->decodings, place = 0, child;
    Last last = heap[count];
    for (; (child = 2 * place + 1) < count; place = child) {
        if (child + 1 < count && ends_before(&heap[child + 1], &heap[child])) child++;
        if (ends_before(&last, &heap[child])) break;
        heap[place] = heap[child];
    }
    heap[place] = last;
    Request *r = &l->requests[sequence];
    Group *group = group_of(l, sequence);
    r->cached += r->output - r->generated, r->generated = r->output;
    group->decodes -= 1.0, group->cached -= context_of(r), group->growth -= r->growth;
    return sequence;
}

/* Let the sequences join whose keys and values have arrived; return when those of the next one arrive. */
static double join_arrived(Ledger *l, double now) {
    Sums *s = &l->sums;
    while (s->first < s->end && l->requests[s->arriving[s->first]].ready <= now) join(l, s->arriving[s->first++]);
    return s->first < s->end ? l->requests[s->arriving[s->first]].ready : INFINITY;
}

/* Return the iterations until the next sequence ends. */
static Py_ssize_t next_end(const Ledger *l) { return (Py_ssize_t)(l->sums.heap[0].iteration - l->sums.iteration); }

static void decode_sums(Ledger *l, Py_ssize_t iterations) {
    l->sums.iteration += iterations;
    for (Py_ssize_t g = 0; g < l->sums.group_count; g++)
        l->sums.groups[g].cached += l->sums.groups[g].growth * (double)iterations;
}

/* ---- sequences that leave ---- */

static void finish(Ledger *l, Py_ssize_t sequence) {
    l->requests[sequence].status = FINISHED;
    l->finished[l->finishes++] = sequence;
}

static Py_ssize_t without(const Ledger *l, Py_ssize_t *sequences, Py_ssize_t count, Status status) {
    Py_ssize_t kept = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (l->requests[sequences[i]].status != status) sequences[kept++] = sequences[i];
    return kept;
}

static void end(Ledger *l, Py_ssize_t sequence) {
    Request *r = &l->requests[sequence];
    free_blocks(l, r);
    if (!l->caches) return;
    free(r->keys);
    free(r->blocks);
    r->keys = NULL, r->blocks = NULL;
}

/* Free the blocks of leaving sequences, whose step has ended. */
static void settle(Ledger *l) {
    for (Py_ssize_t i = 0; i < l->leavings; i++) end(l, l->leaving[i]);
    l->leavings = 0;
}

/* Release finished sequences in the order in which they finished; those of a static batch when all have finished. */
static void release(Ledger *l) {
    if (l->lingering) {
        memcpy(l->leaving, l->finished, (size_t)l->finishes * sizeof *l->leaving);
        l->leavings = l->finishes;
    } else if (l->early_termination) {
        for (Py_ssize_t i = 0; i < l->finishes; i++) end(l, l->finished[i]);
    }
    if (l->lingering || l->early_termination) {
        if (l->finishes && !l->sums.on) l->decodings = without(l, l->decoding, l->decodings, FINISHED);
        return;
    }
    if (l->encodings) return;
    for (Py_ssize_t i = 0; i < l->decodings; i++)
        if (l->requests[l->decoding[i]].status != FINISHED) return;
    for (Py_ssize_t i = 0; i < l->decodings; i++) end(l, l->decoding[i]);
    l->decodings = 0;
}

/* Free a resident's blocks: it waits again, before requests that arrived later. */
static void preempt(Ledger *l, Py_ssize_t sequence) {
    Request *r = &l->requests[sequence];
    r->status = PREEMPTED;
    l->encodings = without(l, l->encoding, l->encodings, PREEMPTED);
    l->decodings = without(l, l->decoding, l->decodings, PREEMPTED);
    free_blocks(l, r);
    r->cached = r->published = 0;
    r->recomputed = r->generated;
    r->behind = l->encoder_decoder ? r->recomputed : 0;
    r->to_prefill = known_tokens(r) - r->behind;
    r->preemptions++;
    if (!l->early_termination) release(l);
    Py_ssize_t place = l->preemptions++;
    for (; place > 0 && is_before(l, l->preempted[place - 1], sequence); place--) l->preempted[place] = l->preempted[place - 1];
    l->preempted[place] = sequence;
    l->victims[l->victim_count++] = sequence;
}

/* Return the resident to preempt: the newest unfinished one. */
static Py_ssize_t last_resident(const Ledger *l) {
    if (l->encodings) return l->encoding[l->encodings - 1];
    Py_ssize_t last = l->decodings - 1;
    while (l->requests[l->decoding[last]].status == FINISHED) last--;
    return l->decoding[last];
}

/* Allocate a sequence's blocks for its next tokens. Preempts the newest residents while too few are free; returns 0 if
 * that is this one. */
static int grow(Ledger *l, Py_ssize_t sequence, Py_ssize_t tokens) {
    Request *r = &l->requests[sequence];
    while (r->status != PREEMPTED && !extend(l, r, tokens)) preempt(l, last_resident(l));
    return r->status != PREEMPTED;
}

/* Book a step's work; `finished` then holds the sequences that ended in it. */
static void advance(Ledger *l, const Step *step, Py_ssize_t iterations) {
    l->finishes = 0;
    settle(l);
    int completed = 0;
    if (step->decodes) l->iterations += iterations;
    if (step->decodes && l->sums.on) decode_sums(l, iterations);
    for (Py_ssize_t i = 0; i < step->decodes && !l->sums.on; i++) {
        Request *r = &l->requests[step->decode[i]];
        if (r->status == FINISHED) continue;
        r->cached += (int32_t)iterations + r->behind, r->generated += (int32_t)iterations;
        r->behind = 0;
        if (r->growth != 1.0) r->cached = (int32_t)(context_of(r) + 1e-6);
        if (l->caches) publish(l, r, r->cached);
        if (r->generated >= r->output) finish(l, step->decode[i]);
    }
    for (Py_ssize_t i = 0; i < step->encodes; i++) {
        Py_ssize_t sequence = step->chunks[i].sequence;
        Request *r = &l->requests[sequence];
        r->cached += (int32_t)step->chunks[i].tokens, r->to_prefill -= (int32_t)step->chunks[i].tokens;
        if (l->caches) publish(l, r, r->cached);
        if (r->to_prefill) continue;
        completed = 1;
        r->status = DECODE;
        r->generated = r->recomputed + !l->encoder_decoder;
        if (!l->sums.on) l->decoding[l->decodings++] = sequence;
        else if (!l->sums.transferred) join(l, sequence);
        else if (r->generated < r->output) l->sums.arriving[l->sums.end++] = sequence;
    }
    if (completed) l->encodings = without(l, l->encoding, l->encodings, DECODE);
    while (l->sums.on && l->decodings && next_end(l) <= 0) finish(l, leave(l));
    for (Py_ssize_t i = 0; completed && (!l->sums.on || l->sums.transferred) && i < step->encodes; i++) {
        const Request *r = &l->requests[step->chunks[i].sequence];
        if (r->status == DECODE && r->generated >= r->output) finish(l, step->chunks[i].sequence);
    }
    if (l->finishes) release(l);
}

/* Return whether the free blocks suffice for `iterations` in a row; the first one has its blocks already. */
static int suffice(const Ledger *l, const Step *step, Py_ssize_t iterations, Py_ssize_t blocks) {
    for (Py_ssize_t i = 0; i < step->decodes && blocks >= 0; i++) {
        const Request *r = &l->requests[step->decode[i]];
        if (r->status != FINISHED) blocks -= blocks_for(&l->pool, r->cached + needed_tokens(l, r, iterations)) - r->held;
    }
    return blocks >= 0;
}

/* Return for how many iterations in a row a decode step may be repeated (Ledger.repeats): until a sequence ends, a slot
 * is free, or blocks don't suffice. */
static Py_ssize_t repeats(const Ledger *l, const Step *step) {
    Py_ssize_t most = l->leavings ? 1 : step->repeats;
    if (!l->grows) return most;
    if (l->victim_count) return 1;
    for (Py_ssize_t i = 0; i < step->decodes; i++) {
        const Request *r = &l->requests[step->decode[i]];
        if (r->status != FINISHED && r->output - r->generated < most) most = r->output - r->generated;
        if (r->behind) return 1;
    }
    if (most == 1 || suffice(l, step, most, l->pool.available)) return most;
    Py_ssize_t low = 1, high = most - 1; /* the blocks that k iterations need rise with k */
    while (low < high) {
        Py_ssize_t middle = (low + high + 1) / 2;
        if (suffice(l, step, middle, l->pool.available)) low = middle;
        else high = middle - 1;
    }
    return low;
}
#endif
