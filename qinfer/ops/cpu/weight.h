/* Weights as the kernels take them, and products with them. */
#ifndef QINFER_WEIGHT_H
#define QINFER_WEIGHT_H

#include "rows.h"

#include <stdint.h>

enum { NF4, BF16, FP16, FP32, INT4, INT8 }; /* as in kernels.py */

/* `rows` outputs of `columns` inputs; must match `Weight` in kernels.py. */
typedef struct {
    int32_t kind;
    int32_t scale_is_fp16; /* of INT4 and INT8; else bf16 */
    int64_t has_zeros;     /* whether groups of INT8 have a zero point each */
    int64_t rows, columns;
    int64_t group;         /* columns that share a scale, or a block of NF4, a power of 2; else all */
    int64_t row_bytes;     /* on disk */
    uint8_t *data;         /* as packed.c or dense.c lays it out */
    const float *absmax;   /* NF4: [rows * columns / group] */
    const float *code;     /* NF4: [16] */
} weight;

/* out[t][n] = sum over k of x[t][k] * w[n][k], plus the bias, plus what is there; must match `Product` in
 * kernels.py. */
typedef struct {
    const weight *w;
    const float *bias; /* [rows], or NULL */
    float *out;        /* [tokens, stride] */
    int64_t stride;
    int64_t adds;      /* whether to what is there */
} product;

enum { RUN = 32, GRAIN = 16, TILE = 4, WIDE_TILE = 6, PACKED_FEW = 8, DENSE_SWEEP = 96, PACKED_SWEEP = 264 };

/* Activations in the form that weights of some kind take. Quantized ones have `side` tokens side by side,
 * run for run, so that a tile reads one piece of memory; zeros fill the last one up. */
typedef struct {
    int64_t tokens;
    int64_t runs;             /* of 32 columns, the last one filled up with zeros */
    int64_t spans, span_runs; /* of runs that share a unit */
    int64_t side;             /* all of them, TILE at most; of more than PACKED_FEW, WIDE_TILE */
    float *floats;   /* [tokens, 32 * runs]; for NF4 in the order of its nibbles */
    int16_t *values; /* [tokens / side, runs, side, 32] */
    float *units;    /* [tokens / side, spans, side]: of the values */
    int32_t *sums;   /* like units: of the values, times -8 */
} input;

/* Where a token's part of a run or span is, in units of one. */
static inline int64_t place_of(const input *x, int64_t token, int64_t parts, int64_t part)
{
    return (token / x->side * parts + part) * x->side + token % x->side;
}

/* Put sums of some rows with some tokens where they belong. */
static inline void put(const product *p, int64_t token, int64_t row, int64_t rows, int64_t tokens,
                       float (*sums)[GRAIN])
{
    for (int64_t t = 0; t < tokens; t++) {
        float *to = p->out + (token + t) * p->stride + row;
        for (int64_t r = 0; r < rows; r++) {
            const float sum = p->bias ? sums[t][r] + p->bias[row + r] : sums[t][r];
            to[r] = p->adds ? to[r] + sum : sum;
        }
    }
}

/* Bytes of a weight's data, and filling it from the layout on disk: see quant/affine.py and quant/nf4.py. */
int64_t packed_bytes(const weight *w);
int64_t dense_bytes(const weight *w);
void packed_repack(const weight *w, const uint8_t *data, const uint16_t *scale, const int8_t *zero,
                   int threads);
void dense_repack(const weight *w, const uint8_t *data, int threads);

/* Products of `count` rows, at most GRAIN, from `row` on, a multiple of GRAIN, with the tokens of a sweep
 * from `token` on. */
void packed_rows(const product *p, const input *x, int64_t token, int64_t row, int64_t count);
void dense_rows(const product *p, const input *x, int64_t token, int64_t row, int64_t count);

/* Turn a token's floats into what INT4 and INT8, or NF4, weights take. */
void quantize_token(const input *x, int64_t token);
void clear_token(const input *x, int64_t token);
void split_pairs(const input *x, int64_t token);
int64_t span_runs(const weight *w);

/* Bytes of workspace that `multiply` needs for one input. */
int64_t qinfer_input_bytes(int64_t tokens, int64_t columns);

/* One product with x [tokens, columns]; the workspace has qinfer_input_bytes. */
void qinfer_linear(const product *p, const float *x, int64_t tokens, void *workspace, int threads);

/* Compute products that share an input, which `from` yields row by row. */
void multiply(const product *products, int64_t count, const rows *from, void *workspace, int threads);

#endif
