#include "driver.h"

#include <rows.c>

/* Norms and nonlinearities of rows of a random size: the same on any number of threads, and alone. */
void check_rows(unsigned *seed)
{
    const int64_t size = 1 + random_below(seed, 700), count = 1 + random_below(seed, 60);
    const int kind = (int)random_below(seed, 4);
    float *x = random_floats(seed, count * size), *up = random_floats(seed, count * size);
    float *weight = random_floats(seed, size), *bias = random_floats(seed, size);
    const size_t bytes = (size_t)(count * size) * sizeof *x, row = (size_t)size * sizeof *x;
    float *y = malloc(bytes), *z = malloc(bytes);
    for (int operation = 0; operation < 4; operation++) {
        const int threads[] = {1, 1 + (int)random_below(seed, 5), 1};
        for (int run = 0; run < 3; run++) {
            float *to = run ? z : y, *factor = operation == 2 ? NULL : up;
            const int64_t some = run == 2 ? 1 : count;
            const norm n = {weight, operation ? bias : NULL, 1e-5};
            if (operation < 2)
                qinfer_norm(&n, x, some, size, to, threads[run]);
            else
                qinfer_activate(x, factor, kind, some, size, to, threads[run]);
            require_same(y, to, run == 2 ? row : bytes, "a row");
        }
    }
    const int64_t half = 1 + size / 2, heads = 1 + count / 8;
    float *heads_of_tokens = random_floats(seed, 3 * heads * 2 * half);
    float *cos = random_floats(seed, 3 * half), *sin = random_floats(seed, 3 * half);
    qinfer_rotary(heads_of_tokens, cos, sin, 3, heads, half);
    free(x), free(up), free(weight), free(bias), free(y), free(z);
    free(heads_of_tokens), free(cos), free(sin);
}
