/* Attention over the paged key-value cache, read where it lies, and the writing of new tokens to it.
 *
 * A token sees its own block of 32 tokens in 16 bits (in fp32 where that is the format) and every
 * earlier block as it is stored. A query goes through the blocks in the order of their positions with
 * one float order, whatever is computed beside it: the result is the same for a token alone and in any
 * chunk or batch, and for any number of threads.
 */
#include "attention.h"

#include "bounds.h"
#include "pool.h"
#include "variants.h"

#include <math.h>
#include <stdlib.h>

enum { BLOCK = 32, MAX_HEAD_DIM = 256, MAX_ROWS = 48, FEW_FLOATS = 1 << 15 };

typedef struct {
    const attention *c;
    int64_t group_heads, head_dim, padded;
    const int64_t *block_ends; /* [segments]: running count of the segments' query blocks */
} work;

/* One block as a query block sees it: keys [head_dim][BLOCK], values [BLOCK][padded head_dim]. */
typedef struct {
    const float *keys, *values;
    int64_t first_position, count;
    const uint16_t *key_scales, *value_scales; /* [BLOCK], or NULL: still to be multiplied with */
} tile;

/* Some queries of one head group on their way through the blocks: row r is head r % group_heads of
 * token r / group_heads. */
typedef struct {
    int64_t rows, first_position;
    float queries[MAX_ROWS * MAX_HEAD_DIM], mixed[MAX_ROWS * MAX_HEAD_DIM];
    float most[MAX_ROWS], total[MAX_ROWS][8]; /* the total in 8 parts */
} state;

/* Whether all of some queries see all of a block. */
static int sees_all(const work *w, const tile *b, int64_t first_query, int64_t last_query)
{
    const int64_t window = w->c->cache->window;
    return first_query >= b->first_position + BLOCK - 1 &&
           (!window || last_query - window + 1 <= b->first_position);
}

/* Hide the tokens that the query at `position` does not see. */
static void hide(const work *w, const tile *b, int64_t position, float *scores)
{
    const cache *c = w->c->cache;
    const int64_t oldest = c->window ? position - c->window + 1 : 0;
    for (int64_t j = 0; j < BLOCK; j++) {
        const int64_t at = b->first_position + j;
        if (at > position || (at < oldest && at >= c->sinks))
            scores[j] = -INFINITY;
    }
}

/* A segment's tokens on one head: the new ones as they were computed, [tokens][stride]. */
typedef struct {
    const float *new;
    int64_t stride, start, end; /* positions of the new ones */
    const uint16_t *open;       /* the block that holds the first of them, if it is kept apart */
} source;

static const float *new_at(const source *from, int64_t position)
{
    return from->new + (position - from->start) * from->stride;
}

static inline int32_t rounded(float x, int32_t low, int32_t high)
{
    const float shifted = x < (float)low ? (float)low : x > (float)high ? (float)high : x;
    return (int32_t)((shifted + 0x1.8p23f) - 0x1.8p23f); /* to the nearest, ties to even */
}

/* Quantize `size` values at 4 bits: the code of value i is in byte i % (size / 2), the first half of
 * the values in the lower nibbles. Scale and minimum are NaN where one of the values is. */
static void quantize_int4(const float *x, int64_t size, uint8_t *codes, uint16_t *scale, uint16_t *minimum)
{
    float low = x[0], high = x[0];
    for (int64_t i = 1; i < size; i++) {
        low = x[i] < low || isnan(x[i]) ? x[i] : low;
        high = x[i] > high || isnan(x[i]) ? x[i] : high;
    }
    *scale = to_fp16((high - low) / 15);
    *minimum = to_fp16(low);
    const float s = from_fp16(*scale), m = from_fp16(*minimum);
    for (int64_t i = 0; i < size / 2; i++) {
        const int32_t a = s > 0 ? rounded((x[i] - m) / s, 0, 15) : 0;
        const int32_t b = s > 0 ? rounded((x[size / 2 + i] - m) / s, 0, 15) : 0;
        codes[i] = (uint8_t)(a | b << 4);
    }
}

#define CODE "attention_tiles.h"
#include "each_variant.h"

static source source_of(const attention *c, const side *s, int64_t segment, int64_t head)
{
    const float *new = s->is_keys ? c->k : c->v;
    const int64_t at = c->segments->slots[segment] * c->kv_heads + head;
    return (source){
        .new = new + c->segments->offsets[segment] * c->kv_stride + head * c->head_dim,
        .stride = c->kv_stride,
        .start = c->segments->starts[segment],
        .end = c->segments->starts[segment] + c->segments->offsets[segment + 1] - c->segments->offsets[segment],
        .open = s->bits < 16 ? s->open + at * BLOCK * c->head_dim : NULL,
    };
}

