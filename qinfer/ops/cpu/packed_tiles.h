/* The arithmetic of 4- and 8-bit weights; included for each variant, behind vectors.h. */

/* ---- activations ---- */

/* The unit is the one with which the largest value is INT16_MAX; NaN if a value is not finite. */
static void VARIANT(quantize_span)(const float *from, const input *x, int64_t tile, int64_t lane, int64_t span)
{
    const int64_t first = span * x->span_runs, end = smaller(first + x->span_runs, x->runs);
    const int64_t at = (tile * x->spans + span) * x->side + lane;
    int16_t *to = x->values + ((tile * x->runs + first) * x->side + lane) * RUN;
    const v8i sign = VARIANT(splat_int)(INT32_MAX);
    const int16_t ones[2] = {1, 1};
    v8 most = VARIANT(splat)(0);
    for (int64_t i = first * RUN; i < end * RUN; i += 8)
        most = VARIANT(max)((v8)((v8i)VARIANT(load)(from + i) & sign), most);
    const float largest = VARIANT(largest)(most);
    const int vanishes = !(largest >= 0x1p-100f && largest < INFINITY);
    const v8 per_unit = VARIANT(splat)(vanishes ? 0 : INT16_MAX / largest);
    v8i total = VARIANT(splat_int)(0);
    for (int64_t run = first; run < end; run++, to += x->side * RUN)
        for (int i = 0; i < RUN; i += 16) {
            const float *a = from + run * RUN + i;
            const v16s q = VARIANT(round_int16)(VARIANT(load)(a) * per_unit, VARIANT(load)(a + 8) * per_unit);
            *(v16s_in_memory *)(to + i) = vanishes ? q & 0 : q;
            total = VARIANT(dot_pairs)(total, vanishes ? q & 0 : q, ones);
        }
    x->units[at] = !vanishes ? largest / INT16_MAX : largest < INFINITY ? 0 : NAN;
    x->sums[at] = 0;
    for (int i = 0; i < 8; i++)
        x->sums[at] -= 8 * total[i];
}

static void VARIANT(quantize)(const input *x, int64_t token)
{
    const int64_t tile = token / x->side, lane = token % x->side;
    for (int64_t span = 0; span < x->spans; span++)
        VARIANT(quantize_span)(x->floats + token * x->runs * RUN, x, tile, lane, span);
}

/* ---- weights ---- */

/* The pairs of columns 4j … 4j + 3 of 16 in a run of 8 rows, in 16 bits; 4-bit ones stored + 8. */
INLINE void VARIANT(unpack)(const uint8_t *data, int j, v16s pairs[4], int kind)
{
    if (kind == INT8) {
        for (int i = 0; i < 4; i++)
            pairs[i] = VARIANT(load_16_int8)((const int8_t *)data + 16 * (4 * j + i));
        return;
    }
    const v16u v = *(const v16u_in_memory *)(data + 32 * j);
    pairs[0] = (v16s)(v & 15);
    pairs[1] = (v16s)(v >> 4 & 15);
    pairs[2] = (v16s)(v >> 8 & 15);
    pairs[3] = (v16s)(v >> 12);
}

INLINE v8 VARIANT(scales)(const weight *w, const uint8_t *from)
{
    uint16_t bits[ROWS];
    memcpy(bits, from, sizeof bits);
    return w->scale_is_fp16 ? VARIANT(load_fp16)(bits) : VARIANT(load_bf16)(bits);
}

/* The zero points behind a group's scales. */
INLINE v8i VARIANT(zeros)(const weight *w, const uint8_t *scales)
{
    int16_t points[ROWS];
    v8i wide = VARIANT(splat_int)(0);
    if (w->has_zeros) {
        memcpy(points, scales + 2 * ROWS, sizeof points);
        for (int r = 0; r < ROWS; r++)
            wide[r] = points[r];
    }
    return wide;
}

/* ---- a few tokens: weights are read once, and unpacked in registers ---- */

/* Add the products of a run to each token's. For a token alone in two sums, each of which waits for its
 * last addition. */
INLINE void VARIANT(add_run)(const uint8_t *data, const int16_t *values, v8i *dots, int kind, int tokens)
{
    const int bytes = kind == INT4 ? ROWS * RUN / 2 : ROWS * RUN;
    const int chains = tokens > 1 ? 1 : 2;
    v8i sums[2][TILE];
    for (int line = 0; line < bytes; line += 64)
        __builtin_prefetch(data + BYTES_AHEAD + line);
    for (int c = 0; c < chains; c++)
        for (int t = 0; t < tokens; t++)
            sums[c][t] = c ? VARIANT(splat_int)(0) : dots[t];
    UNROLL(4) /* or gcc keeps pairs in memory */
    for (int j = 0; j < 4; j++) {
        v16s pairs[4];
        VARIANT(unpack)(data, j, pairs, kind);
        for (int i = 0; i < 4; i++)
            for (int t = 0; t < tokens; t++)
                sums[i % chains][t] =
                    VARIANT(dot_pairs)(sums[i % chains][t], pairs[i], values + t * RUN + 8 * j + 2 * i);
    }
    for (int t = 0; t < tokens; t++)
        for (int c = 0; c < chains; c++)
            dots[t] = c ? dots[t] + sums[c][t] : sums[0][t];
}

