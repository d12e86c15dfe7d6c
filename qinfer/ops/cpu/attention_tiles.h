/* The arithmetic of attention on tiles of one block; included for each variant, behind vectors.h.
 *
 * A tile is a block's keys [head_dim][BLOCK] or values [BLOCK][padded head_dim] of one head, in fp32 or as they
 * are stored.
 */

/* 8 numbers of `bits` bits from number i on; codes of 8 bits stay codes. */
INLINE v8 VARIANT(load_as)(const void *from, int64_t i, int bits)
{
    return bits == 8    ? VARIANT(load_int8)((const int8_t *)from + i)
           : bits == 16 ? VARIANT(load_fp16)((const uint16_t *)from + i)
                        : VARIANT(load)((const float *)from + i);
}

/* The 32 tokens of keys, or 32 values of a token, from a row of 16-bit floats. */
INLINE void VARIANT(widen_fp16)(float *to, const uint16_t *from)
{
    for (int i = 0; i < BLOCK; i += 8)
        VARIANT(store)(to + i, VARIANT(load_fp16)(from + i));
}

/* Codes at 8 bits stay codes: scores and weights are multiplied with their scales. */
INLINE void VARIANT(widen_int8)(float *to, const int8_t *from)
{
    for (int i = 0; i < BLOCK; i += 8)
        VARIANT(store)(to + i, VARIANT(load_int8)(from + i));
}

INLINE void VARIANT(widen_int4)(float *to, const uint8_t *from, float scale, float minimum)
{
    const v8 s = VARIANT(splat)(scale), m = VARIANT(splat)(minimum);
    for (int i = 0; i < 4; i++)
        VARIANT(store)(to + 8 * i, VARIANT(load_nibbles)(from + 8 * (i % 2), i / 2) * s + m);
}

