/* The arithmetic of attention on tiles of one block; included for each variant, behind vectors.h.
 *
 * A tile is a block's keys [head_dim][BLOCK] or values [BLOCK][padded head_dim] of one head in fp32.
 */

/* The 32 tokens of keys, or 32 values of a token, from a row of 16-bit floats. */
INLINE void VARIANT(widen_fp16)(float *to, const uint16_t *from)
{
    for (int i = 0; i < BLOCK; i += 8)
        VARIANT(store)(to + i, VARIANT(load_fp16)(from + i));
}

INLINE void VARIANT(widen_int8)(float *to, const int8_t *from, const v8 scale[4])
{
    for (int i = 0; i < 4; i++)
        VARIANT(store)(to + 8 * i, VARIANT(load_int8)(from + 8 * i) * scale[i]);
}

INLINE void VARIANT(widen_int4)(float *to, const uint8_t *from, float scale, float minimum)
{
    const v8 s = VARIANT(splat)(scale), m = VARIANT(splat)(minimum);
    for (int i = 0; i < 4; i++)
        VARIANT(store)(to + 8 * i, VARIANT(load_nibbles)(from + 8 * (i % 2), i / 2) * s + m);
}

static void VARIANT(load_keys)(const side *s, int64_t at, int64_t head_dim, float *to)
{
    v8 scale[4];
    if (s->bits == 8)
        for (int i = 0; i < 4; i++)
            scale[i] = VARIANT(load_fp16)(s->scale + at * BLOCK + 8 * i);
    for (int64_t d = 0; d < head_dim; d++) {
        const int64_t row = at * head_dim + d;
        switch (s->bits) {
        case 32: memcpy(to + d * BLOCK, (const float *)s->data + row * BLOCK, 4 * BLOCK); break;
        case 16: VARIANT(widen_fp16)(to + d * BLOCK, (const uint16_t *)s->data + row * BLOCK); break;
        case 8: VARIANT(widen_int8)(to + d * BLOCK, (const int8_t *)s->data + row * BLOCK, scale); break;
        default:
            VARIANT(widen_int4)(to + d * BLOCK, (const uint8_t *)s->data + row * BLOCK / 2,
                                from_fp16(s->scale[row]), from_fp16(s->minimum[row]));
        }
    }
}

static void VARIANT(load_value_group)(const side *s, int64_t row, int64_t group, float *to)
{
    const int64_t size = s->group, at = row * (s->head_dim / size) + group;
    const uint8_t *codes = (const uint8_t *)s->data + at * size / 2;
    const float scale = from_fp16(s->scale[at]), minimum = from_fp16(s->minimum[at]);
    to += group * size;
    if (size == BLOCK) {
        VARIANT(widen_int4)(to, codes, scale, minimum);
        return;
    }
    for (int64_t i = 0; i < size / 2; i++) {
        to[i] = (float)(codes[i] & 15) * scale + minimum;
        to[size / 2 + i] = (float)(codes[i] >> 4) * scale + minimum;
    }
}

static void VARIANT(load_value)(const side *s, int64_t row, float *to)
{
    const int64_t n = s->head_dim;
    int64_t c = 0;
    if (s->bits == 4) {
        for (int64_t group = 0; group < n / s->group; group++)
            VARIANT(load_value_group)(s, row, group, to);
    } else if (s->bits == 8) {
        const int8_t *from = (const int8_t *)s->data + row * n;
        const float scale = from_fp16(s->scale[row]);
        const v8 all = VARIANT(splat)(scale);
        for (; c + 8 <= n; c += 8)
            VARIANT(store)(to + c, VARIANT(load_int8)(from + c) * all);
        for (; c < n; c++)
            to[c] = (float)from[c] * scale;
    } else if (s->bits == 16) {
        const uint16_t *from = (const uint16_t *)s->data + row * n;
        for (; c + 8 <= n; c += 8)
            VARIANT(store)(to + c, VARIANT(load_fp16)(from + c));
        for (; c < n; c++)
            to[c] = from_fp16(from[c]);
    } else {
        memcpy(to, (const float *)s->data + row * n, (size_t)n * sizeof *to);
    }
}

static void VARIANT(load_values)(const side *s, int64_t at, int64_t count, int64_t padded, float *to)
{
    for (int64_t j = 0; j < count; j++)
        VARIANT(load_value)(s, at * BLOCK + j, to + j * padded);
}

