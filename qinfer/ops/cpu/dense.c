/* Products with dense and NF4 weights, whose bytes are only moved: 4 rows lie side by side, run for run, so
 * that a thread reads one piece of memory from its beginning to its end.
 *
 * Activations, sums and results are fp32, so these differ from the reference operations only in the order
 * of addition: 8 sums per row, of every eighth column each, that are added up in the end. A result depends
 * neither on the other rows and tokens, nor on the number of threads.
 */
#include "bounds.h"
#include "pool.h"
#include "variants.h"
#include "weight.h"

enum { TOKENS = 3, ROWS = 4, FEW_TOKENS = 6, CHUNK_RUNS = 10, BYTES_AHEAD = 2048 };

static int64_t run_bytes(int kind)
{
    static const int64_t bytes[] = {RUN / 2, 2 * RUN, 2 * RUN, 4 * RUN};
    return bytes[kind];
}

static int64_t runs_of(const weight *w) { return (w->columns + RUN - 1) / RUN; }

/* Where run `run` of the ROWS rows from `row` on is, a multiple of ROWS. */
static uint8_t *runs_at(const weight *w, int64_t row, int64_t run)
{
    return w->data + (row * runs_of(w) + run * ROWS) * run_bytes(w->kind);
}

/* ---- repacking ---- */

int64_t dense_bytes(const weight *w) { return (w->rows + ROWS - 1) / ROWS * ROWS * runs_of(w) * run_bytes(w->kind); }

typedef struct {
    const weight *w;
    const uint8_t *data;
} repacking;

static void pack_rows(const void *job, int64_t group)
{
    const weight *w = ((const repacking *)job)->w;
    const int64_t first = group * ROWS, bytes = run_bytes(w->kind), left = w->columns % RUN;
    const int64_t whole = w->columns / RUN, runs = runs_of(w);
    memset(runs_at(w, first, 0), 0, (size_t)(runs * ROWS * bytes));
    for (int64_t r = 0; r < smaller(ROWS, w->rows - first); r++) {
        const uint8_t *from = ((const repacking *)job)->data + (first + r) * w->row_bytes;
        for (int64_t run = 0; run < whole; run++)
            memcpy(runs_at(w, first, run) + r * bytes, from + run * bytes, (size_t)bytes);
        if (left)
            memcpy(runs_at(w, first, whole) + r * bytes, from + whole * bytes, (size_t)(left * bytes / RUN));
    }
}

void dense_repack(const weight *w, const uint8_t *data, int threads)
{
    const repacking job = {w, data};
    qinfer_parallel(pack_rows, &job, (w->rows + ROWS - 1) / ROWS, threads);
}

/* ---- products ---- */

/* NF4 has the first of two columns in the upper nibble: in each run, the 16 values that go with the upper
 * nibbles of 16 bytes, then the 16 that go with the lower ones. */
void split_pairs(const input *x, int64_t token)
{
    float *at = x->floats + token * x->runs * RUN;
    for (int64_t run = 0; run < x->runs; run++, at += RUN) {
        float odd[RUN / 2];
        for (int j = 0; j < RUN / 2; j++) {
            odd[j] = at[2 * j + 1];
            at[j] = at[2 * j];
        }
        memcpy(at + RUN / 2, odd, sizeof odd);
    }
}

/* 16 rows of some runs, unpacked once for many tokens. */
typedef float chunk[GRAIN][CHUNK_RUNS * RUN];

#define CODE "dense_tiles.h"
#include "each_variant.h"

void dense_rows(const product *p, const input *x, int64_t token, int64_t row, int64_t count)
{
    if (x->tokens <= FEW_TOKENS)
        CHOOSE(few_tokens)(p, x, row, count);
    else
        CHOOSE(many_tokens)(p, x, token, row, count);
}