/* Begin with what the sums of the activations, times -8, make of what weights are stored plus. */
INLINE void VARIANT(begin_span)(const int32_t *shares, v8i zeros, v8i *dots, int kind, int tokens)
{
    for (int t = 0; t < tokens; t++)
        dots[t] = kind == INT4 ? VARIANT(splat_int)(shares[t]) : zeros * VARIANT(splat_int)(shares[t] >> 3);
}

INLINE void VARIANT(end_span)(const v8i *dots, v8 scale, const float *units, v8 *sums, int tokens)
{
    for (int t = 0; t < tokens; t++)
        sums[t] = VARIANT(fused)(__builtin_convertvector(dots[t], v8), scale * VARIANT(splat)(units[t]),
                                 sums[t]);
}

/* The products of a block of rows with as many tokens as lie side by side. With `one` a run is a group. */
INLINE void VARIANT(few_tile)(const weight *w, const layout *l, const uint8_t *data, const input *x,
                              int64_t token, float *out, int kind, int tokens, int one)
{
    const int64_t runs = l->runs, group_runs = l->runs_a_group, span_runs = x->span_runs;
    const int64_t bytes = kind == INT4 ? ROWS * RUN / 2 : ROWS * RUN;
    const int16_t *values = x->values + place_of(x, token, runs, 0) * RUN;
    const float *units = x->units + place_of(x, token, x->spans, 0);
    const int32_t *shares = x->sums + place_of(x, token, x->spans, 0);
    v8 sums[TILE];
    v8i dots[TILE];
    for (int t = 0; t < tokens; t++)
        sums[t] = VARIANT(splat)(0);
    for (int64_t run = 0; one && run < runs; run++, data += bytes + 2 * ROWS, values += tokens * RUN) {
        VARIANT(begin_span)(shares + run * tokens, VARIANT(splat_int)(0), dots, kind, tokens);
        VARIANT(add_run)(data, values, dots, kind, tokens);
        VARIANT(end_span)(dots, VARIANT(scales)(w, data + bytes), units + run * tokens, sums, tokens);
    }
    for (int64_t run = 0; !one && run < runs; data += l->tail_bytes) {
        const int64_t group_end = run + group_runs;
        const v8 scale = VARIANT(scales)(w, data + group_runs * bytes);
        const v8i zeros = VARIANT(zeros)(w, data + group_runs * bytes);
        for (; run < group_end; units += tokens, shares += tokens) {
            const int64_t end = smaller(run + span_runs, group_end);
            VARIANT(begin_span)(shares, zeros, dots, kind, tokens);
            for (; run < end; run++, data += bytes, values += tokens * RUN)
                VARIANT(add_run)(data, values, dots, kind, tokens);
            VARIANT(end_span)(dots, scale, units, sums, tokens);
        }
    }
    for (int t = 0; t < tokens; t++)
        VARIANT(store)(out + t * GRAIN, sums[t]);
}

INLINE void VARIANT(few_of_kind)(const product *p, const input *x, int64_t row, int64_t count, int kind,
                                 int one)
{
    const layout l = layout_of(p->w);
    const uint8_t *data = p->w->data + row / ROWS * l.block_bytes;
    float sums[PACKED_FEW][GRAIN];
    for (int64_t r = 0; r < count; r += ROWS, data += l.block_bytes)
        for (int64_t t = 0; t < x->tokens; t += TILE)
            switch (x->side) {
            case 1: VARIANT(few_tile)(p->w, &l, data, x, t, sums[t] + r, kind, 1, one); break;
            case 2: VARIANT(few_tile)(p->w, &l, data, x, t, sums[t] + r, kind, 2, one); break;
            case 3: VARIANT(few_tile)(p->w, &l, data, x, t, sums[t] + r, kind, 3, one); break;
            default: VARIANT(few_tile)(p->w, &l, data, x, t, sums[t] + r, kind, TILE, one);
            }
    put(p, 0, row, count, x->tokens, sums);
}

static void VARIANT(few_tokens)(const product *p, const input *x, int64_t row, int64_t count)
{
    if (p->w->kind == INT8)
        VARIANT(few_of_kind)(p, x, row, count, INT8, 0);
    else if (p->w->group == RUN)
        VARIANT(few_of_kind)(p, x, row, count, INT4, 1);
    else
        VARIANT(few_of_kind)(p, x, row, count, INT4, 0);
}

/* ---- many tokens: weights are unpacked to the first cache, and 16 rows share an activation ---- */

