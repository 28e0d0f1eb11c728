/* Steps on the stages of a pipeline, compiled (cells.py, xcore/batching/micro_batches.py). */
#ifndef EXEGPT_EVENT_PIPELINE_H
#define EXEGPT_EVENT_PIPELINE_H
#include "event_ledger.h"

/* ---- a pipeline (cells.py, xcore/batching/micro_batches.py) ---- */

/* A micro-batch's part of a step. */
typedef struct {
    Py_ssize_t micro_batch, begin, encodes; /* its chunks */
    double decodes, live, cached, joining;  /* its sequences, their cached tokens, and new ones' input tokens */
    double growth;                          /* tokens that an iteration adds to the cached ones */
    double ready;
} Part;

typedef struct {
    Py_ssize_t stages, micro_batches, encode_parts, kinds;
    Py_ssize_t *place;   /* [stages]: its kind */
    Kind *kind;
    Py_ssize_t *like;    /* [kinds]: the first kind with the same seconds of decode attention */
    Grid *hop;           /* [stages]: seconds from the previous stage, by tokens */
    double *free_at, *busy, *token, *seconds, *hops, *outer, *attention;
    Part *parts;
    Chunk *sorted;      /* a step's chunks in the order of their micro-batches */
    Py_ssize_t *origin; /* and each one's place in the step */
    const Chunk *chunks; /* of the step that runs: sorted, if there are several micro-batches */
    int takes_over;
    int ahead; /* whether the next step is decided when one starts on the first stage, not when that is free */
} Pipeline;

/* Return when all work so far is done. */
static double done(const Pipeline *p) {
    double seconds = 0.0;
    for (Py_ssize_t s = 0; s < p->stages; s++) seconds = larger(seconds, p->free_at[s]);
    return seconds;
}

static inline Py_ssize_t micro_batch(const Pipeline *p, Py_ssize_t sequence) {
    return p->micro_batches == 1 ? 0 : sequence % p->micro_batches; /* a division is slow */
}

/* Chunks in the order of their micro-batches, whose counts are in the parts' `encodes`. */
static void sort_chunks(Pipeline *p, const Step *step) {
    Py_ssize_t begin = 0;
    for (Py_ssize_t m = 0; m < p->micro_batches; m++) {
        p->parts[m].begin = begin;
        for (Py_ssize_t i = 0; p->parts[m].encodes && i < step->encodes; i++)
            if (micro_batch(p, step->chunks[i].sequence) == m) p->origin[begin] = i, p->sorted[begin++] = step->chunks[i];
    }
}

/* Count a decoding sequence in its part. Tokens that are computed again see those before them. */
static inline void join_part(Part *part, const Request *r) {
    part->decodes += 1.0, part->cached += context_of(r);
    if (r->status != FINISHED) part->live += 1.0, part->growth += r->growth;
    if (!r->generated) part->joining += (double)r->input;
    if (!r->behind) return;
    part->decodes += (double)r->behind;
    part->cached += (double)r->behind * r->cached + (double)r->behind * (r->behind + 3) / 2.0;
}

/* Split a step by micro-batch; returns the number of parts. */
static Py_ssize_t split(Pipeline *p, const Ledger *l, const Step *step) {
    Py_ssize_t count = 0, all = p->micro_batches;
    for (Py_ssize_t m = 0; m < all; m++) p->parts[m] = (Part){.micro_batch = m};
    for (Py_ssize_t i = 0; i < step->encodes; i++) p->parts[micro_batch(p, step->chunks[i].sequence)].encodes++;
    if (step->encodes && all > 1) sort_chunks(p, step);
    p->chunks = all > 1 ? p->sorted : step->chunks;
    if (p->encode_parts && !step->decodes) {
        Py_ssize_t parts = p->encode_parts < step->encodes ? p->encode_parts : step->encodes;
        for (Py_ssize_t i = 0; i < parts; i++) {
            Py_ssize_t begin = step->encodes * i / parts, end = step->encodes * (i + 1) / parts;
            p->parts[i] = (Part){.micro_batch = i, .begin = begin, .encodes = end - begin};
        }
        return parts;
    }
    if (l->sums.on) {
        for (Py_ssize_t m = 0; m < all && step->decodes; m++) {
            const Group *group = &l->sums.groups[m];
            p->parts[m].decodes = p->parts[m].live = group->decodes, p->parts[m].cached = group->cached;
            p->parts[m].growth = group->growth;
        }
    } else if (all == 1) {
        Part part = p->parts[0]; /* in registers: searches spend most of their time in this loop */
        for (Py_ssize_t i = 0; i < step->decodes; i++) join_part(&part, &l->requests[step->decode[i]]);
        p->parts[0] = part;
    } else {
        for (Py_ssize_t i = 0; i < step->decodes; i++)
            join_part(&p->parts[micro_batch(p, step->decode[i])], &l->requests[step->decode[i]]);
    }
    for (Py_ssize_t m = 0; m < all; m++)
        if (p->parts[m].encodes || p->parts[m].decodes) p->parts[count++] = p->parts[m];
    return count;
}