static int64_t block_at(const attention *c, int64_t segment, int64_t head, int64_t block)
{
    const int64_t group = c->cache->group, width = c->segments->widths[group];
    return c->segments->tables[group][segment * width + block] * c->kv_heads + head;
}

/* Before attention: write tokens where blocks are stored as they are, quantize those that fill. */
static void store_side(const attention *c, const side *s, int64_t segment, int64_t head)
{
    const source from = source_of(c, s, segment, head);
    const int64_t size = BLOCK * s->head_dim;
    for (int64_t first = from.start / BLOCK * BLOCK; first < from.end; first += BLOCK) {
        const int64_t at = block_at(c, segment, head, first / BLOCK), end = first + BLOCK;
        if (s->bits >= 16)
            CHOOSE(write_rows)(s, &from, (char *)s->data + at * size * s->bits / 8, larger(first, from.start),
                               smaller(end, from.end));
        else if (end <= from.end)
            CHOOSE(seal)(s, &from, at, first);
    }
}

/* After attention: keep the rest that fills no block. */
static void keep_open(const attention *c, const side *s, int64_t segment, int64_t head)
{
    const source from = source_of(c, s, segment, head);
    const int64_t at = c->segments->slots[segment] * c->kv_heads + head;
    if (s->bits < 16)
        CHOOSE(write_rows)(s, &from, s->open + at * BLOCK * s->head_dim,
                           larger(from.end / BLOCK * BLOCK, from.start), from.end);
}

static void store_pass(const void *argument, int64_t i)
{
    const attention *c = ((const work *)argument)->c;
    store_side(c, &c->cache->keys, i / c->kv_heads, i % c->kv_heads);
    store_side(c, &c->cache->values, i / c->kv_heads, i % c->kv_heads);
}

static void keep_pass(const void *argument, int64_t i)
{
    const attention *c = ((const work *)argument)->c;
    keep_open(c, &c->cache->keys, i / c->kv_heads, i % c->kv_heads);
    keep_open(c, &c->cache->values, i / c->kv_heads, i % c->kv_heads);
}

/* Some tokens of one segment that lie in one block, and the head group that looks. */
typedef struct {
    int64_t segment, head, first, end, own; /* positions; `own` is the block's first */
} query;

static void load_tile(const work *w, const query *p, int64_t first, float *keys, float *values, tile *b)
{
    const cache *c = w->c->cache;
    const int64_t at = block_at(w->c, p->segment, p->head, first / BLOCK);
    *b = (tile){keys, values, first, first == p->own ? p->end - first : BLOCK, NULL, NULL};
    if (first == p->own && c->keys.bits < 16) {
        const source from = source_of(w->c, &c->keys, p->segment, p->head);
        CHOOSE(load_open)(&c->keys, &from, first, b->count, BLOCK, keys);
    } else {
        CHOOSE(load_keys)(&c->keys, at, w->head_dim, keys);
        b->key_scales = c->keys.bits == 8 ? c->keys.scale + at * BLOCK : NULL;
    }
    if (first == p->own && c->values.bits < 16) {
        const source from = source_of(w->c, &c->values, p->segment, p->head);
        CHOOSE(load_open)(&c->values, &from, first, b->count, w->padded, values);
    } else {
        CHOOSE(load_values)(&c->values, at, b->count, w->padded, values);
        b->value_scales = c->values.bits == 8 ? c->values.scale + at * BLOCK : NULL;
    }
}

/* Where the heads that row r looks for begin, in queries and results that are so far apart. */
static int64_t head_of_row(const work *w, const query *p, int64_t r, int64_t stride)
{
    const attention *c = w->c;
    const int64_t token = c->segments->offsets[p->segment] + p->first - c->segments->starts[p->segment];
    const int64_t head = p->head * w->group_heads + r % w->group_heads;
    return (token + r / w->group_heads) * stride + head * w->head_dim;
}

static void begin(const work *w, const query *p, state *t)
{
    const attention *c = w->c;
    t->rows = (p->end - p->first) * w->group_heads;
    t->first_position = p->first;
    memset(t->mixed, 0, (size_t)(t->rows * w->padded) * sizeof(float));
    memset(t->total, 0, (size_t)t->rows * sizeof *t->total);
    for (int64_t r = 0; r < t->rows; r++) {
        const float *q = c->q + head_of_row(w, p, r, c->q_stride);
        for (int64_t i = 0; i < w->head_dim; i++)
            t->queries[r * w->head_dim + i] = q[i] * c->scale;
        t->most[r] = -INFINITY;
    }
}