static void VARIANT(load_keys)(const side *s, int64_t at, int64_t head_dim, float *to)
{
    for (int64_t d = 0; d < head_dim; d++) {
        const int64_t row = at * head_dim + d;
        switch (s->bits) {
        case 32: memcpy(to + d * BLOCK, (const float *)s->data + row * BLOCK, 4 * BLOCK); break;
        case 16: VARIANT(widen_fp16)(to + d * BLOCK, (const uint16_t *)s->data + row * BLOCK); break;
        case 8: VARIANT(widen_int8)(to + d * BLOCK, (const int8_t *)s->data + row * BLOCK); break;
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
        for (; c + 8 <= n; c += 8)
            VARIANT(store)(to + c, VARIANT(load_int8)(from + c));
        for (; c < n; c++)
            to[c] = from[c];
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

/* ---- blocks that are not stored yet, and storing them ---- */

static void VARIANT(halve)(const float *from, int64_t n, uint16_t *to)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        VARIANT(store_fp16)(to + i, VARIANT(load)(from + i));
    for (; i < n; i++)
        to[i] = to_fp16(from[i]);
}

static void VARIANT(widen)(const uint16_t *from, int64_t n, float *to)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        VARIANT(store)(to + i, VARIANT(load_fp16)(from + i));
    for (; i < n; i++)
        to[i] = from_fp16(from[i]);
}

/* Fill a tile with a block that is not stored yet, in 16 bits; rows of values are `stride` apart. */
static void VARIANT(load_open)(const side *s, const source *from, int64_t first, int64_t count, int64_t stride,
                               float *to)
{
    const int64_t n = s->head_dim, old = smaller(larger(from->start - first, 0), count);
    uint16_t half[MAX_HEAD_DIM];
    float row[MAX_HEAD_DIM];
    for (int64_t c = 0; s->is_keys && old && c < n; c++)
        VARIANT(widen_fp16)(to + c * BLOCK, from->open + c * BLOCK);
    for (int64_t j = 0; !s->is_keys && j < old; j++)
        VARIANT(widen)(from->open + j * n, n, to + j * stride);
    for (int64_t j = old; j < count; j++) {
        VARIANT(halve)(new_at(from, first + j), n, half);
        VARIANT(widen)(half, n, s->is_keys ? row : to + j * stride);
        for (int64_t c = 0; s->is_keys && c < n; c++)
            to[c * BLOCK + j] = row[c];
    }
}

/* Write new tokens to a block of 16 or 32 bits. */
static void VARIANT(write_rows)(const side *s, const source *from, void *block, int64_t first, int64_t end)
{
    const int64_t n = s->head_dim;
    uint16_t half[MAX_HEAD_DIM];
    for (int64_t p = first; p < end; p++) {
        const float *x = new_at(from, p);
        const int64_t j = p % BLOCK;
        VARIANT(halve)(x, n, half);
        if (s->is_keys && s->bits == 32)
            for (int64_t c = 0; c < n; c++)
                ((float *)block)[c * BLOCK + j] = x[c];
        else if (s->is_keys)
            for (int64_t c = 0; c < n; c++)
                ((uint16_t *)block)[c * BLOCK + j] = half[c];
        else if (s->bits == 32)
            memcpy((float *)block + j * n, x, (size_t)n * sizeof *x);
        else
            memcpy((uint16_t *)block + j * n, half, (size_t)n * sizeof *half);
    }
}

/* 8 scales in 16 bits of which 127 are the largest values, and the scales as they are read. */
INLINE v8 VARIANT(store_scales)(uint16_t *to, v8 most)
{
    VARIANT(store_fp16)(to, most / 127.f);
    return VARIANT(load_fp16)(to);
}

/* x / scale to the nearest, at most 127 in size; 0 for a scale that is 0 or NaN. */
INLINE v8i VARIANT(codes)(v8 x, v8 scale)
{
    const v8 shift = VARIANT(splat)(0x1.8p23f), most = VARIANT(splat)(127);
    v8 y = x / scale;
    y = VARIANT(select)(y > most, most, VARIANT(select)(y < -most, -most, y));
    return ((v8i)(y + shift) - (v8i)shift) & (scale > VARIANT(splat)(0));
}

/* Quantize a block's keys [head_dim][BLOCK] at 8 bits, a scale per token. It is NaN where a value is. */
static void VARIANT(seal_keys)(const side *s, const float *x, int64_t at)
{
    int8_t *codes = (int8_t *)s->data + at * BLOCK * s->head_dim;
    const v8i sign = VARIANT(splat_int)(INT32_MAX);
    for (int i = 0; i < BLOCK; i += 8) {
        v8 most = VARIANT(splat)(0);
        for (int64_t c = 0; c < s->head_dim; c++)
            most = VARIANT(max)((v8)((v8i)VARIANT(load)(x + c * BLOCK + i) & sign), most);
        const v8 scale = VARIANT(store_scales)(s->scale + at * BLOCK + i, most);
        for (int64_t c = 0; c < s->head_dim; c++)
            VARIANT(store_int8)(codes + c * BLOCK + i, VARIANT(codes)(VARIANT(load)(x + c * BLOCK + i), scale));
    }
}

/* The same of values [BLOCK][stride], with zeros behind each row. */
static void VARIANT(seal_values)(const side *s, const float *x, int64_t stride, int64_t at)
{
    int8_t *codes = (int8_t *)s->data + at * BLOCK * s->head_dim, row[MAX_HEAD_DIM];
    const v8i sign = VARIANT(splat_int)(INT32_MAX);
    for (int64_t j = 0; j < BLOCK; j++, x += stride, codes += s->head_dim) {
        uint16_t scales[8];
        v8 most = VARIANT(splat)(0);
        for (int64_t c = 0; c < s->head_dim; c += 8)
            most = VARIANT(max)((v8)((v8i)VARIANT(load)(x + c) & sign), most);
        const v8 scale = VARIANT(store_scales)(scales, VARIANT(splat)(VARIANT(largest)(most)));
        s->scale[at * BLOCK + j] = scales[0];
        for (int64_t c = 0; c < s->head_dim; c += 8)
            VARIANT(store_int8)(row + c, VARIANT(codes)(VARIANT(load)(x + c), scale));
        memcpy(codes, row, (size_t)s->head_dim);
    }
}

/* Quantize a block that is full: keys at 4 bits per channel, values in groups of a token's channels. */
static void VARIANT(seal)(const side *s, const source *from, int64_t at, int64_t first)
{
    const int64_t stride = (s->head_dim + 7) / 8 * 8, size = s->is_keys ? BLOCK : s->group;
    const int64_t groups = s->head_dim / (s->is_keys ? 1 : size);
    float x[BLOCK * MAX_HEAD_DIM];
    memset(x, 0, (size_t)(BLOCK * stride) * sizeof *x);
    VARIANT(load_open)(s, from, first, BLOCK, stride, x);
    if (s->bits == 8 && s->is_keys)
        VARIANT(seal_keys)(s, x, at);
    else if (s->bits == 8)
        VARIANT(seal_values)(s, x, stride, at);
    else
        for (int64_t j = 0; j < (s->is_keys ? 1 : BLOCK); j++)
            for (int64_t g = 0; g < groups; g++) {
                const int64_t to = (s->is_keys ? at : at * BLOCK + j) * groups + g;
                quantize_int4(x + j * stride + g * size, size, (uint8_t *)s->data + to * size / 2,
                              s->scale + to, s->minimum + to);
            }
}

/* ---- queries ---- */

/* Scores of `rows` queries with a block's 32 keys, each a sum over the channels in their order. */
INLINE void VARIANT(score)(const float *q, int64_t head_dim, const void *keys, float *scores, int rows, int bits)
{
    v8 sum[3][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++)
            sum[r][i] = VARIANT(splat)(0);
    for (int64_t d = 0; d < head_dim; d++) {
        v8 x[3];
        for (int r = 0; r < rows; r++)
            x[r] = VARIANT(splat)(q[r * head_dim + d]);
        for (int i = 0; i < 4; i++) {
            const v8 k = VARIANT(load_as)(keys, d * BLOCK + 8 * i, bits);
            for (int r = 0; r < rows; r++)
                sum[r][i] = VARIANT(madd)(x[r], k, sum[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++)
            VARIANT(store)(scores + r * BLOCK + 8 * i, sum[r][i]);
}

/* mixed = mixed * keep + weights · values, 32 channels at a time, the tokens in their order. */
INLINE void VARIANT(mix)(float *mixed, const float *keep, const float *weights, const void *values,
                         int64_t count, int64_t padded, int rows, int bits)
{
    for (int64_t c = 0; c < padded; c += 32) {
        v8 sum[3][4];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 4; i++)
                sum[r][i] = VARIANT(load)(mixed + r * padded + c + 8 * i) * VARIANT(splat)(keep[r]);
        for (int64_t j = 0; j < count; j++) {
            v8 w[3];
            for (int r = 0; r < rows; r++)
                w[r] = VARIANT(splat)(weights[r * BLOCK + j]);
            for (int i = 0; i < 4; i++) {
                const v8 v = VARIANT(load_as)(values, j * padded + c + 8 * i, bits);
                for (int r = 0; r < rows; r++)
                    sum[r][i] = VARIANT(madd)(w[r], v, sum[r][i]);
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
    v8 s[4];
    for (int i = 0; i < 4; i++)
        s[i] = VARIANT(load)(scores + 8 * i);
    const float before = *most;
    const float block = VARIANT(largest)(VARIANT(max)(VARIANT(max)(s[0], s[1]), VARIANT(max)(s[2], s[3])));
    const float now = before > block ? before : block;
    if (now == -INFINITY) { /* nothing visible yet */
        memset(scores, 0, BLOCK * sizeof *scores);
        return 1;
    }
    for (int i = 0; i < 4; i++) {
        s[i] = VARIANT(exp)(s[i] - VARIANT(splat)(now));
        VARIANT(store)(scores + 8 * i, s[i]);
    }
    const float keep = before == now ? 1 : VARIANT(exp)(VARIANT(splat)(before - now))[0];
    *most = now;
    VARIANT(store)(total, VARIANT(load)(total) * VARIANT(splat)(keep) + ((s[0] + s[1]) + (s[2] + s[3])));
    return keep;
}

INLINE void VARIANT(rescale)(float *scores, const uint16_t *scales)
{
    for (int i = 0; scales && i < BLOCK; i += 8)
        VARIANT(store)(scores + i, VARIANT(load)(scores + i) * VARIANT(load_fp16)(scales + i));
}

/* softcap · tanh(score / softcap), by e^x so that large scores do not overflow. */
INLINE void VARIANT(cap)(float *scores, float softcap)
{
    const v8 one = VARIANT(splat)(1), twice = VARIANT(splat)(2 / softcap), most = VARIANT(splat)(softcap);
    for (int i = 0; i < BLOCK; i += 8) {
        const v8 power = VARIANT(exp)(VARIANT(load)(scores + i) * twice);
        VARIANT(store)(scores + i, most * (one - (one + one) / (power + one)));
    }
}

INLINE void VARIANT(attend_rows)(const work *w, const state *t, const tile *b, const sums *s, int64_t r, int rows)
{
    float scores[3 * BLOCK], keep[3];
    const int64_t first = t->first_position + r / w->group_heads;
    const int64_t last = t->first_position + (r + rows - 1) / w->group_heads;
    const float *q = t->queries + r * w->head_dim;
    switch (b->key_bits) {
    case 8: VARIANT(score)(q, w->head_dim, b->keys, scores, rows, 8); break;
    case 16: VARIANT(score)(q, w->head_dim, b->keys, scores, rows, 16); break;
    default: VARIANT(score)(q, w->head_dim, b->keys, scores, rows, 32);
    }
    const int hides = !sees_all(w, b, first, last);
    for (int i = 0; i < rows; i++) {
        VARIANT(rescale)(scores + i * BLOCK, b->key_scales);
        if (w->c->softcap > 0)
            VARIANT(cap)(scores + i * BLOCK, w->c->softcap);
        if (hides)
            hide(w, b, t->first_position + (r + i) / w->group_heads, scores + i * BLOCK);
        keep[i] = VARIANT(weigh)(scores + i * BLOCK, s->most + r + i, s->total + 8 * (r + i));
        VARIANT(rescale)(scores + i * BLOCK, b->value_scales);
    }
    float *mixed = s->mixed + r * w->padded;
    switch (b->value_bits) {
    case 8: VARIANT(mix)(mixed, keep, scores, b->values, b->count, w->padded, rows, 8); break;
    case 16: VARIANT(mix)(mixed, keep, scores, b->values, b->count, w->padded, rows, 16); break;
    default: VARIANT(mix)(mixed, keep, scores, b->values, b->count, w->padded, rows, 32);
    }
}

/* Let all queries of a state attend to one block. */
static void VARIANT(attend)(const work *w, const state *t, const tile *b, const sums *s)
{
    int64_t r = 0;
    for (; r + 3 <= t->rows; r += 3)
        VARIANT(attend_rows)(w, t, b, s, r, 3);
    if (t->rows - r == 2)
        VARIANT(attend_rows)(w, t, b, s, r, 2);
    else if (t->rows - r == 1)
        VARIANT(attend_rows)(w, t, b, s, r, 1);
}

/* to = to * a + from * b */
INLINE void VARIANT(blend)(float *to, float a, const float *from, float b, int64_t size)
{
    for (int64_t i = 0; i < size; i += 8)
        VARIANT(store)(to + i, VARIANT(madd)(VARIANT(load)(from + i), VARIANT(splat)(b),
                                             VARIANT(load)(to + i) * VARIANT(splat)(a)));
}

/* Add the sums of the next span. */
static void VARIANT(join)(const work *w, int64_t rows, const sums *all, const sums *next)
{
    for (int64_t r = 0; r < rows; r++) {
        const float before = all->most[r], after = next->most[r], now = before > after ? before : after;
        if (after == -INFINITY) /* nothing visible there */
            continue;
        const v8 keep = VARIANT(exp)((v8){before - now, after - now});
        all->most[r] = now;
        VARIANT(blend)(all->mixed + r * w->padded, keep[0], next->mixed + r * w->padded, keep[1], w->padded);
        VARIANT(blend)(all->total + r * 8, keep[0], next->total + r * 8, keep[1], 8);
    }
}
