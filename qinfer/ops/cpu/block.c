/* Decoder blocks in one call: attention and an MLP, each behind a norm and added to the residual.
 *
 * What the operations compute one by one, to the bit. One call instead of hundreds matters where a token's
 * whole layer takes a tenth of a millisecond.
 */
#include "block.h"

#include "bounds.h"
#include "pool.h"

#include <stddef.h>

enum { TOKENS_A_PASS = 4 };

static int64_t all_heads(const block *b) { return (b->heads + 2 * b->kv_heads) * b->head_dim; }

/* Floats beside an input: queries, keys, values and what attention mixes; or gate and up. */
static int64_t floats_of(const block *b)
{
    return larger(all_heads(b) + b->heads * b->head_dim, 2 * b->intermediate);
}

int64_t qinfer_block_bytes(const block *b, int64_t tokens)
{
    const int64_t widest = larger(larger(b->hidden, b->intermediate), b->heads * b->head_dim);
    return tokens * floats_of(b) * (int64_t)sizeof(float) + qinfer_input_bytes(tokens, widest);
}

static product product_of(const projection *p, float *out, int64_t stride, int adds)
{
    return (product){p->w, p->bias, out, stride, adds};
}

typedef struct {
    const block *b;
    const step *s;
    float *qkv;
} rotation;

static void rotate_pass(const void *job, int64_t pass)
{
    const rotation *r = job;
    const block *b = r->b;
    const int64_t half = b->head_dim / 2, begin = pass * TOKENS_A_PASS, end = begin + TOKENS_A_PASS;
    for (int64_t t = begin; t < smaller(end, r->s->tokens); t++) {
        float *q = r->qkv + t * all_heads(b);
        const float *cos = r->s->cos ? r->s->cos + t * half : NULL, *sin = cos ? r->s->sin + t * half : NULL;
        rotate_heads(q, b->heads, half, b->q_norm.weight ? &b->q_norm : NULL, cos, sin);
        rotate_heads(q + b->heads * b->head_dim, b->kv_heads, half, b->k_norm.weight ? &b->k_norm : NULL,
                     cos, sin);
    }
}

static int attend(const block *b, const cache *c, const step *s, float *floats, void *inputs)
{
    const int64_t stride = all_heads(b), q = b->heads * b->head_dim, k = b->kv_heads * b->head_dim;
    const int threads = (int)s->threads;
    float *mixed = floats + s->tokens * stride;
    const rows normed = normalized(&b->attention_norm, s->x, s->tokens, b->hidden);
    const product parts[] = {product_of(&b->qkv[0], floats, stride, 0),
                             product_of(&b->qkv[1], floats + q, stride, 0),
                             product_of(&b->qkv[2], floats + q + k, stride, 0)};
    multiply(parts, b->qkv[1].w ? 3 : 1, &normed, inputs, threads);
    if (s->cos || b->q_norm.weight) {
        const rotation r = {b, s, floats};
        qinfer_parallel(rotate_pass, &r, (s->tokens + TOKENS_A_PASS - 1) / TOKENS_A_PASS, threads);
    }
    const attention a = {.cache = c, .segments = s->segments, .heads = b->heads, .kv_heads = b->kv_heads,
                         .head_dim = b->head_dim, .scale = b->scale, .softcap = b->softcap, .threads = threads,
                         .q = floats, .k = floats + q, .v = floats + q + k, .q_stride = stride, .kv_stride = stride,
                         .out = mixed};
    if (!qinfer_attention(&a))
        return 0;
    const rows from = copied(mixed, s->tokens, q);
    const product output = product_of(&b->output, s->x, b->hidden, 1);
    multiply(&output, 1, &from, inputs, threads);
    return 1;
}

static void feed_forward(const block *b, const step *s, float *floats, void *inputs)
{
    const int64_t size = b->intermediate;
    float *up = floats + s->tokens * size;
    const rows normed = normalized(&b->mlp_norm, s->x, s->tokens, b->hidden);
    const product parts[] = {product_of(&b->up, up, size, 0), product_of(&b->gate, floats, size, 0)};
    multiply(parts, b->gate.w ? 2 : 1, &normed, inputs, (int)s->threads);
    const rows active = activated((int)b->activation, b->gate.w ? floats : up, b->gate.w ? up : NULL, s->tokens, size);
    const product down = product_of(&b->down, s->x, b->hidden, 1);
    multiply(&down, 1, &active, inputs, (int)s->threads);
}

int qinfer_blocks(const block *blocks, const cache *caches, int64_t count, const norm *last, const step *s)
{
    for (const block *b = blocks; b < blocks + count; b++) {
        float *floats = s->workspace;
        void *inputs = floats + s->tokens * floats_of(b);
        if (!attend(b, caches + (b - blocks), s, floats, inputs))
            return 0;
        feed_forward(b, s, floats, inputs);
    }
    qinfer_norm(last, s->x, s->tokens, blocks->hidden, s->x, (int)s->threads);
    return 1;
}
