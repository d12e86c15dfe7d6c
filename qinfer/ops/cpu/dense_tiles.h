/* The arithmetic of dense and NF4 weights; included for each variant, behind vectors.h. */

/* scale * code[i] of the upper nibbles of 16 bytes, and then of the lower ones. */
INLINE void VARIANT(look_up)(const float *code, v8 scale, const uint8_t *nibbles, v8 to[4])
{
#ifdef VARIANT_IS_AVX2 /* permutations of the lower and upper 8 entries, chosen by bit 3 */
    const __m256 low = _mm256_loadu_ps(code), high = _mm256_loadu_ps(code + 8);
    for (int i = 0; i < 2; i++) {
        const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(nibbles + 8 * i)));
        const __m256i first = _mm256_srli_epi32(bytes, 4);
        const __m256 a = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, first),
                                          _mm256_permutevar8x32_ps(high, first),
                                          _mm256_castsi256_ps(_mm256_slli_epi32(bytes, 24)));
        const __m256 b = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, bytes),
                                          _mm256_permutevar8x32_ps(high, bytes),
                                          _mm256_castsi256_ps(_mm256_slli_epi32(bytes, 28)));
        to[i] = scale * (v8)a;
        to[2 + i] = scale * (v8)b;
    }
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 8; j++) {
            const uint8_t byte = nibbles[i % 2 * 8 + j];
            to[i][j] = scale[j] * code[i < 2 ? byte >> 4 : byte & 15];
        }
#endif
}

/* The 32 weights of a run of a row, whose bytes are at `data`. */
INLINE void VARIANT(unpack)(const weight *w, const uint8_t *data, int64_t row, int64_t run, v8 to[4], int kind)
{
    if (kind == NF4) { /* groups are powers of two */
        const int64_t group = (row * w->columns + run * RUN) >> __builtin_ctzll((uint64_t)w->group);
        VARIANT(look_up)(w->code, VARIANT(splat)(w->absmax[group]), data, to);
        return;
    }
    for (int i = 0; i < 4; i++)
        to[i] = kind == FP32   ? VARIANT(load)((const float *)data + 8 * i)
                : kind == FP16 ? VARIANT(load_fp16)((const uint16_t *)data + 8 * i)
                               : VARIANT(load_bf16)((const uint16_t *)data + 8 * i);
}

/* ---- a few tokens: weights are read once, and unpacked in registers ---- */

INLINE void VARIANT(add_run)(const v8 weights[4], const float *x, int64_t stride, v8 *sums, int tokens)
{
    for (int i = 0; i < 4; i++)
        for (int t = 0; t < tokens; t++)
            sums[t] = VARIANT(madd)(weights[i], VARIANT(load)(x + t * stride + 8 * i), sums[t]);
}

/* The products of ROWS rows with some tokens. */
INLINE void VARIANT(few_tile)(const weight *w, int64_t row, const input *x, int64_t token,
                              float (*out)[GRAIN], int kind, int tokens)
{
    const int64_t stride = x->runs * RUN, bytes = run_bytes(kind);
    const float *from = x->floats + token * stride;
    const uint8_t *data = runs_at(w, row, 0);
    v8 sums[ROWS][TOKENS];
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < tokens; t++)
            sums[r][t] = VARIANT(splat)(0);
    for (int64_t run = 0; run < x->runs; run++, from += RUN, data += ROWS * bytes) {
        for (int64_t line = 0; line < ROWS * bytes; line += 64)
            __builtin_prefetch(data + BYTES_AHEAD + line);
        for (int r = 0; r < ROWS; r++) {
            v8 weights[4];
            /* behind the last row there are zeros, without a scale of their own */
            VARIANT(unpack)(w, data + r * bytes, smaller(row + r, w->rows - 1), run, weights, kind);
            VARIANT(add_run)(weights, from, stride, sums[r], tokens);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < tokens; t++)
            out[t][r] = VARIANT(sum)(sums[r][t]);
}

INLINE void VARIANT(few_of_kind)(const product *p, const input *x, int64_t row, int64_t count, int kind)
{
    float sums[FEW_TOKENS][GRAIN];
    for (int64_t r = 0; r < count; r += ROWS)
        for (int64_t t = 0; t < x->tokens; t += TOKENS) {
            float(*out)[GRAIN] = (float(*)[GRAIN])(sums[t] + r);
            switch (x->tokens - t) {
            case 1: VARIANT(few_tile)(p->w, row + r, x, t, out, kind, 1); break;
            case 2: VARIANT(few_tile)(p->w, row + r, x, t, out, kind, 2); break;
            default: VARIANT(few_tile)(p->w, row + r, x, t, out, kind, TOKENS);
            }
        }
    put(p, 0, row, count, x->tokens, sums);
}

