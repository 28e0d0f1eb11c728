/* The cost of iterations, by a profile's tables (stage.py, iteration_attention.py). */
#ifndef EXEGPT_ITERATION_COSTS_H
#define EXEGPT_ITERATION_COSTS_H
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../xcore/interpolation.h"

enum { MOST_AXES = 4, KNOWN = 4096 };

/* ---- tables ---- */

/* A table over up to four axes; with no axis, there is no such table. */
typedef struct {
    Py_ssize_t axes, size[MOST_AXES];
    const double *points[MOST_AXES], *values;
    Py_ssize_t near[MOST_AXES]; /* where the latest values were: the next ones are mostly in the same cells */
    double *known;              /* [KNOWN] or NULL: on one axis, what whole numbers gave; 0 if not known yet */
} Grid;

/* A reader of packed doubles. */
typedef struct {
    const double *next, *end;
    int truncated; /* whether it was read beyond its end */
} Reader;

static double read_number(Reader *r) {
    if (r->next < r->end) return *r->next++;
    r->truncated = 1;
    return 0.0;
}

static const double *read_array(Reader *r, Py_ssize_t count) {
    const double *values = r->next;
    if (count < 0 || count > r->end - r->next) r->truncated = 1;
    else r->next += count;
    return values;
}

static Grid read_grid(Reader *r) {
    Grid g = {(Py_ssize_t)read_number(r)};
    if (g.axes < 0 || g.axes > MOST_AXES) r->truncated = 1, g.axes = 0;
    Py_ssize_t values = g.axes ? 1 : 0;
    for (Py_ssize_t a = 0; a < g.axes; a++) {
        g.size[a] = (Py_ssize_t)read_number(r);
        if (g.size[a] < 1) r->truncated = 1, g.size[a] = 1;
    }
    for (Py_ssize_t a = 0; a < g.axes; a++) g.points[a] = read_array(r, g.size[a]), values *= g.size[a];
    g.values = read_array(r, values);
    return g;
}

/* Return whether two tables are equal. */
static int same_grid(const Grid *g, const Grid *other) {
    Py_ssize_t count = g->axes ? 1 : 0;
    if (g->axes != other->axes || memcmp(g->size, other->size, g->axes * sizeof *g->size)) return 0;
    for (Py_ssize_t a = 0; a < g->axes; count *= g->size[a++])
        if (memcmp(g->points[a], other->points[a], g->size[a] * sizeof(double))) return 0;
    return !count || !memcmp(g->values, other->values, count * sizeof(double));
}

/* Return the cell of a value on an axis, as `cell` does. */
static inline Cell cell_on(Grid *g, Py_ssize_t axis, double x) {
    const double *points = g->points[axis];
    Py_ssize_t last = g->size[axis] - 2, below = g->near[axis];
    if (last < 0) return (Cell){0, 0, 0.0};
    if ((below && x < points[below]) || (below < last && x >= points[below + 1]))
        g->near[axis] = below = cell(points, last + 2, x).below;
    return (Cell){below, below + 1, (x - points[below]) / (points[below + 1] - points[below])};
}

/* Seconds at one place; never negative. */
static double at(Grid *g, double x, double y, double z, double w) {
    if (!g->axes) return 0.0;
    double *known = g->known && x >= 0.0 && x < KNOWN && x == (double)(int)x ? g->known + (int)x : NULL;
    if (known && *known) return *known;
    Cell first = cell_on(g, 0, x);
    if (g->axes == 1) {
        double value = larger(lerp(g->values[first.below], g->values[first.above], first.fraction), 0.0);
        if (known) *known = value;
        return value;
    }
    if (g->axes == 2) return bilerp(g->values, g->size[1], first, cell_on(g, 1, y));
    double where[MOST_AXES] = {x, y, z, w}, total = 0.0;
    Cell cells[MOST_AXES];
    for (Py_ssize_t a = 0; a < g->axes; a++) cells[a] = cell_on(g, a, where[a]);
    for (Py_ssize_t corner = 0; corner < (Py_ssize_t)1 << g->axes; corner++) {
        double weight = 1.0;
        Py_ssize_t place = 0;
        for (Py_ssize_t a = 0; a < g->axes; a++) {
            int up = corner >> a & 1;
            weight *= up ? cells[a].fraction : 1.0 - cells[a].fraction;
            place = place * g->size[a] + (up ? cells[a].above : cells[a].below);
        }
        total += weight * g->values[place];
    }
    return larger(total, 0.0);
}

