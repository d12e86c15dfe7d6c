/* Norms, nonlinearities and rotary positions: each row on its own, in one float order. */
#include "pool.h"
#include "variants.h"

#include <math.h>
#include <stddef.h>

enum { SILU, GELU, GELU_TANH, RELU }; /* as in kernels.py */
enum { FLOATS_A_PASS = 1 << 14 };

typedef struct rows rows;
struct rows {
    void (*function)(const rows *, const float *x, float *y);
    const float *x;
    float *y;
    int64_t count, size, rows_a_pass;
    float eps;
    int kind;
    const float *weight, *bias; /* [size]: of norms */
    const float *up;            /* like x: what the activation is multiplied with, or NULL */
};

#define CODE "rows_elements.h"
#include "each_variant.h"

static void pass(const void *job, int64_t i)
{
    const rows *c = job;
    const int64_t begin = i * c->rows_a_pass, end = begin + c->rows_a_pass;
    for (int64_t row = begin; row < (end < c->count ? end : c->count); row++)
        c->function(c, c->x + row * c->size, c->y + row * c->size);
}

static void run(rows c, int threads)
{
    c.rows_a_pass = 1 + FLOATS_A_PASS / c.size;
    qinfer_parallel(pass, &c, (c.count + c.rows_a_pass - 1) / c.rows_a_pass, threads);
}

/* y = x / rms(x) · weight, for each of `count` rows of `size`. */
void qinfer_rms_norm(const float *x, const float *weight, float eps, int64_t count, int64_t size,
                     float *y, int threads)
{
    run((rows){CHOOSE(rms_norm), x, y, count, size, .eps = eps, .weight = weight}, threads);
}

void qinfer_layer_norm(const float *x, const float *weight, const float *bias, float eps, int64_t count,
                       int64_t size, float *y, int threads)
{
    run((rows){CHOOSE(layer_norm), x, y, count, size, .eps = eps, .weight = weight, .bias = bias},
        threads);
}

/* y = activation(x), times `up` unless that is NULL. */
void qinfer_activate(const float *x, const float *up, int kind, int64_t count, int64_t size, float *y,
                     int threads)
{
    run((rows){CHOOSE(activate_row), x, y, count, size, .kind = kind, .up = up}, threads);
}

/* In place: rotate the pairs (i, i + half) of each head by the angles of its token. x is
 * [tokens, heads, 2 * half], cos and sin are [tokens, half]. */
void qinfer_rotary(float *x, const float *cos, const float *sin, int64_t tokens, int64_t heads,
                   int64_t half)
{
    for (int64_t t = 0; t < tokens; t++, cos += half, sin += half)
        for (int64_t h = 0; h < heads; h++, x += 2 * half)
            for (int64_t i = 0; i < half; i++) {
                const float a = x[i], b = x[half + i];
                x[i] = a * cos[i] - b * sin[i];
                x[half + i] = b * cos[i] + a * sin[i];
            }
}
