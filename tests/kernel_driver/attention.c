#include "driver.h"

#include <attention.c>

enum { TOKENS = WIDTH * BLOCK };

typedef struct {
    size_t data, scale, open; /* bytes */
} sizes;

static sizes sizes_of(const side *s, int64_t kv_heads)
{
    const size_t values = (size_t)(kv_heads * BLOCK * s->head_dim);
    const size_t blocks = SEGMENTS * WIDTH;
    const size_t scales = s->bits == 8 ? BLOCK
                          : s->bits > 8 ? 0
                          : s->is_keys  ? (size_t)s->head_dim
                                        : (size_t)(BLOCK * (s->head_dim / s->group));
    return (sizes){.data = blocks * values * (size_t)s->bits / 8,
                   .scale = blocks * (size_t)kv_heads * scales * 2,
                   .open = s->bits < 16 ? SEGMENTS * values * 2 : 0};
}

side new_side(unsigned *seed, int64_t head_dim, int64_t kv_heads, int is_keys)
{
    static const int bits[] = {32, 16, 8, 4};
    int64_t group = 40;
    while (group > 2 && head_dim % group)
        group -= 2;
    side s = {.bits = bits[random_below(seed, 4)], .is_keys = is_keys, .head_dim = head_dim,
              .group = group};
    const sizes bytes = sizes_of(&s, kv_heads);
    s.data = calloc(1, bytes.data);
    s.scale = calloc(1, bytes.scale);
    s.minimum = s.bits == 4 ? calloc(1, bytes.scale) : NULL;
    s.open = s.bits < 16 ? calloc(1, bytes.open) : NULL;
    return s;
}

side copy_of(const side *from, int64_t kv_heads)
{
    side s = *from;
    const sizes bytes = sizes_of(&s, kv_heads);
    s.data = memcpy(malloc(bytes.data), s.data, bytes.data);
    s.scale = memcpy(malloc(bytes.scale), s.scale, bytes.scale);
    s.minimum = s.minimum ? memcpy(malloc(bytes.scale), s.minimum, bytes.scale) : NULL;
    s.open = s.open ? memcpy(malloc(bytes.open), s.open, bytes.open) : NULL;
    return s;
}

void require_same_side(const side *a, const side *b, int64_t kv_heads)
{
    const sizes bytes = sizes_of(a, kv_heads);
    require_same(a->data, b->data, bytes.data, "stored data");
    require_same(a->scale, b->scale, bytes.scale, "a stored scale");
    if (a->minimum)
        require_same(a->minimum, b->minimum, bytes.scale, "a stored minimum");
    if (a->open)
        require_same(a->open, b->open, bytes.open, "an open block");
}

void free_side(const side *s) { free(s->data), free(s->scale), free(s->minimum), free(s->open); }

/* A step's queries, keys and values, [tokens][heads or kv_heads][head_dim] of all segments. */
static void step(unsigned *seed, attention *c, segments *g, int64_t *starts, const int64_t *ends)
{
    int64_t offsets[SEGMENTS + 1] = {0};
    for (int s = 0; s < SEGMENTS; s++)
        offsets[s + 1] = offsets[s] + ends[s] - starts[s];
    const int64_t tokens = offsets[SEGMENTS], floats = tokens * c->heads * c->head_dim;
    float *q = random_floats(seed, floats);
    float *k = random_floats(seed, tokens * c->kv_heads * c->head_dim);
    float *v = random_floats(seed, tokens * c->kv_heads * c->head_dim);
    float *out = malloc((size_t)floats * sizeof *out), *again = malloc((size_t)floats * sizeof *again);
    c->q = q, c->k = k, c->v = v, c->out = out, g->starts = starts, g->offsets = offsets;
    const cache copies = {.keys = copy_of(&c->cache->keys, c->kv_heads),
                          .values = copy_of(&c->cache->values, c->kv_heads),
                          .window = c->cache->window, .sinks = c->cache->sinks};
    attention other = *c;
    other.cache = &copies;
    other.threads = 1 + (int)random_below(seed, 5);
    other.out = again;
    qinfer_attention(c);
    qinfer_attention(&other);
    require_same(out, again, (size_t)floats * sizeof *out, "attention on other threads");
    require_same_side(&c->cache->keys, &copies.keys, c->kv_heads);
    require_same_side(&c->cache->values, &copies.values, c->kv_heads);
    memcpy(starts, ends, SEGMENTS * sizeof *starts);
    free_side(&copies.keys), free_side(&copies.values);
    free(q), free(k), free(v), free(out), free(again);
}

/* Some sequences grow to the end of their blocks, in steps of random sizes and at last by one token. */
void check_attention(unsigned *seed)
{
    static const int64_t head_dims[] = {2, 6, 20, 32, 40, 96};
    static const int64_t windows[] = {0, 0, 1, 31, 40};
    const int64_t head_dim = head_dims[random_below(seed, 6)], kv_heads = 1 + random_below(seed, 3);
    int32_t tables[SEGMENTS * WIDTH], slots[SEGMENTS] = {2, 0, 1};
    for (int i = 0; i < SEGMENTS * WIDTH; i++)
        tables[i] = SEGMENTS * WIDTH - 1 - i;
    const int32_t *all_tables[] = {tables};
    const int64_t widths[] = {WIDTH};
    segments g = {.count = SEGMENTS, .slots = slots, .tables = all_tables, .widths = widths};
    const cache stored = {.keys = new_side(seed, head_dim, kv_heads, 1),
                          .values = new_side(seed, head_dim, kv_heads, 0),
                          .window = windows[random_below(seed, 5)], .sinks = random_below(seed, 2) * 4};
    const int64_t heads = kv_heads * (1 + random_below(seed, 5));
    attention c = {.cache = &stored, .segments = &g, .heads = heads, .kv_heads = kv_heads,
                   .head_dim = head_dim, .scale = 0.1f, .threads = 1, .q_stride = heads * head_dim,
                   .kv_stride = kv_heads * head_dim};
    int64_t starts[SEGMENTS] = {0}, ends[SEGMENTS];
    for (int turn = 0; turn < 4; turn++) {
        for (int s = 0; s < SEGMENTS; s++) {
            const int64_t left = TOKENS - starts[s] - 3 + turn;
            ends[s] = turn < 2 ? starts[s] + 1 + random_below(seed, (unsigned)left / 2) : TOKENS - 3 + turn;
        }
        step(seed, &c, &g, starts, ends);
    }
    free_side(&stored.keys), free_side(&stored.values);
}