/* Run the parts through the stages, by `p->seconds` [parts, kinds] and `p->hops` [parts, stages]; return when the next
 * step is decided. */
static double follow(Pipeline *p, Py_ssize_t parts, double now) {
    double begun = larger(larger(now, p->parts->ready) + p->hops[0], p->free_at[0]);
    for (Py_ssize_t i = 0; i < parts; i++) {
        double at = larger(now, p->parts[i].ready);
        for (Py_ssize_t s = 0; s < p->stages; s++) {
            double seconds = p->seconds[i * p->kinds + p->place[s]];
            at = larger(at + p->hops[i * p->stages + s], p->free_at[s]);
            p->free_at[s] = at += seconds;
            p->busy[s] += seconds;
        }
        p->parts[i].ready = at;
    }
    return p->ahead ? begun : larger(now, p->free_at[0]);
}

static void find_hops(Pipeline *p, Py_ssize_t parts) {
    for (Py_ssize_t i = 0; i < parts; i++) {
        double tokens = p->kind->rows * p->parts[i].decodes;
        for (Py_ssize_t c = 0; c < p->parts[i].encodes; c++) tokens += p->chunks[p->parts[i].begin + c].tokens;
        for (Py_ssize_t s = 0; s < p->stages; s++) p->hops[i * p->stages + s] = along(&p->hop[s], tokens);
    }
}

static double run_encoding(Pipeline *p, const Ledger *l, Step *step, double now) {
    Py_ssize_t parts = split(p, l, step);
    find_hops(p, parts);
    for (Py_ssize_t i = 0; i < parts; i++) {
        Part *part = &p->parts[i];
        double context = part->decodes ? (part->cached + part->live) / part->decodes : 0.0;
        for (Py_ssize_t k = 0; k < p->kinds; k++)
            p->seconds[i * p->kinds + k] =
                step_seconds(&p->kind[k], p->chunks + part->begin, part->encodes, part->decodes, context);
        part->ready = part->decodes ? p->token[part->micro_batch] : 0.0;
        for (Py_ssize_t c = part->begin; c < part->begin + part->encodes; c++)
            part->ready = larger(part->ready, l->requests[p->chunks[c].sequence].ready);
    }
    double next = follow(p, parts, now);
    for (Py_ssize_t i = 0; i < parts; i++) {
        const Part *part = &p->parts[i];
        if (part->decodes) p->token[part->micro_batch] = part->ready;
        for (Py_ssize_t c = part->begin; c < part->begin + part->encodes; c++) {
            Chunk *chunk = &step->chunks[p->micro_batches > 1 ? p->origin[c] : c];
            chunk->out = part->ready;
            const Request *r = &l->requests[chunk->sequence];
            if (chunk->completes && r->output > r->recomputed + 1)
                p->token[micro_batch(p, chunk->sequence)] = part->ready;
        }
    }
    memcpy(step->first, p->token, p->micro_batches * sizeof *p->token);
    return next;
}

/* Run iterations of one part on one stage. Within a cell of the attention's table, each lasts longer than the previous
 * one by the same time, so that a row of them is a sum. Returns how many ran, and when the next step is decided. */
