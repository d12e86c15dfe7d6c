#include "driver.h"

#include <decode.c>

enum {
    BLOCKS = 2, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 10, HIDDEN = HEADS * HEAD_DIM, INTERMEDIATE = 72,
    VOCAB = 83, STEPS = 3
};

typedef struct {
    random_weight weights[7 * BLOCKS + 1];
    float *floats; /* any norm's weights */
    uint16_t *rows;
    float *turns;
    block blocks[BLOCKS];
} model;

static const weight *next_weight(unsigned *seed, model *m, int *at, int64_t rows, int64_t columns)
{
    static const int kinds[] = {INT4, INT8, BF16, FP16, FP32};
    m->weights[*at] = new_weight(seed, kinds[random_below(seed, 5)], rows, columns, 1);
    return &m->weights[(*at)++].w;
}

static void make_model(unsigned *seed, model *m)
{
    int at = 0;
    m->floats = random_floats(seed, HIDDEN);
    m->turns = random_floats(seed, 2 * STEPS * HEAD_DIM / 2);
    m->rows = malloc(VOCAB * HIDDEN * sizeof *m->rows);
    for (int i = 0; i < VOCAB * HIDDEN; i++)
        m->rows[i] = (uint16_t)(0x3c00 + random_below(seed, 512));
    for (int i = 0; i < BLOCKS; i++) {
        const norm n = {.weight = m->floats, .bias = random_below(seed, 2) ? m->floats : NULL, .eps = 1e-5};
        m->blocks[i] = (block){.hidden = HIDDEN, .intermediate = INTERMEDIATE, .heads = HEADS,
                               .kv_heads = KV_HEADS, .head_dim = HEAD_DIM, .scale = 0.1f,
                               .attention_norm = n, .mlp_norm = n};
        block *b = &m->blocks[i];
        for (int part = 0; part < 3; part++)
            b->qkv[part].w = next_weight(seed, m, &at, (part ? KV_HEADS : HEADS) * HEAD_DIM, HIDDEN);
        b->output.w = next_weight(seed, m, &at, HIDDEN, HIDDEN);
        b->up.w = next_weight(seed, m, &at, INTERMEDIATE, HIDDEN);
        b->gate.w = next_weight(seed, m, &at, INTERMEDIATE, HIDDEN);
        b->down.w = next_weight(seed, m, &at, HIDDEN, INTERMEDIATE);
    }
    next_weight(seed, m, &at, VOCAB, HIDDEN);
}

/* Logits [STEPS][SEGMENTS][VOCAB] of steps in which each segment goes on with what it chose. */
static float *decode(const model *m, const cache *caches, int threads)
{
    static const int32_t slots[SEGMENTS] = {2, 0, 1};
    static const int64_t offsets[SEGMENTS + 1] = {0, 1, 2, 3}, widths[] = {1};
    static const int32_t table[SEGMENTS] = {7, 0, 3};
    const int32_t *tables[] = {table};
    int64_t ids[SEGMENTS] = {5, 0, VOCAB - 1}, positions[SEGMENTS] = {0}, broken[SEGMENTS];
    const norm last = {.weight = m->floats, .eps = 1e-5};
    const segments g = {.count = SEGMENTS, .starts = positions, .offsets = offsets, .slots = slots,
                        .tables = tables, .widths = widths};
    float *x = malloc(SEGMENTS * HIDDEN * sizeof *x), *logits = malloc(STEPS * SEGMENTS * VOCAB * sizeof *logits);
    float *rotation = malloc(2 * SEGMENTS * (HEAD_DIM / 2) * sizeof *rotation);
    void *workspace = malloc((size_t)qinfer_block_bytes(m->blocks, SEGMENTS));
    const step s = {.tokens = SEGMENTS, .threads = threads, .x = x, .segments = &g, .workspace = workspace};
    decoding d = {.blocks = m->blocks, .caches = caches, .count = BLOCKS, .last = &last,
                  .head = &m->weights[7 * BLOCKS].w, .embedding = {m->rows, BF16, HIDDEN},
                  .cos = m->turns, .sin = m->turns + STEPS * HEAD_DIM / 2, .ids = ids, .positions = positions,
                  .rotation = rotation,
                  .choice = {.rows = SEGMENTS, .stride = VOCAB, .vocab_size = VOCAB - 3, .chosen = ids,
                             .broken = broken}};
    for (int i = 0; i < STEPS; i++) {
        d.choice.logits = d.logits = logits + i * SEGMENTS * VOCAB;
        if (!qinfer_decode(&d, &s))
            exit(4);
        for (int t = 0; t < SEGMENTS; t++)
            positions[t]++;
    }
    free(x), free(rotation), free(workspace);
    return logits;
}

/* Some steps of a small model: the same on any number of threads. */
void check_decode(unsigned *seed)
{
    model m;
    make_model(seed, &m);
    cache caches[BLOCKS], copies[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        caches[i] = (cache){.keys = new_side(seed, HEAD_DIM, KV_HEADS, 1),
                            .values = new_side(seed, HEAD_DIM, KV_HEADS, 0)};
        copies[i] = (cache){.keys = copy_of(&caches[i].keys, KV_HEADS),
                            .values = copy_of(&caches[i].values, KV_HEADS)};
    }
    float *logits = decode(&m, caches, 1), *again = decode(&m, copies, 2 + (int)random_below(seed, 3));
    require_same(logits, again, STEPS * SEGMENTS * VOCAB * sizeof *logits, "a step on other threads");
    for (int i = 0; i < BLOCKS; i++) {
        require_same_side(&caches[i].keys, &copies[i].keys, KV_HEADS);
        require_same_side(&caches[i].values, &copies[i].values, KV_HEADS);
        free_side(&caches[i].keys), free_side(&caches[i].values);
        free_side(&copies[i].keys), free_side(&copies[i].values);
    }
    for (int i = 0; i < 7 * BLOCKS + 1; i++)
        free_weight(&m.weights[i]);
    free(m.floats), free(m.turns), free(m.rows), free(logits), free(again);
}
