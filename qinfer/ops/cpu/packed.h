/* Products with 4- and 8-bit weights; see packed.c. */
#ifndef QINFER_PACKED_H
#define QINFER_PACKED_H

#include <stdint.h>

/* A repacked weight; must match `Packed` in kernels.py. */
typedef struct {
    int32_t bits;          /* 4 or 8 */
    int32_t scale_is_fp16; /* else bf16 */
    int64_t rows, columns;
    int64_t runs;         /* of 32 columns, the last one filled up with zeros */
    int64_t runs_a_group; /* that share a scale */
    uint8_t *data;
} packed;

/* Rows of activations in 16 bits; runs of 32 share a scale. */
typedef struct {
    int64_t tokens, runs;
    int16_t *values; /* [tokens, 32 * runs] */
    float *scales;   /* [tokens, runs] */
    int32_t *sums;   /* [tokens, runs]: of the values, times 8 */
} activations;

/* Bytes that the activations need besides the struct. */
int64_t activations_bytes(int64_t tokens, int64_t columns);

/* Quantize x [tokens, columns] into memory of that size. */
void quantize_activations(activations *a, void *memory, const float *x, int64_t tokens, int64_t columns,
                          int threads);

/* out[t][n] = sum over k of x[t][k] * w[n][k]. */
void packed_linear(const packed *w, const activations *x, float *out, int threads);

#endif
