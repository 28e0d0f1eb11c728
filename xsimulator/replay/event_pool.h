/* KV blocks, compiled (xcore/batching/kv_pool.py, prefix_pool.py): the number of free blocks and, if prefixes are
 * cached, the contents of each block. */
#ifndef EXEGPT_EVENT_POOL_H
#define EXEGPT_EVENT_POOL_H
#include <stdint.h>
#include <stdlib.h>

/* A block of a prefix pool. Blocks are numbered from 1 on, so that zeroed memory is an empty pool; 0 is none. */
typedef struct {
    int64_t key;            /* key of its contents and all earlier ones, if it is published */
    int32_t holders;        /* sequences */
    int32_t before, after;  /* published under keys of the same bucket, in the order of publication */
    int32_t older, newer;   /* free and published, in the order in which they were freed */
    int32_t published;
} Block;

typedef struct {
    Py_ssize_t available, size; /* free blocks; tokens of each */
    /* if prefixes are cached */
    Block *blocks;
    int32_t *unpublished;       /* a stack of free blocks without a key */
    int32_t *first, *last;      /* [buckets]: published blocks by key */
    Py_ssize_t unpublished_count, untouched, total, buckets;
    int32_t oldest, newest;     /* free blocks that are published */
} Pool;

static inline Py_ssize_t blocks_for(const Pool *p, Py_ssize_t tokens) { return (tokens + p->size - 1) / p->size; }

/* Neighbouring blocks of a text have neighbouring buckets: they are read and written one after the other. */
static inline Py_ssize_t bucket(const Pool *p, int64_t key) {
    uint64_t text = (uint64_t)key >> 32, place = (uint64_t)key & UINT32_MAX;
    return (Py_ssize_t)((text * 0x9E3779B97F4A7C15u >> 24) + place) & (p->buckets - 1);
}

/* Return the earliest block that is still published under a key; 0 if there is none. */
static int32_t find_block(const Pool *p, int64_t key) {
    int32_t block = p->first[bucket(p, key)];
    while (block && p->blocks[block].key != key) block = p->blocks[block].after;
    return block;
}

static void publish_block(Pool *p, int32_t number, int64_t key) {
    Py_ssize_t place = bucket(p, key);
    Block *b = &p->blocks[number];
    b->key = key, b->published = 1, b->before = p->last[place], b->after = 0;
    if (b->before) p->blocks[b->before].after = number;
    else p->first[place] = number;
    p->last[place] = number;
}

static void forget_block(Pool *p, int32_t number) {
    Block *b = &p->blocks[number];
    Py_ssize_t place = bucket(p, b->key);
    if (b->before) p->blocks[b->before].after = b->after;
    else p->first[place] = b->after;
    if (b->after) p->blocks[b->after].before = b->before;
    else p->last[place] = b->before;
    b->published = 0;
}

/* Remove a free published block from the queue of blocks to allocate next. */
static void unkeep(Pool *p, int32_t number) {
    Block *b = &p->blocks[number];
    if (b->older) p->blocks[b->older].newer = b->newer;
    else p->oldest = b->newer;
    if (b->newer) p->blocks[b->newer].older = b->older;
    else p->newest = b->older;
}

/* Let one more sequence hold a published block. */
static void hold_block(Pool *p, int32_t number) {
    if (!p->blocks[number].holders++) unkeep(p, number), p->available--;
}

/* Take the free block of least use; the caller has checked that there is one. */
static int32_t take_block(Pool *p) {
    int32_t number;
    if (p->unpublished_count) {
        number = p->unpublished[--p->unpublished_count];
    } else if (p->untouched < p->total) {
        number = (int32_t)++p->untouched;
    } else {
        number = p->oldest;
        unkeep(p, number);
        forget_block(p, number);
    }
    p->blocks[number].holders = 1;
    p->available--;
    return number;
}

static void free_block(Pool *p, int32_t number) {
    Block *b = &p->blocks[number];
    if (--b->holders) return;
    p->available++;
    if (!b->published) {
        p->unpublished[p->unpublished_count++] = number;
        return;
    }
    b->older = p->newest, b->newer = 0;
    if (b->older) p->blocks[b->older].newer = number;
    else p->oldest = number;
    p->newest = number;
}
#endif