/* Scores of `rows` queries with a block's 32 keys, each a sum over the channels in their order. */
INLINE void VARIANT(score)(const float *q, int64_t head_dim, const float *keys, float *scores, int rows)
{
    v8 sum[3][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++)
            sum[r][i] = VARIANT(splat)(0);
    for (int64_t d = 0; d < head_dim; d++, keys += BLOCK) {
        const v8 k[4] = {VARIANT(load)(keys), VARIANT(load)(keys + 8), VARIANT(load)(keys + 16),
                         VARIANT(load)(keys + 24)};
        for (int r = 0; r < rows; r++) {
            const v8 x = VARIANT(splat)(q[r * head_dim + d]);
            for (int i = 0; i < 4; i++)
                sum[r][i] = VARIANT(madd)(x, k[i], sum[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++)
            VARIANT(store)(scores + r * BLOCK + 8 * i, sum[r][i]);
}

/* mixed = mixed * keep + weights · values, 32 channels at a time, the tokens in their order. */
INLINE void VARIANT(mix)(float *mixed, const float *keep, const float *weights, const float *values,
                         int64_t count, int64_t padded, int rows)
{
    for (int64_t c = 0; c < padded; c += 32) {
        v8 sum[3][4];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 4; i++)
                sum[r][i] = VARIANT(load)(mixed + r * padded + c + 8 * i) * VARIANT(splat)(keep[r]);
        for (int64_t j = 0; j < count; j++) {
            const float *v = values + j * padded + c;
            const v8 k[4] = {VARIANT(load)(v), VARIANT(load)(v + 8), VARIANT(load)(v + 16),
                             VARIANT(load)(v + 24)};
            for (int r = 0; r < rows; r++) {
                const v8 w = VARIANT(splat)(weights[r * BLOCK + j]);
                for (int i = 0; i < 4; i++)
                    sum[r][i] = VARIANT(madd)(w, k[i], sum[r][i]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 4; i++)
                VARIANT(store)(mixed + r * padded + c + 8 * i, sum[r][i]);
    }
}

/* Turn a block's scores into weights relative to the largest score so far ("Online normalizer
 * calculation for softmax", arXiv 1805.02867). Returns what earlier sums are to be multiplied with. */
INLINE float VARIANT(weigh)(float *scores, float *most, float *total)
{
    v8 s[4], top = VARIANT(load)(scores);
    for (int i = 0; i < 4; i++) {
        s[i] = VARIANT(load)(scores + 8 * i);
        top = VARIANT(max)(top, s[i]);
    }
    const float before = *most, block = VARIANT(largest)(top), now = before > block ? before : block;
    if (now == -INFINITY) { /* nothing visible yet */
        memset(scores, 0, BLOCK * sizeof *scores);
        return 1;
    }
    for (int i = 0; i < 4; i++) {
        s[i] = VARIANT(exp)(s[i] - VARIANT(splat)(now));
        VARIANT(store)(scores + 8 * i, s[i]);
    }
    const float keep = VARIANT(exp)(VARIANT(splat)(before - now))[0];
    *most = now;
    *total = *total * keep + VARIANT(sum)((s[0] + s[1]) + (s[2] + s[3]));
    return keep;
}

INLINE void VARIANT(attend_rows)(const work *w, state *t, const tile *b, int64_t r, int rows)
{
    float scores[3 * BLOCK], keep[3];
    VARIANT(score)(t->queries + r * w->head_dim, w->head_dim, b->keys, scores, rows);
    for (int i = 0; i < rows; i++) {
        mask(w, b, t->first_position + (r + i) / w->group_heads, scores + i * BLOCK);
        keep[i] = VARIANT(weigh)(scores + i * BLOCK, &t->most[r + i], &t->total[r + i]);
    }
    VARIANT(mix)(t->mixed + r * w->padded, keep, scores, b->values, b->count, w->padded, rows);
}

/* Let all queries of a state attend to one block. */
static void VARIANT(attend)(const work *w, state *t, const tile *b)
{
    int64_t r = 0;
    for (; r + 3 <= t->rows; r += 3)
        VARIANT(attend_rows)(w, t, b, r, 3);
    if (t->rows - r == 2)
        VARIANT(attend_rows)(w, t, b, r, 2);
    else if (t->rows - r == 1)
        VARIANT(attend_rows)(w, t, b, r, 1);
}
