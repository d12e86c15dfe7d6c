/* Products with dense and NF4 weights that stay as they lie on disk.
 *
 * Activations, sums and results are fp32, so these differ from the reference operations only in the order
 * of addition: 8 sums per row, of every eighth column each, that are added up in the end. A result depends
 * neither on the other rows and tokens, nor on the number of threads.
 */
#include "bounds.h"
#include "variants.h"
#include "weight.h"

enum { TOKENS = 3, ROWS = 4, FEW_TOKENS = 6, CHUNK_RUNS = 10 };

static int64_t run_bytes(int kind)
{
    static const int64_t bytes[] = {RUN / 2, 2 * RUN, 2 * RUN, 4 * RUN};
    return bytes[kind];
}

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
