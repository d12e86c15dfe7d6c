#include "driver.h"

#include <linear.c>

enum { ROWS = 61, TOKENS = 13 };

random_weight new_weight(unsigned *seed, int kind, int64_t rows, int64_t columns, int per_row)
{
    static const int64_t bytes_of_32[] = {16, 64, 64, 128, 16, 32};
    const int odd = kind >= BF16 && kind <= FP32;
    const int64_t group = per_row && kind != NF4 ? columns : 64, scales = rows * (columns / group);
    random_weight m = {.w = {.kind = kind, .scale_is_fp16 = (int)random_below(seed, 2), .rows = rows,
                             .columns = columns, .group = group, .row_bytes = columns * bytes_of_32[kind] / 32}};
    uint8_t *data = malloc((size_t)(m.w.row_bytes * rows));
    uint16_t *scale = malloc((size_t)scales * sizeof *scale);
    int8_t *zero = malloc((size_t)scales);
    for (int64_t i = 0; i < m.w.row_bytes * rows; i++)
        data[i] = (uint8_t)(odd && i & 1 ? 0x3f : random_below(seed, 256));
    for (int64_t i = 0; i < scales; i++)
        scale[i] = 0x3c00, zero[i] = (int8_t)(random_below(seed, 256) - 128);
    m.w.has_zeros = kind == INT8 && random_below(seed, 2);
    m.memory[0] = data;
    m.memory[1] = scale;
    m.w.absmax = m.memory[2] = random_floats(seed, scales);
    m.w.code = m.memory[3] = random_floats(seed, 16);
    m.w.data = malloc((size_t)qinfer_weight_bytes(&m.w));
    qinfer_repack(&m.w, data, scale, m.w.has_zeros ? zero : NULL, 2);
    free(data), free(zero);
    m.memory[0] = m.w.data;
    return m;
}

void free_weight(const random_weight *m)
{
    for (int i = 0; i < 4; i++)
        free(m->memory[i]);
}

/* Some tokens with a weight of a random kind: the same on any number of threads, and alone. */
void check_linear(unsigned *seed)
{
    const int kind = (int)random_below(seed, 6), odd = kind >= BF16 && kind <= FP32;
    const int per_row = odd || random_below(seed, 2);
    const random_weight m = new_weight(seed, kind, ROWS, kind == NF4 || !per_row ? 256 : 250, per_row);
    float *x = random_floats(seed, TOKENS * m.w.columns);
    float *y = malloc(TOKENS * ROWS * sizeof *y), *z = malloc(TOKENS * ROWS * sizeof *z);
    void *workspace = malloc((size_t)qinfer_input_bytes(TOKENS, m.w.columns));
    const product p = {.w = &m.w, .out = y, .stride = ROWS}, again = {.w = &m.w, .out = z, .stride = ROWS};
    qinfer_linear(&p, x, TOKENS, workspace, 1);
    qinfer_linear(&again, x, TOKENS, workspace, 1 + (int)random_below(seed, 5));
    require_same(y, z, TOKENS * ROWS * sizeof *y, "linear on other threads");
    for (int64_t tokens = 1; tokens < TOKENS; tokens += 3) {
        qinfer_linear(&again, x, tokens, workspace, 2);
        require_same(y, z, (size_t)tokens * ROWS * sizeof *y, "linear of fewer tokens");
    }
    free_weight(&m);
    free(x), free(y), free(z), free(workspace);
}
