/* A decoding step in one call: embeddings, blocks, head, and the choice of tokens.
 *
 * What the operations compute one by one, to the bit. On a small model whatever stands between them costs a
 * tenth of a step.
 */
#include "block.h"
#include "choice.h"
#include "half.h"

#include <string.h>

/* Rows to look up; must match `Table` in kernels.py. */
typedef struct {
    const void *data; /* NULL if there is none */
    int64_t kind;     /* BF16, FP16 or FP32 */
    int64_t stride;   /* numbers from row to row */
} table;

/* What is the same in all steps of a shape; must match `Decoding` in kernels.py. */
typedef struct {
    const block *blocks;
    const cache *caches; /* [count], like the blocks */
    int64_t count;
    const norm *last;
    const weight *head;
    table embedding, learned;   /* learned: of positions */
    const float *cos, *sin;     /* [positions, head_dim / 2], or NULL */
    const int64_t *ids, *positions; /* [tokens] */
    float *rotation;            /* [2, tokens, head_dim / 2] */
    float *logits;              /* [tokens, head->rows] */
    choice choice;              /* of tokens, from the logits */
} decoding;

static void look_up(const table *t, int64_t row, int64_t size, int adds, float *to)
{
    const float *wide = (const float *)t->data + row * t->stride;
    const uint16_t *narrow = (const uint16_t *)t->data + row * t->stride;
    for (int64_t i = 0; i < size; i++) {
        const float x = t->kind == FP32 ? wide[i] : t->kind == BF16 ? from_bf16(narrow[i]) : from_fp16(narrow[i]);
        to[i] = adds ? to[i] + x : x;
    }
}

static void embed(const decoding *d, const step *s)
{
    const int64_t hidden = d->blocks->hidden, half = d->blocks->head_dim / 2;
    for (int64_t t = 0; t < s->tokens; t++) {
        look_up(&d->embedding, d->ids[t], hidden, 0, s->x + t * hidden);
        if (d->learned.data)
            look_up(&d->learned, d->positions[t], hidden, 1, s->x + t * hidden);
        if (d->cos) {
            float *cos = d->rotation + t * half, *sin = cos + s->tokens * half;
            memcpy(cos, d->cos + d->positions[t] * half, (size_t)half * sizeof *cos);
            memcpy(sin, d->sin + d->positions[t] * half, (size_t)half * sizeof *sin);
        }
    }
}

/* Run the step's tokens, one of each segment. Returns 0 if out of memory. */
int qinfer_decode(const decoding *d, const step *s)
{
    const int64_t vocab = d->head->rows;
    step rotated = *s;
    rotated.cos = d->cos ? d->rotation : NULL;
    rotated.sin = d->cos ? d->rotation + s->tokens * (d->blocks->head_dim / 2) : NULL;
    embed(d, s);
    if (!qinfer_blocks(d->blocks, d->caches, d->count, d->last, &rotated))
        return 0;
    const product head = {.w = d->head, .out = d->logits, .stride = vocab};
    qinfer_linear(&head, s->x, s->tokens, s->workspace, (int)s->threads);
    return qinfer_choose(&d->choice, (int)s->threads);
}
