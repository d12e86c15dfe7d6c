/* Decoder blocks, and a step through them. */
#ifndef QINFER_BLOCK_H
#define QINFER_BLOCK_H

#include "attention.h"
#include "weight.h"

/* A projection; must match `Projection` in kernels.py. */
typedef struct {
    const weight *w; /* NULL if there is none */
    const float *bias;
} projection;

/* Must match `Block` in kernels.py. */
typedef struct {
    int64_t hidden, intermediate, heads, kv_heads, head_dim;
    float scale, softcap;
    int64_t activation;
    norm attention_norm, q_norm, k_norm, mlp_norm; /* of heads: weight is NULL if there is none */
    projection qkv[3];                             /* the first alone may be all three */
    projection output, gate, up, down;
} block;

/* What is the same for all blocks; must match `Step` in kernels.py. */
typedef struct {
    int64_t tokens;
    int64_t threads;
    float *x;               /* [tokens, hidden] */
    const float *cos, *sin; /* [tokens, head_dim / 2], or NULL */
    const segments *segments;
    void *workspace;
} step;

/* Bytes of workspace that a step of this many tokens needs in a block. */
int64_t qinfer_block_bytes(const block *b, int64_t tokens);

/* Run a step through blocks, each with its cache, and the norm behind them: x in place, new keys and values
 * to the caches. Returns 0 if out of memory. */
int qinfer_blocks(const block *blocks, const cache *caches, int64_t count, const norm *last, const step *s);

#endif
