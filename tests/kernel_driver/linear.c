#include "driver.h"

#include <linear.c>

enum { ROWS = 61, COLUMNS = 256, TOKENS = 11 };

/* Some tokens with a weight of a random kind: the same on any number of threads, and alone. */
void check_linear(unsigned *seed)
{
    const int kind = (int)random_below(seed, 4), odd = kind >= BF16;
    const int64_t columns = COLUMNS - (odd ? 3 : 0), group = odd ? columns : 64;
    weight w = {.kind = kind, .rows = ROWS, .columns = columns, .group = group,
                .row_bytes = kind == FP32 ? 4 * columns : odd ? 2 * columns : columns / 2};
    const size_t bytes = (size_t)(w.row_bytes * ROWS), scales = (size_t)(ROWS * columns / group);
    uint8_t *data = malloc(bytes);
    float *x = random_floats(seed, TOKENS * columns), *absmax = random_floats(seed, (int64_t)scales);
    float *code = random_floats(seed, 16);
    float *y = malloc(TOKENS * ROWS * sizeof *y), *z = malloc(TOKENS * ROWS * sizeof *z);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(i & 1 && kind >= BF16 ? 0x3f : random_below(seed, 256));
    w.data = data;
    w.absmax = absmax;
    w.code = code;
    qinfer_linear(&w, x, TOKENS, y, 1);
    qinfer_linear(&w, x, TOKENS, z, 1 + (int)random_below(seed, 5));
    require_same(y, z, TOKENS * ROWS * sizeof *y, "linear on other threads");
    qinfer_linear(&w, x, 1, z, 2);
    require_same(y, z, ROWS * sizeof *y, "linear of a token alone");
    free(data), free(x), free(absmax), free(code), free(y), free(z);
}
