/* Dynamic adjustment of encoding batches, compiled (xcore/policies/adjustment.py, joining.py). */
#ifndef EXEGPT_EVENT_ADJUSTMENT_H
#define EXEGPT_EVENT_ADJUSTMENT_H
#include "event_ledger.h"
#include <math.h>

enum { PEEKED_BATCHES = 4, MOST_PASSED_OVER = 4 };

/* A candidate: its tokens, and its place among the candidates. */
typedef struct { double tokens; Py_ssize_t place; } Prompt;

/* One B_E after the other; `share` is negative if batches are not adjusted. */
typedef struct {
    double share, tokens, weight, level, follows;
    Py_ssize_t batch, fewest, most, peeked, chosen_count, other_count, most_candidates;
    Py_ssize_t *candidates;  /* [peeked]: requests */
    Prompt *chosen, *others; /* [peeked] each; `others` are sorted */
} Adjustment;

static int by_tokens(const void *a, const void *b) {
    const Prompt *one = a, *other = b;
    if (one->tokens != other->tokens) return one->tokens < other->tokens ? -1 : 1;
    return one->place < other->place ? -1 : one->place > other->place;
}

static Prompt take_prompt(Prompt *prompts, Py_ssize_t *count, Py_ssize_t at) {
    Prompt taken = prompts[at];
    memmove(&prompts[at], &prompts[at + 1], (size_t)(--*count - at) * sizeof *prompts);
    return taken;
}

static void insert_sorted(Adjustment *a, Prompt prompt) {
    Py_ssize_t at = a->other_count++;
    for (; at > 0 && by_tokens(&a->others[at - 1], &prompt) > 0; at--) a->others[at] = a->others[at - 1];
    a->others[at] = prompt;
}

/* Return how many sequences to encode next. */
static Py_ssize_t wanted_count(const Adjustment *a, Py_ssize_t residents) {
    double above = (double)residents - a->level;
    if (fabs(above) <= a->share * (double)a->batch) return a->batch;
    Py_ssize_t count = (Py_ssize_t)rint((double)a->batch - above);
    return count < a->fewest ? a->fewest : count > a->most ? a->most : count;
}

/* Return the first of the others that is at least as long. */
static Py_ssize_t at_least(const Adjustment *a, double tokens) {
    Py_ssize_t low = 0, high = a->other_count;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (a->others[middle].tokens < tokens) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Exchange the two prompts that bring the sum nearest to its target; return by how much it has changed. */
static double exchange(Adjustment *a, Py_ssize_t due, double excess) {
    double best = fabs(excess);
    Py_ssize_t leaves = -1, comes = -1;
    for (Py_ssize_t place = due; place < a->chosen_count; place++) {
        double wanted = a->chosen[place].tokens - excess;
        Py_ssize_t above = at_least(a, wanted);
        for (Py_ssize_t other = above - 1; other <= above; other++) {
            if (other < 0 || other >= a->other_count || fabs(a->others[other].tokens - wanted) >= best) continue;
            best = fabs(a->others[other].tokens - wanted), leaves = place, comes = other;
        }
    }
    if (leaves < 0) return 0.0;
    Prompt gone = a->chosen[leaves];
    a->chosen[leaves] = take_prompt(a->others, &a->other_count, comes);
    insert_sorted(a, gone);
    return a->chosen[leaves].tokens - gone.tokens;
}

static double missed_by(const Adjustment *a, double excess, Py_ssize_t more) {
    double count = a->weight * (double)more;
    return excess * excess + count * count;
}

/* Drop the last prompt, or add the first of the others, if this brings the batch nearer to its targets. */
static double resize(Adjustment *a, Py_ssize_t wanted, double excess) {
    Py_ssize_t at = 0, more = a->chosen_count - wanted;
    double missed = missed_by(a, excess, more);
    if (excess > 0 && a->chosen_count > a->fewest) {
        for (Py_ssize_t i = 1; i < a->chosen_count; i++)
            if (a->chosen[i].place > a->chosen[at].place) at = i;
        if (missed_by(a, excess - a->chosen[at].tokens, more - 1) >= missed) return 0.0;
        Prompt last = take_prompt(a->chosen, &a->chosen_count, at);
        insert_sorted(a, last);
        return -last.tokens;
    }
    if (excess < 0 && a->other_count && a->chosen_count < a->most) {
        for (Py_ssize_t i = 1; i < a->other_count; i++)
            if (a->others[i].place < a->others[at].place) at = i;
        if (missed_by(a, excess + a->others[at].tokens, more + 1) >= missed) return 0.0;
        Prompt first = take_prompt(a->others, &a->other_count, at);
        a->chosen[a->chosen_count++] = first;
        return first.tokens;
    }
    return 0.0;
}

static int by_place(const void *a, const void *b) {
    const Prompt *one = a, *other = b;
    return one->place < other->place ? -1 : one->place > other->place;
}

/* Choose the next batch among the first waiting requests, in their order. */
static void choose(Adjustment *a, const Ledger *l, Py_ssize_t candidates) {
    Py_ssize_t count = wanted_count(a, residents(l)), due = 0;
    double excess = 0.0, nearer;
    a->chosen_count = count < candidates ? count : candidates;
    a->other_count = candidates - a->chosen_count;
    for (Py_ssize_t i = 0; i < candidates; i++) {
        const Request *r = &l->requests[a->candidates[i]];
        Prompt prompt = {(double)r->to_prefill, i};
        if (r->passed_over >= MOST_PASSED_OVER) due = i + 1;
        if (i < a->chosen_count) a->chosen[i] = prompt, excess += prompt.tokens;
        else a->others[i - a->chosen_count] = prompt;
    }
    excess -= a->tokens;
    qsort(a->others, (size_t)a->other_count, sizeof *a->others, by_tokens);
    if (a->other_count) a->level += ((double)residents(l) - a->level) * a->follows;
    while (fabs(excess) > a->share * a->tokens) {
        if ((nearer = exchange(a, due, excess)) == 0.0 && (nearer = resize(a, count, excess)) == 0.0) break;
        excess += nearer;
    }
    qsort(a->chosen, (size_t)a->chosen_count, sizeof *a->chosen, by_place);
}

/* Admit the chosen prompts, up to the first whose blocks are not free, and count who is passed over. */
static void admit_chosen(Adjustment *a, Ledger *l, Step *step, double now) {
    Py_ssize_t candidates = 0, last = -1;
    arrive(l, now);
    for (Py_ssize_t i = l->admitted; i < l->arrived && candidates < a->peeked; i++)
        if (l->requests[l->queue[i]].status == WAITING) a->candidates[candidates++] = l->queue[i];
    if (!candidates) return;
    if (candidates > a->most_candidates) a->most_candidates = candidates;
    choose(a, l, candidates);
    for (Py_ssize_t i = 0; i < a->chosen_count; i++) {
        Py_ssize_t sequence = a->candidates[a->chosen[i].place];
        if (admit_request(l, sequence, PY_SSIZE_T_MAX) < 0) break;
        encode_chunk(step, l, sequence, l->requests[sequence].to_prefill);
        last = a->chosen[i].place;
    }
    for (Py_ssize_t i = 0; i < last; i++) {
        Request *r = &l->requests[a->candidates[i]];
        r->passed_over += r->status == WAITING;
    }
}

/* Admit the next encoding batch: the first `batch` prompts, unless batches are adjusted. */
static void admit_batch(Adjustment *a, Ledger *l, Step *step, Py_ssize_t batch, double now) {
    if (a->share < 0.0) admit_prompts(l, step, batch, now);
    else admit_chosen(a, l, step, now);
}
#endif