static Py_ssize_t run_row(Pipeline *p, const Part *part, Py_ssize_t most, double *now, double until) {
    Kind *k = p->kind;
    Grid *g = &k->decoder.decode;
    double growth = part->growth / part->decodes, at = larger(*now, part->ready) + p->hops[0], begun = at;
    at = begun = larger(at, p->free_at[0]);
    double last = at; /* when the last iteration starts */
    Py_ssize_t ran = 0;
    while (ran < most && (!ran || (p->ahead ? last : at) < until)) {
        double context = (part->cached + part->live + part->growth * (double)ran) / part->decodes;
        Cell column = cell_on(g, 1, context);
        double edge = column.above + 1 < g->size[1] ? g->points[1][column.above] : INFINITY;
        double first = p->outer[0] + k->layers * decode_attention(&k->decoder, part->decodes, context);
        double longer = k->layers * decode_attention(&k->decoder, part->decodes, context + growth) - (first - p->outer[0]);
        double in_cell = growth > 0.0 ? floor((edge - context) / growth) + 1.0 : INFINITY;
        if (context + growth > edge) in_cell = 1.0, longer = 0.0;
        double left = (double)(most - ran), count = larger(1.0, in_cell < left ? in_cell : left);
        double wait = until - at;
        if (wait < count * first + longer * count * (count - 1.0) / 2.0) { /* until then fewer run */
            double b = first - longer / 2.0, root = longer > 0.0 ? sqrt(b * b + 2.0 * longer * larger(wait, 0.0)) : b;
            double fewer = ceil(2.0 * larger(wait, 0.0) / (b + root) - 1e-9) + p->ahead;
            count = larger(1.0, fewer < count ? fewer : count);
        }
        last = at + (count - 1.0) * first + longer * (count - 1.0) * (count - 2.0) / 2.0; /* exact for one iteration */
        at += count * first + longer * count * (count - 1.0) / 2.0;
        if (!ran) p->seconds[0] = first;
        ran += (Py_ssize_t)count;
    }
    p->busy[0] += at - begun;
    p->free_at[0] = at;
    *now = p->ahead ? last : at;
    return ran;
}

/* Seconds of a decode step apart from its attention. */
static double verified_seconds(Kind *k, double decoding) {
    double verified = k->rows * decoding;
    return k->layers * along(&k->decoder.rest, verified) + outer_seconds(k, verified, verified, decoding);
}

/* Find the seconds of a part in an iteration after `ran` others: of the same one only once, however many kinds of stages
 * and parts need them. */
static void find_decode_seconds(Pipeline *p, Py_ssize_t i, Py_ssize_t ran) {
    const Part *part = &p->parts[i], *last = i ? part - 1 : part;
    double context = (part->cached + part->live + part->growth * (double)ran) / part->decodes;
    double *seconds = &p->seconds[i * p->kinds], *attention = p->attention;
    if (i && !p->takes_over && part->decodes == last->decodes && part->cached == last->cached && part->live == last->live &&
        part->growth == last->growth) {
        memcpy(seconds, seconds - p->kinds, p->kinds * sizeof *seconds);
        return;
    }
    for (Py_ssize_t k = 0; k < p->kinds; k++) {
        Kind *kind = &p->kind[k];
        attention[k] = p->like[k] < k ? attention[p->like[k]] : decode_attention(&kind->decoder, part->decodes, context);
        seconds[k] = p->outer[i * p->kinds + k] + kind->layers * attention[k];
        if (p->takes_over && !ran && part->joining)
            seconds[k] += kind->layers * along(&kind->decoder.cross, part->joining);
    }
}

/* Run decode steps alone, until a sequence finishes or the next step would be decided at `until` or later. */
static Py_ssize_t run_decoding(Pipeline *p, const Ledger *l, Step *step, double now, double until, double *next) {
    Py_ssize_t parts = split(p, l, step), most = step->repeats, ran = 0;
    if (l->sums.on && next_end(l) < most) most = next_end(l);
    for (Py_ssize_t i = 0; i < step->decodes && !l->sums.on; i++) {
        const Request *r = &l->requests[step->decode[i]];
        if (r->status != FINISHED && r->output - r->generated < most) most = r->output - r->generated;
    }
    find_hops(p, parts);
    for (Py_ssize_t i = 0; i < parts; i++) {
        Part *part = &p->parts[i];
        part->ready = p->token[part->micro_batch];
        for (Py_ssize_t k = 0; k < p->kinds; k++)
            p->outer[i * p->kinds + k] = verified_seconds(&p->kind[k], part->decodes);
    }
    memcpy(step->first, p->token, p->micro_batches * sizeof *p->token);
    if (parts == 1 && p->stages == 1 && p->kind->decoder.decode.axes == 2 && !p->kind->decoder.mixed.axes && !p->takes_over) {
        double began = larger(larger(now, p->parts->ready) + p->hops[0], p->free_at[0]);
        ran = run_row(p, p->parts, most, &now, until);
        step->first[p->parts->micro_batch] = began + p->seconds[0];
        p->token[p->parts->micro_batch] = p->free_at[0];
        *next = now;
        return ran;
    }
    do {
        for (Py_ssize_t i = 0; i < parts; i++) find_decode_seconds(p, i, ran);
        now = follow(p, parts, now);
        if (!ran)
            for (Py_ssize_t i = 0; i < parts; i++) step->first[p->parts[i].micro_batch] = p->parts[i].ready;
        ran++;
    } while (ran < most && now < until);
    for (Py_ssize_t i = 0; i < parts; i++) p->token[p->parts[i].micro_batch] = p->parts[i].ready;
    *next = now;
    return ran;
}
#endif
