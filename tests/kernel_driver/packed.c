#include "driver.h"

#include <packed.c>

enum { PACKED_ROWS = 61, PACKED_TOKENS = 11 };

/* Some tokens with a repacked weight: the same on any number of threads, and alone. */
void check_packed(unsigned *seed)
{
    const int bits = random_below(seed, 2) ? 4 : 8, per_row = (int)random_below(seed, 2);
    const int64_t columns = per_row ? 250 : 256, groups = per_row ? 1 : 4;
    const int64_t row_bytes = columns * bits / 8;
    packed w = {.bits = bits, .scale_is_fp16 = (int)random_below(seed, 2), .rows = PACKED_ROWS,
                .columns = columns, .runs = 8, .runs_a_group = 8 / groups};
    uint8_t *data = malloc((size_t)(PACKED_ROWS * row_bytes));
    uint16_t *scale = malloc((size_t)(PACKED_ROWS * groups) * sizeof *scale);
    float *x = random_floats(seed, PACKED_TOKENS * columns);
    const size_t bytes = PACKED_TOKENS * PACKED_ROWS * sizeof(float);
    float *y = malloc(bytes), *z = malloc(bytes);
    for (int64_t i = 0; i < PACKED_ROWS * row_bytes; i++)
        data[i] = (uint8_t)random_below(seed, 256);
    for (int64_t i = 0; i < PACKED_ROWS * groups; i++)
        scale[i] = 0x3c00;
    w.data = malloc((size_t)qinfer_packed_bytes(&w));
    qinfer_repack(&w, data, scale, row_bytes, 2);
    qinfer_packed_linear(&w, x, PACKED_TOKENS, y, 1);
    qinfer_packed_linear(&w, x, PACKED_TOKENS, z, 1 + (int)random_below(seed, 5));
    require_same(y, z, bytes, "packed linear on other threads");
    qinfer_packed_linear(&w, x, 1, z, 2);
    require_same(y, z, PACKED_ROWS * sizeof *y, "packed linear of a token alone");
    free(data), free(scale), free(x), free(w.data), free(y), free(z);
}