static void VARIANT(unpack_half)(const weight *w, const layout *l, const uint8_t *block, int64_t first,
                                 int64_t runs, int64_t span_runs, chunk *to, int half)
{
    const v16s zero = (v16s){0} + (int16_t)(w->kind == INT4 ? 8 : 0);
    for (int64_t run = first; run < first + runs; run++) {
        const int64_t group = run / l->runs_a_group, at = run - first;
        const uint8_t *data = block + run * l->run_bytes + group * l->tail_bytes;
        for (int j = 0; j < 4; j++) {
            v16s pairs[4];
            VARIANT(unpack)(data, j, pairs, w->kind);
            for (int i = 0; i < 4; i++)
                *(v16s_in_memory *)to->pairs[at * RUN / 2 + 4 * j + i][half] = pairs[i] - zero;
        }
        if (at % span_runs == 0) {
            const int64_t end = (group + 1) * l->runs_a_group;
            const uint8_t *scales = block + end * l->run_bytes + group * l->tail_bytes;
            const v8i zeros = VARIANT(zeros)(w, scales);
            VARIANT(store)(to->scales[at / span_runs][half], VARIANT(scales)(w, scales));
            memcpy(to->zeros[at / span_runs][half], &zeros, sizeof zeros);
        }
    }
}

static void VARIANT(unpack_chunk)(const product *p, const layout *l, int64_t row, int64_t count,
                                  int64_t first, int64_t runs, int64_t span_runs, chunk *to)
{
    const uint8_t *block = p->w->data + row / ROWS * l->block_bytes;
    for (int half = 0; half < 2; half++, block += l->block_bytes)
        if (half * ROWS < count)
            VARIANT(unpack_half)(p->w, l, block, first, runs, span_runs, to, half);
}

/* Add the products of a chunk with some tokens to their sums. */
static void VARIANT(many_tile)(const chunk *c, int64_t first, int64_t runs, const input *x, int64_t token,
                               float (*sums)[GRAIN])
{
    const int16_t *values = x->values + place_of(x, token, x->runs, first) * RUN;
    const int64_t place = place_of(x, token, x->spans, first / x->span_runs);
    const float *units = x->units + place;
    const int32_t *shares = x->sums + place;
    const int16_t(*pairs)[2][2 * ROWS] = c->pairs;
    for (int64_t run = 0, span = 0; run < runs; span++, units += WIDE_TILE, shares += WIDE_TILE) {
        const int64_t end = smaller(run + x->span_runs, runs);
        v8i a[WIDE_TILE], b[WIDE_TILE];
        for (int t = 0; t < WIDE_TILE; t++)
            a[t] = b[t] = VARIANT(splat_int)(0);
        if (c->has_zeros) {
            v8i zeros[2];
            memcpy(zeros, c->zeros[span], sizeof zeros);
            VARIANT(begin_span)(shares, zeros[0], a, INT8, WIDE_TILE);
            VARIANT(begin_span)(shares, zeros[1], b, INT8, WIDE_TILE);
        }
        for (; run < end; run++, values += WIDE_TILE * RUN)
            UNROLL(16)
            for (int i = 0; i < RUN / 2; i++, pairs++) {
                const v16s w = *(const v16s_in_memory *)pairs[0][0], v = *(const v16s_in_memory *)pairs[0][1];
                for (int t = 0; t < WIDE_TILE; t++) {
                    a[t] = VARIANT(dot_pairs)(a[t], w, values + t * RUN + 2 * i);
                    b[t] = VARIANT(dot_pairs)(b[t], v, values + t * RUN + 2 * i);
                }
            }
        const v8 low = VARIANT(load)(c->scales[span][0]), high = VARIANT(load)(c->scales[span][1]);
        for (int t = 0; t < WIDE_TILE; t++) {
            const v8 unit = VARIANT(splat)(units[t]);
            float *to = sums[t];
            const v8 x = __builtin_convertvector(a[t], v8), y = __builtin_convertvector(b[t], v8);
            VARIANT(store)(to, VARIANT(fused)(x, low * unit, VARIANT(load)(to)));
            VARIANT(store)(to + 8, VARIANT(fused)(y, high * unit, VARIANT(load)(to + 8)));
        }
    }
}

static void VARIANT(many_tokens)(const product *p, const input *x, int64_t token, int64_t row, int64_t count)
{
    const layout l = layout_of(p->w);
    const int64_t tokens = smaller(PACKED_SWEEP, x->tokens - token);
    float sums[PACKED_SWEEP][GRAIN];
    chunk c;
    if (count <= ROWS)
        memset(&c, 0, sizeof c);
    c.has_zeros = p->w->has_zeros;
    memset(sums, 0, sizeof sums);
    const int64_t chunks = (l.runs + CHUNK_RUNS - 1) / CHUNK_RUNS;
    const int64_t step = ((l.runs + chunks - 1) / chunks + 3) / 4 * 4; /* of whole spans */
    for (int64_t first = 0; first < l.runs; first += step) {
        const int64_t runs = smaller(step, l.runs - first);
        VARIANT(unpack_chunk)(p, &l, row, count, first, runs, x->span_runs, &c);
        for (int64_t t = 0; t < tokens; t += WIDE_TILE)
            VARIANT(many_tile)(&c, first, runs, x, token + t, sums + t);
    }
    put(p, token, row, count, tokens, sums);
}
