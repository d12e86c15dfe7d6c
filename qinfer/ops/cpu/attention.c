/* Attention over the paged key-value cache, read where it lies, and the writing of new tokens to it.
 *
 * A token sees its own block of 32 tokens in 16 bits (in fp32 where that is the format) and every
 * earlier block as it is stored. A query goes through the blocks of a span in the order of their positions,
 * and the spans' sums are joined in that order: one float order, whatever is computed beside it and
 * wherever. The result is the same for a token alone and in any chunk or batch, and for any number of
 * threads; and the threads can share the spans of a long sequence ("Flash-Decoding for long-context
 * inference", Dao, Haziza, Massa and Sizov, 2023).
 */
#include "attention.h"

#include "bounds.h"
#include "pool.h"
#include "variants.h"

#include <math.h>
#include <stdlib.h>

enum { BLOCK = 32, SPAN = 8 * BLOCK, MAX_HEAD_DIM = 256, MAX_ROWS = 48, FEW_FLOATS = 1 << 15,
       FEW_ROWS = 3 /* that read what is stored in one go */, MANY_PASSES = 8 /* a thread */ };

typedef struct {
    const attention *c;
    int64_t group_heads, head_dim, padded;
    const int64_t *part_ends; /* [segments]: running count of the segments' query blocks, or of spans */
    float *parts;             /* sums of each span for each head group, if they are shared */
} work;

/* One block as a query block sees it: keys [head_dim][BLOCK], values [BLOCK][padded head_dim], in fp32 (32
 * bits) or as they are stored, in 16 or 8. */
typedef struct {
    const void *keys, *values;
    int key_bits, value_bits;
    int64_t first_position, count;
    const uint16_t *key_scales, *value_scales; /* [BLOCK], or NULL: still to be multiplied with */
} tile;

/* What some queries have seen of a span, in memory of sums_size floats. */
typedef struct {
    float *mixed; /* [rows][padded] */
    float *total; /* [rows][8]: in 8 parts */
    float *most;  /* [rows]: -INFINITY where nothing was visible */
} sums;

enum { MAX_SUMS = MAX_ROWS * (MAX_HEAD_DIM + 8 + 1) };

static int64_t sums_size(int64_t rows, int64_t padded) { return rows * (padded + 8 + 1); }

static sums sums_in(float *memory, int64_t rows, int64_t padded)
{
    float *total = memory + rows * padded;
    return (sums){.mixed = memory, .total = total, .most = total + rows * 8};
}

/* Some queries of one head group, times the scale: row r is head r % group_heads of token
 * r / group_heads. */