static void VARIANT(few_tokens)(const product *p, const input *x, int64_t row, int64_t count)
{
    switch (p->w->kind) {
    case NF4: VARIANT(few_of_kind)(p, x, row, count, NF4); break;
    case BF16: VARIANT(few_of_kind)(p, x, row, count, BF16); break;
    case FP16: VARIANT(few_of_kind)(p, x, row, count, FP16); break;
    default: VARIANT(few_of_kind)(p, x, row, count, FP32);
    }
}

/* ---- many tokens: weights are unpacked to the first cache ---- */

INLINE void VARIANT(unpack_rows)(const weight *w, int64_t row, int64_t count, int64_t first, int64_t runs,
                                 float (*to)[CHUNK_RUNS * RUN], int kind)
{
    const int64_t bytes = run_bytes(kind);
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *data = runs_at(w, row + r / ROWS * ROWS, first) + r % ROWS * bytes;
        for (int64_t run = 0; run < runs; run++, data += ROWS * bytes) {
            v8 weights[4];
            VARIANT(unpack)(w, data, row + r, first + run, weights, kind);
            for (int i = 0; i < 4; i++)
                VARIANT(store)(to[r] + run * RUN + 8 * i, weights[i]);
        }
    }
}

static void VARIANT(unpack_chunk)(const weight *w, int64_t row, int64_t count, int64_t first, int64_t runs,
                                  float (*to)[CHUNK_RUNS * RUN])
{
    switch (w->kind) {
    case NF4: VARIANT(unpack_rows)(w, row, count, first, runs, to, NF4); break;
    case BF16: VARIANT(unpack_rows)(w, row, count, first, runs, to, BF16); break;
    case FP16: VARIANT(unpack_rows)(w, row, count, first, runs, to, FP16); break;
    default: VARIANT(unpack_rows)(w, row, count, first, runs, to, FP32);
    }
}

/* Add a chunk's products of ROWS rows with some tokens to their sums. */
INLINE void VARIANT(many_tile)(float (*weights)[CHUNK_RUNS * RUN], int64_t columns, const float *x,
                               int64_t stride, v8 (*sums)[GRAIN], int tokens)
{
    v8 s[ROWS][TOKENS];
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < tokens; t++)
            s[r][t] = sums[t][r];
    for (int64_t k = 0; k < columns; k += 8) {
        v8 a[TOKENS];
        for (int t = 0; t < tokens; t++)
            a[t] = VARIANT(load)(x + t * stride + k);
        for (int r = 0; r < ROWS; r++) {
            const v8 w = VARIANT(load)(weights[r] + k);
            for (int t = 0; t < tokens; t++)
                s[r][t] = VARIANT(madd)(w, a[t], s[r][t]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < tokens; t++)
            sums[t][r] = s[r][t];
}

static void VARIANT(many_tokens)(const product *p, const input *x, int64_t token, int64_t row, int64_t count)
{
    const int64_t stride = x->runs * RUN, tokens = smaller(DENSE_SWEEP, x->tokens - token);
    float out[DENSE_SWEEP][GRAIN];
    v8 sums[DENSE_SWEEP][GRAIN];
    chunk c;
    memset(c, 0, sizeof c);
    memset(sums, 0, sizeof sums);
    const int64_t chunks = (x->runs + CHUNK_RUNS - 1) / CHUNK_RUNS, step = (x->runs + chunks - 1) / chunks;
    for (int64_t first = 0; first < x->runs; first += step) {
        const int64_t runs = smaller(step, x->runs - first), columns = runs * RUN;
        VARIANT(unpack_chunk)(p->w, row, count, first, runs, c);
        for (int64_t t = 0; t < tokens; t += TOKENS)
            for (int64_t r = 0; r < count; r += ROWS) {
                const float *from = x->floats + (token + t) * stride + first * RUN;
                v8(*to)[GRAIN] = (v8(*)[GRAIN])(sums[t] + r);
                switch (tokens - t) {
                case 1: VARIANT(many_tile)(c + r, columns, from, stride, to, 1); break;
                case 2: VARIANT(many_tile)(c + r, columns, from, stride, to, 2); break;
                default: VARIANT(many_tile)(c + r, columns, from, stride, to, TOKENS);
                }
            }
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < GRAIN; r += 8)
            VARIANT(store)(out[t] + r, VARIANT(sum_each)(sums[t] + r));
    put(p, token, row, count, tokens, out);
}
