/* Attention over the paged key-value cache. */
#ifndef QINFER_ATTENTION_H
#define QINFER_ATTENTION_H

#include <stdint.h>

/* The keys or the values of a layer, [blocks, kv_heads, …] as in qinfer/quant/kv.py; must match `Side`
 * in kernels.py. */
typedef struct {
    int32_t bits;     /* 32, 16, 8 or 4 */
    int32_t is_keys;  /* channels before tokens */
    int64_t head_dim;
    int64_t group;    /* channels a scale, of 4-bit values */
    void *data;
    uint16_t *scale, *minimum;
    uint16_t *open;   /* [slots, kv_heads, …]: the last block of each sequence, if bits < 16 */
} side;

/* The cache of a layer, and how far it sees; must match `Cache` in kernels.py. */
typedef struct {
    side keys, values;
    int64_t group;  /* of layers that see equally far and so share tables */
    int64_t window; /* tokens a query sees, itself included; 0 is all */
    int64_t sinks;  /* first tokens seen beside the window */
} cache;

/* Which tokens are whose, segment after segment; must match `Segments` in kernels.py. */
typedef struct {
    int64_t count;
    const int64_t *starts;        /* [count]: positions */
    const int64_t *offsets;       /* [count + 1]: into the tokens */
    const int32_t *slots;         /* [count]: of open blocks */
    const int32_t *const *tables; /* per group of layers [count, width]: a block's number by position / 32 */
    const int64_t *widths;        /* per group of layers */
} segments;

/* One call; must match `Attention` in kernels.py. */
typedef struct {
    const cache *cache;
    const segments *segments;
    int64_t heads, kv_heads, head_dim;
    float scale;
    float softcap;               /* c in c · tanh(score / c), or 0 */
    const float *q, *k, *v;      /* [tokens, heads or kv_heads, head_dim] */
    int64_t q_stride, kv_stride; /* from token to token */
    float *out;                  /* [tokens, heads, head_dim] */
    int64_t threads;
} attention;

/* Write the tokens' keys and values to the cache, and let their queries attend to it. Returns 0 if out of
 * memory. head_dim is at most 256, heads / kv_heads at most 48. */
int qinfer_attention(const attention *c);

#endif