static void finish(const work *w, const query *p, const state *t)
{
    for (int64_t r = 0; r < t->rows; r++) {
        float *out = w->c->out + head_of_row(w, p, r, w->c->heads * w->head_dim);
        float total = 0;
        for (int i = 0; i < 8; i++)
            total += t->total[r][i];
        for (int64_t i = 0; i < w->head_dim; i++)
            out[i] = t->mixed[r * w->padded + i] / total;
    }
}

/* Ask for a block's keys or values. They come from memory in pieces that are too small for the processor
 * to foresee the next one. */
static void prefetch_side(const side *s, int64_t at)
{
    const int64_t bytes = BLOCK * s->head_dim * s->bits / 8;
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)s->data + at * bytes + i);
}

static void attend_query(const work *w, const query *p)
{
    const attention *c = w->c;
    float keys[BLOCK * MAX_HEAD_DIM], values[BLOCK * MAX_HEAD_DIM];
    state t;
    tile b;
    const int64_t oldest = c->cache->window ? larger(0, p->first - c->cache->window + 1) : 0;
    memset(values, 0, (size_t)(BLOCK * w->padded) * sizeof *values); /* the channels that pad */
    begin(w, p, &t);
    for (int64_t first = 0; first <= p->own; first += BLOCK) {
        if (first >= c->cache->sinks && first + BLOCK <= oldest)
            continue;
        if (first < p->own) {
            const int64_t next = block_at(c, p->segment, p->head, first / BLOCK + 1);
            prefetch_side(&c->cache->keys, next);
            prefetch_side(&c->cache->values, next);
        }
        load_tile(w, p, first, keys, values, &b);
        CHOOSE(attend)(w, &t, &b);
    }
    finish(w, p, &t);
}

static void attend_pass(const void *argument, int64_t i)
{
    const work *w = argument;
    const attention *c = w->c;
    const int64_t block = i / c->kv_heads;
    int64_t segment = 0;
    while (w->block_ends[segment] <= block)
        segment++;
    const int64_t start = c->segments->starts[segment];
    const int64_t end = start + c->segments->offsets[segment + 1] - c->segments->offsets[segment];
    const int64_t within = block - (segment ? w->block_ends[segment - 1] : 0);
    const int64_t own = (start / BLOCK + within) * BLOCK, stop = smaller(own + BLOCK, end);
    const int64_t step = larger(1, MAX_ROWS / w->group_heads);
    for (int64_t first = larger(own, start); first < stop; first += step) {
        const query p = {segment, i % c->kv_heads, first, smaller(first + step, stop), own};
        attend_query(w, &p);
    }
}

/* Write the tokens' keys and values to the cache, and let their queries attend to it. Returns 0 if out of
 * memory. head_dim is at most MAX_HEAD_DIM, heads / kv_heads at most MAX_ROWS. */
int qinfer_attention(const attention *c)
{
    int64_t *block_ends = malloc((size_t)c->segments->count * sizeof *block_ends), blocks = 0;
    if (!block_ends)
        return 0;
    for (int64_t s = 0; s < c->segments->count; s++) {
        const int64_t start = c->segments->starts[s], end = start + c->segments->offsets[s + 1] - c->segments->offsets[s];
        blocks += (end - 1) / BLOCK - start / BLOCK + 1;
        block_ends[s] = blocks;
    }
    const work w = {.c = c,
                    .group_heads = c->heads / c->kv_heads,
                    .head_dim = c->head_dim,
                    .padded = (c->head_dim + 31) / 32 * 32,
                    .block_ends = block_ends};
    const int64_t floats = c->segments->offsets[c->segments->count] * c->kv_heads * c->head_dim;
    const int threads = (int)c->threads, storers = floats < FEW_FLOATS ? 1 : threads;
    qinfer_parallel(store_pass, &w, c->segments->count * c->kv_heads, storers);
    qinfer_parallel(attend_pass, &w, blocks * c->kv_heads, threads);
    if (c->cache->keys.bits < 16 || c->cache->values.bits < 16)
        qinfer_parallel(keep_pass, &w, c->segments->count * c->kv_heads, storers);
    free(block_ends);
    return 1;
}