typedef struct {
    int64_t rows, first_position;
    float queries[MAX_ROWS * MAX_HEAD_DIM];
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

/* Where the block of a head is that block_at gave. */
static char *stored_at(const side *s, int64_t at) { return (char *)s->data + at * BLOCK * s->head_dim * s->bits / 8; }

/* Before attention: write tokens where blocks are stored as they are, quantize those that fill. */
static void store_side(const attention *c, const side *s, int64_t segment, int64_t head)
{
    const source from = source_of(c, s, segment, head);
    for (int64_t first = from.start / BLOCK * BLOCK; first < from.end; first += BLOCK) {
        const int64_t at = block_at(c, segment, head, first / BLOCK), end = first + BLOCK;
        if (s->bits >= 16)
            CHOOSE(write_rows)(s, &from, stored_at(s, at), larger(first, from.start), smaller(end, from.end));
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

/* Keys and values are converted where few rows need them, else once before. */
static void load_tile(const work *w, const query *p, int64_t first, int64_t rows, float *keys, float *values,
                      tile *b)
{
    const cache *c = w->c->cache;
    const int64_t at = block_at(w->c, p->segment, p->head, first / BLOCK);
    const int few = rows <= FEW_ROWS;
    *b = (tile){keys, values, 32, 32, first, first == p->own ? p->end - first : BLOCK, NULL, NULL};
    if (first == p->own && c->keys.bits < 16) {
        const source from = source_of(w->c, &c->keys, p->segment, p->head);
        CHOOSE(load_open)(&c->keys, &from, first, b->count, BLOCK, keys);
    } else {
        if (few && c->keys.bits >= 8) {
            b->key_bits = c->keys.bits;
            b->keys = stored_at(&c->keys, at);
        } else {
            CHOOSE(load_keys)(&c->keys, at, w->head_dim, keys);
        }
        b->key_scales = c->keys.bits == 8 ? c->keys.scale + at * BLOCK : NULL;
    }
    if (first == p->own && c->values.bits < 16) {
        const source from = source_of(w->c, &c->values, p->segment, p->head);
        CHOOSE(load_open)(&c->values, &from, first, b->count, w->padded, values);
    } else {
        if (few && c->values.bits >= 8 && w->padded == w->head_dim) {
            b->value_bits = c->values.bits;
            b->values = stored_at(&c->values, at);
        } else {
            CHOOSE(load_values)(&c->values, at, b->count, w->padded, values);
        }
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
    for (int64_t r = 0; r < t->rows; r++) {
        const float *q = c->q + head_of_row(w, p, r, c->q_stride);
        for (int64_t i = 0; i < w->head_dim; i++)
            t->queries[r * w->head_dim + i] = q[i] * c->scale;
    }
}

static void finish(const work *w, const query *p, const sums *s)
{
    const int64_t rows = (p->end - p->first) * w->group_heads;
    for (int64_t r = 0; r < rows; r++) {
        float *out = w->c->out + head_of_row(w, p, r, w->c->heads * w->head_dim);
        float total = 0;
        for (int i = 0; i < 8; i++)
            total += s->total[r * 8 + i];
        for (int64_t i = 0; i < w->head_dim; i++)
            out[i] = s->mixed[r * w->padded + i] / total;
    }
}

/* Ask for a block's keys or values. They come from memory in pieces that are too small for the processor
 * to foresee the next one. */
static void prefetch_side(const side *s, int64_t at)
{
    for (const char *line = stored_at(s, at), *end = stored_at(s, at + 1); line < end; line += 64)
        __builtin_prefetch(line);
}

/* The sums of one span for the queries of a state. */
static void attend_span(const work *w, const query *p, const state *t, int64_t span, const sums *s)
{
    const attention *c = w->c;
    float keys[BLOCK * MAX_HEAD_DIM], values[BLOCK * MAX_HEAD_DIM];
    tile b;
    const int64_t oldest = c->cache->window ? larger(0, p->first - c->cache->window + 1) : 0;
    const int64_t end = smaller((span + 1) * SPAN, p->own + BLOCK);
    for (int64_t r = 0; r < t->rows; r++)
        s->most[r] = -INFINITY;
    if (span && span * SPAN >= c->cache->sinks && end <= oldest)
        return; /* what nobody sees is not joined */
    memset(s->mixed, 0, (size_t)(t->rows * w->padded) * sizeof *s->mixed);
    memset(s->total, 0, (size_t)(t->rows * 8) * sizeof *s->total);
    if (w->padded > w->head_dim) /* the channels that pad */
        memset(values, 0, (size_t)(BLOCK * w->padded) * sizeof *values);
    for (int64_t first = span * SPAN; first < end; first += BLOCK) {
        if (first >= c->cache->sinks && first + BLOCK <= oldest)
            continue;
        if (first < p->own) {
            const int64_t next = block_at(c, p->segment, p->head, first / BLOCK + 1);
            prefetch_side(&c->cache->keys, next);
            prefetch_side(&c->cache->values, next);
        }
        load_tile(w, p, first, t->rows, keys, values, &b);
        CHOOSE(attend)(w, t, &b, s);
    }
}

static void attend_query(const work *w, const query *p)
{
    float memory[2][MAX_SUMS];
    state t;
    begin(w, p, &t);
    const sums all = sums_in(memory[0], t.rows, w->padded), next = sums_in(memory[1], t.rows, w->padded);
    attend_span(w, p, &t, 0, &all);
    for (int64_t span = 1; span <= p->own / SPAN; span++) {
        attend_span(w, p, &t, span, &next);
        CHOOSE(join)(w, t.rows, &all, &next);
    }
    finish(w, p, &all);
}

/* Which segment the part is of, and the part's number within it. */
static int64_t segment_of(const work *w, int64_t *part)
{
    int64_t segment = 0;
    while (w->part_ends[segment] <= *part)
        segment++;
    *part -= segment ? w->part_ends[segment - 1] : 0;
    return segment;
}

static void attend_pass(const void *argument, int64_t i)
{
    const work *w = argument;
    const attention *c = w->c;
    int64_t block = i / c->kv_heads;
    const int64_t segment = segment_of(w, &block), start = c->segments->starts[segment];
    const int64_t end = start + c->segments->offsets[segment + 1] - c->segments->offsets[segment];
    const int64_t own = (start / BLOCK + block) * BLOCK, stop = smaller(own + BLOCK, end);
    const int64_t step = larger(1, MAX_ROWS / w->group_heads);
    for (int64_t first = larger(own, start); first < stop; first += step) {
        const query p = {segment, i % c->kv_heads, first, smaller(first + step, stop), own};
        attend_query(w, &p);
    }
}

/* The query of a segment of one token. */
static query single(const work *w, int64_t segment, int64_t head)
{
    const int64_t position = w->c->segments->starts[segment];
    return (query){segment, head, position, position + 1, position / BLOCK * BLOCK};
}

static sums part_at(const work *w, int64_t part, int64_t head)
{
    const int64_t at = (part * w->c->kv_heads + head) * sums_size(w->group_heads, w->padded);
    return sums_in(w->parts + at, w->group_heads, w->padded);
}

static void span_pass(const void *argument, int64_t i)
{
    const work *w = argument;
    const int64_t part = i / w->c->kv_heads, head = i % w->c->kv_heads;
    int64_t span = part;
    const query p = single(w, segment_of(w, &span), head);
    const sums s = part_at(w, part, head);
    state t;
    begin(w, &p, &t);
    attend_span(w, &p, &t, span, &s);
}

static void join_pass(const void *argument, int64_t i)
{
    const work *w = argument;
    const int64_t segment = i / w->c->kv_heads, head = i % w->c->kv_heads;
    const query p = single(w, segment, head);
    int64_t part = segment ? w->part_ends[segment - 1] : 0;
    const sums all = part_at(w, part, head);
    while (++part < w->part_ends[segment]) {
        const sums next = part_at(w, part, head);
        CHOOSE(join)(w, w->group_heads, &all, &next);
    }
    finish(w, &p, &all);
}

/* Whether threads share spans: each segment has one token, and there are too few head groups to keep the
 * threads busy. */
static int shares_spans(const attention *c)
{
    const segments *s = c->segments;
    return c->threads > 1 && s->offsets[s->count] == s->count &&
           s->count * c->kv_heads < MANY_PASSES * c->threads;
}

/* How many query blocks the segments have in all, or spans that they see. */
static int64_t count_parts(const segments *s, int64_t *part_ends, int spans)
{
    int64_t parts = 0;
    for (int64_t i = 0; i < s->count; i++) {
        const int64_t start = s->starts[i], last = start + s->offsets[i + 1] - s->offsets[i] - 1;
        parts += spans ? start / SPAN + 1 : last / BLOCK - start / BLOCK + 1;
        part_ends[i] = parts;
    }
    return parts;
}

/* Write the tokens' keys and values to the cache, and let their queries attend to it. Returns 0 if out of
 * memory. head_dim is at most MAX_HEAD_DIM, heads / kv_heads at most MAX_ROWS. */
int qinfer_attention(const attention *c)
{
    const int64_t segments = c->segments->count, tokens = c->segments->offsets[segments];
    int64_t *part_ends = malloc((size_t)segments * sizeof *part_ends);
    work w = {.c = c,
              .group_heads = c->heads / c->kv_heads,
              .head_dim = c->head_dim,
              .padded = (c->head_dim + 31) / 32 * 32,
              .part_ends = part_ends};
    if (!part_ends)
        return 0;
    int shares = shares_spans(c);
    const int64_t parts = count_parts(c->segments, part_ends, shares) * c->kv_heads;
    shares = shares && parts > segments * c->kv_heads;
    if (shares)
        w.parts = malloc((size_t)(parts * sums_size(w.group_heads, w.padded)) * sizeof *w.parts);
    if (shares && !w.parts) {
        free(part_ends);
        return 0;
    }
    const int threads = (int)c->threads;
    const int storers = tokens * c->kv_heads * c->head_dim < FEW_FLOATS ? 1 : threads;
    qinfer_parallel(store_pass, &w, segments * c->kv_heads, storers);
    qinfer_parallel(shares ? span_pass : attend_pass, &w, parts, threads);
    if (shares)
        qinfer_parallel(join_pass, &w, segments * c->kv_heads, parts * c->head_dim < FEW_FLOATS ? 1 : threads);
    if (c->cache->keys.bits < 16 || c->cache->values.bits < 16)
        qinfer_parallel(keep_pass, &w, segments * c->kv_heads, storers);
    free(w.parts);
    free(part_ends);
    return 1;
}
