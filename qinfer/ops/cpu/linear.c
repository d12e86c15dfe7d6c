/* Products of several weights with one input: rows of the weights are shared out among the threads. */
#include "bounds.h"
#include "pool.h"
#include "weight.h"

#include <string.h>

/* Passes a thread: a few tokens take microseconds, in which each pass costs a part of one. */
enum { FEW_PASSES = 2, MANY_PASSES = 8, FLOATS_A_PASS = 1 << 14 };

/* The forms of an input. */
enum { FLOATS, SPLIT, QUANTIZED };

static int form_of(const weight *w) { return w->kind == NF4 ? SPLIT : w->kind >= INT4 ? QUANTIZED : FLOATS; }

static int64_t runs_of(int64_t columns) { return (columns + RUN - 1) / RUN; }

/* Bytes that a weight's data takes. */
int64_t qinfer_weight_bytes(const weight *w) { return w->kind >= INT4 ? packed_bytes(w) : dense_bytes(w); }

/* Fill w->data from the layout on disk. INT4 and INT8 have scales. With zero points, one for each scale, INT8
 * is made of 4-bit values less those, unless it keeps them. */
void qinfer_repack(const weight *w, const uint8_t *data, const uint16_t *scale, const int8_t *zero, int threads)
{
    if (w->kind >= INT4)
        packed_repack(w, data, scale, zero, threads);
    else
        dense_repack(w, data, threads);
}

int64_t qinfer_input_bytes(int64_t tokens, int64_t columns)
{
    const int64_t a_run = RUN * (int64_t)(sizeof(float) + sizeof(int16_t)) + (int64_t)(2 * sizeof(float));
    return (tokens + WIDE_TILE - 1) * runs_of(columns) * a_run;
}

typedef struct {
    input x;
    const rows *from;
    int form;
    int64_t tokens_a_pass;
} preparation;

static void prepare_pass(const void *job, int64_t i)
{
    const preparation *j = job;
    const int64_t begin = i * j->tokens_a_pass, end = begin + j->tokens_a_pass, size = j->from->size;
    for (int64_t t = begin; t < smaller(end, j->x.tokens); t++) {
        float *to = j->x.floats + t * j->x.runs * RUN;
        j->from->function(j->from, j->from->x + t * size, to);
        memset(to + size, 0, (size_t)(j->x.runs * RUN - size) * sizeof *to);
        if (j->form == SPLIT)
            split_pairs(&j->x, t);
        else if (j->form == QUANTIZED)
            quantize_token(&j->x, t);
    }
}

static input prepare(const rows *from, const weight *w, void *workspace, int threads)
{
    preparation j = {.from = from, .form = form_of(w), .tokens_a_pass = 1 + FLOATS_A_PASS / from->size};
    input *x = &j.x;
    x->tokens = from->count;
    x->runs = runs_of(from->size);
    x->span_runs = span_runs(w);
    x->spans = (x->runs + x->span_runs - 1) / x->span_runs;
    x->side = x->tokens > PACKED_FEW ? WIDE_TILE : smaller(x->tokens, TILE);
    const int64_t places = (x->tokens + x->side - 1) / x->side * x->side;
    x->floats = workspace;
    x->units = x->floats + x->tokens * x->runs * RUN;
    x->sums = (int32_t *)(x->units + places * x->spans);
    x->values = (int16_t *)(x->sums + places * x->spans);
    for (int64_t t = x->tokens; j.form == QUANTIZED && t < places; t++)
        clear_token(x, t);
    qinfer_parallel(prepare_pass, &j, (x->tokens + j.tokens_a_pass - 1) / j.tokens_a_pass, threads);
    return *x;
}

typedef struct {
    const product *products;
    const input *x;
    int64_t count, grains_a_pass;
} work;

static int64_t grains_of(const product *p) { return (p->w->rows + GRAIN - 1) / GRAIN; }

/* Some grains, counted through all products. Tokens go in sweeps, so that they stay in caches nearby. */
static void work_pass(const void *job, int64_t i)
{
    const work *j = job;
    const int packed = j->products->w->kind >= INT4;
    const int64_t first = i * j->grains_a_pass, sweep = packed ? PACKED_SWEEP : DENSE_SWEEP;
    for (int64_t token = 0; token < j->x->tokens; token += sweep) {
        int64_t grain = first, left = j->grains_a_pass;
        for (const product *p = j->products; p < j->products + j->count && left; p++) {
            const int64_t grains = grains_of(p);
            for (; grain < grains && left; grain++, left--) {
                const int64_t row = grain * GRAIN, count = smaller(p->w->rows - row, GRAIN);
                (packed ? packed_rows : dense_rows)(p, j->x, token, row, count);
            }
            grain -= grains;
        }
    }
}

static int same_input(const weight *a, const weight *b)
{
    return form_of(a) == form_of(b) && (form_of(a) != QUANTIZED || span_runs(a) == span_runs(b));
}

void multiply(const product *products, int64_t count, const rows *from, void *workspace, int threads)
{
    for (int64_t end = 1; count; products += end, count -= end, end = 1) {
        int64_t grains = grains_of(products);
        while (end < count && same_input(products->w, products[end].w))
            grains += grains_of(&products[end++]);
        const input x = prepare(from, products->w, workspace, threads);
        const int64_t passes = (from->count > PACKED_FEW ? MANY_PASSES : FEW_PASSES) * threads;
        const work w = {products, &x, end, (grains + passes - 1) / passes};
        qinfer_parallel(work_pass, &w, (grains + w.grains_a_pass - 1) / w.grains_a_pass, threads);
    }
}

void qinfer_linear(const product *p, const float *x, int64_t tokens, void *workspace, int threads)
{
    const rows from = copied(x, tokens, p->w->columns);
    multiply(p, 1, &from, workspace, threads);
}