static double along(Grid *g, double x) { return at(g, x, 0.0, 0.0, 0.0); }

/* ---- what iterations cost (stage.py, iteration_attention.py) ---- */

typedef struct { Grid rest, whole, chunk, decode, mixed, cross; } Layer;

/* Stages of equal cost. */
typedef struct {
    double layers, encoder_layers, rows; /* rows: tokens that an iteration computes of each decoding sequence */
    int first, last;
    Grid embedding, head, overhead;
    Layer decoder, encoder;
} Kind;

static Layer read_layer(Reader *r) {
    Layer l;
    l.rest = read_grid(r), l.whole = read_grid(r), l.chunk = read_grid(r);
    l.decode = read_grid(r), l.mixed = read_grid(r), l.cross = read_grid(r);
    return l;
}

static Kind read_kind(Reader *r) {
    Kind k;
    k.layers = read_number(r), k.encoder_layers = read_number(r);
    k.first = read_number(r) != 0.0, k.last = read_number(r) != 0.0;
    k.rows = read_number(r);
    k.embedding = read_grid(r), k.head = read_grid(r), k.overhead = read_grid(r);
    k.decoder = read_layer(r), k.encoder = read_layer(r);
    return k;
}

/* A prompt, or a chunk of one, in an iteration. */
typedef struct {
    Py_ssize_t sequence;
    double tokens, past;
    int completes;
    double out; /* when it left the last stage */
} Chunk;

static double decode_attention(Layer *l, double decoding, double context) {
    return decoding ? at(&l->decode, decoding, context, 0.0, 0.0) : 0.0;
}

static double attention(Layer *l, const Chunk *chunks, Py_ssize_t count, double decoding, double context) {
    if (!count) return decode_attention(l, decoding, context);
    if (l->mixed.axes) {
        Py_ssize_t longest = 0;
        double seconds = 0.0;
        for (Py_ssize_t i = 1; i < count; i++) {
            const Chunk *c = &chunks[i], *best = &chunks[longest];
            if (c->tokens > best->tokens || (c->tokens == best->tokens && c->past > best->past)) longest = i;
        }
        for (Py_ssize_t i = 0; i < count; i++)
            seconds += i == longest
                           ? at(&l->mixed, chunks[i].tokens, chunks[i].past, decoding, decoding ? context : 0.0)
                           : at(&l->mixed, chunks[i].tokens, chunks[i].past, 0.0, 0.0);
        return seconds;
    }
    double prompts = 0.0, prompt_seconds = 0.0, chunk_seconds = 0.0;
    for (Py_ssize_t i = 0; i < count; i++) prompts += chunks[i].past == 0.0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (chunks[i].past == 0.0) prompt_seconds += at(&l->whole, prompts, chunks[i].tokens, 0.0, 0.0);
        else chunk_seconds += at(&l->chunk, chunks[i].tokens, chunks[i].past, 0.0, 0.0);
    }
    return (prompts ? prompt_seconds / prompts : 0.0) + chunk_seconds + decode_attention(l, decoding, context);
}

/* Seconds that do not depend on the decoding sequences' context. */
static double outer_seconds(Kind *k, double computed, double rows, double batch) {
    double seconds = along(&k->overhead, batch);
    if (k->first) seconds += along(&k->embedding, computed);
    if (k->last && rows) seconds += along(&k->head, rows);
    return seconds;
}

/* Seconds of an iteration with prompts. */
static double step_seconds(Kind *k, const Chunk *chunks, Py_ssize_t count, double decoding, double context) {
    double tokens = 0.0, completed = 0.0, seconds = 0.0, verified = k->rows * decoding;
    int encoder_decoder = k->encoder.rest.axes > 0;
    for (Py_ssize_t i = 0; i < count; i++) tokens += chunks[i].tokens, completed += chunks[i].completes;
    if (!encoder_decoder) {
        seconds = k->layers * (along(&k->decoder.rest, tokens + verified) +
                               attention(&k->decoder, chunks, count, decoding, context));
    } else {
        if (count) {
            seconds += k->encoder_layers *
                       (along(&k->encoder.rest, tokens) + attention(&k->encoder, chunks, count, 0.0, 0.0));
            seconds += k->layers * along(&k->decoder.cross, tokens);
        }
        if (decoding)
            seconds += k->layers * (along(&k->decoder.rest, verified) + decode_attention(&k->decoder, decoding, context));
    }
    return seconds + outer_seconds(k, tokens + verified, encoder_decoder ? verified : verified + completed,
                                   decoding + (double)count);
}
#endif
