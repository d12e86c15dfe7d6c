/* Norms, nonlinearities and rotary positions: each row on its own, in one float order. */
#include "rows.h"

#include "bounds.h"
#include "pool.h"
#include "variants.h"

#include <math.h>
#include <stddef.h>

enum { FLOATS_A_PASS = 1 << 14, FLOATS_A_PIECE = 1 << 10 };

#define CODE "rows_elements.h"
#include "each_variant.h"

rows copied(const float *x, int64_t count, int64_t size)
{
    return (rows){.function = CHOOSE(copy), .x = x, .count = count, .size = size};
}

rows normalized(const norm *n, const float *x, int64_t count, int64_t size)
{
    return (rows){n->bias ? CHOOSE(layer_norm) : CHOOSE(rms_norm), x, count, size,
                  .weight = n->weight, .bias = n->bias, .eps = (float)n->eps};
}

rows activated(int kind, const float *x, const float *up, int64_t count, int64_t size)
{
    return (rows){CHOOSE(activate_row), x, count, size, .kind = kind, .up = up};
}

void rotate_heads(float *x, int64_t heads, int64_t half, const norm *n, const float *cos, const float *sin)
{
    const rows norms = n ? normalized(n, x, heads, 2 * half) : copied(x, heads, 2 * half);
    for (int64_t h = 0; h < heads; h++, x += 2 * half) {
        if (n)
            norms.function(&norms, x, x);
        if (cos)
            CHOOSE(rotate)(x, half, cos, sin);
    }
}

int64_t likeliest(const float *x, int64_t count, float *peak)
{
    int64_t best = 0;
    *peak = -INFINITY;
    for (int64_t first = 0; first < count; first += FLOATS_A_PIECE) {
        const float most = CHOOSE(most)(x + first, smaller(FLOATS_A_PIECE, count - first));
        if (most <= *peak)
            continue;
        *peak = most;
        best = first;
        if (isnan(most))
            return best;
    }
    while (best + 1 < count && x[best] != *peak)
        best++;
    return best;
}

typedef struct {
    const rows *from;
    float *y;
    int64_t rows_a_pass;
} work;

static void pass(const void *job, int64_t i)
{
    const work *w = job;
    const rows *c = w->from;
    const int64_t begin = i * w->rows_a_pass, end = begin + w->rows_a_pass;
    for (int64_t row = begin; row < smaller(end, c->count); row++)
        c->function(c, c->x + row * c->size, w->y + row * c->size);
}

static void run(rows c, float *y, int threads)
{
    const work w = {&c, y, 1 + FLOATS_A_PASS / c.size};
    qinfer_parallel(pass, &w, (c.count + w.rows_a_pass - 1) / w.rows_a_pass, threads);
}

void qinfer_norm(const norm *n, const float *x, int64_t count, int64_t size, float *y, int threads)
{
    run(normalized(n, x, count, size), y, threads);
}

/* y = activation(x), times `up` unless that is NULL. */
void qinfer_activate(const float *x, const float *up, int kind, int64_t count, int64_t size, float *y,
                     int threads)
{
    run(activated(kind, x, up, count, size), y, threads);
}

/* In place: rotate the pairs (i, i + half) of each head by the angles of its token. x is
 * [tokens, heads, 2 * half], cos and sin are [tokens, half]. */
void qinfer_rotary(float *x, const float *cos, const float *sin, int64_t tokens, int64_t heads,
                   int64_t half)
{
    for (int64_t t = 0; t < tokens; t++, cos += half, sin += half, x += heads * 2 * half)
        rotate_heads(x, heads, half, NULL, cos, sin);
}
