/* Operations on rows of floats, each row on its own. */
#ifndef QINFER_ROWS_H
#define QINFER_ROWS_H

#include <stdint.h>

enum { SILU, GELU, GELU_TANH, RELU }; /* as in kernels.py */

/* Rows that are computed from others: `function` makes one. */
typedef struct rows rows;
struct rows {
    void (*function)(const rows *, const float *x, float *y);
    const float *x;             /* [count, size] */
    int64_t count, size;
    const float *weight, *bias; /* [size]: of norms */
    const float *up;            /* like x: what the activation is multiplied with, or NULL */
    float eps;
    int kind;
};

/* A norm; must match `Norm` in kernels.py. */
typedef struct {
    const float *weight, *bias; /* bias: of LayerNorm, NULL is RMSNorm */
    double eps;
} norm;

rows copied(const float *x, int64_t count, int64_t size);
rows normalized(const norm *n, const float *x, int64_t count, int64_t size);
rows activated(int kind, const float *x, const float *up, int64_t count, int64_t size);

/* y is the norm of each of `count` rows of `size`; y may be x. */
void qinfer_norm(const norm *n, const float *x, int64_t count, int64_t size, float *y, int threads);

/* Norms of heads and rotary positions, in place, of the heads of one token. cos and sin are [half] or
 * NULL. */
void rotate_heads(float *x, int64_t heads, int64_t half, const norm *n, const float *cos,
                  const float *sin);

/* The index of the largest number, the lowest of equals; and that number, NaN if there is one. */
int64_t likeliest(const float *x, int64_t count, float *peak);

#endif
