/* The choice of tokens from their logits. */
#ifndef QINFER_CHOICE_H
#define QINFER_CHOICE_H

#include <stdint.h>

/* Must match `Choice` in kernels.py. */
typedef struct {
    const float *logits;      /* [rows, stride] */
    int64_t rows, stride;
    int64_t vocab_size;       /* ids from here on are padding, and never chosen */
    const double *draws;      /* [rows, DRAW_COLUMNS], or NULL to take the likeliest */
    const int64_t *positions; /* [rows]: of the tokens that were run */
    int64_t *chosen, *broken; /* [rows]: the tokens, and whether a logit is NaN or infinity, or all are -infinity */
} choice;

/* Choose each row's token, as `Draws` in qinfer/ops/draws.py says. Returns 0 if out of memory. */
int qinfer_choose(const choice *c, int threads);

#endif
