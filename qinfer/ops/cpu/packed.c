/* Products with 4- and 8-bit weights that are repacked once so that a vector holds 8 rows.
 *
 * Activations are rounded to 16 bits, 32 of them sharing a power of two as their unit, at most 2^-15 of the
 * largest: less than 16-bit weights can tell. Products are then summed in integers, so exactly, per run of 32
 * columns, and the runs in fp32 in their order. A result depends neither on the other rows and tokens,
 * nor on the number of threads, nor on the processor's variant.
 *
 * A block of 8 rows is, per group of columns, its runs and then 8 scales of 16 bits. A run at 4 bits is
 * four vectors of 8 dwords: dword r of vector j has row r's columns 8j … 8j + 7, stored + 8, in nibbles of
 * the order 0 2 4 6 1 3 5 7, so that a shift and a mask give pairs of neighbours in 16 bits each. At 8
 * bits it is 16 half vectors: bytes 2r and 2r + 1 of number p are row r's columns 2p and 2p + 1.
 */
#include "packed.h"
#include "pool.h"
#include "variants.h"

#include <math.h>
#include <stdlib.h>

enum { RUN = 32, ROWS = 8, TILE = 4, LEAST_BLOCKS = 2, QUANTIZED_FLOATS = 1 << 14 };

static int64_t run_bytes(const packed *w) { return w->bits == 4 ? ROWS * RUN / 2 : ROWS * RUN; }

static int64_t block_bytes(const packed *w)
{
    return w->runs * run_bytes(w) + w->runs / w->runs_a_group * 2 * ROWS;
}

int64_t qinfer_packed_bytes(const packed *w) { return (w->rows + ROWS - 1) / ROWS * block_bytes(w); }

/* ---- repacking ---- */

/* Nibbles 0 … 7 in the order 0 2 4 6 1 3 5 7. */
static uint32_t even_then_odd(uint32_t x)
{
    uint32_t even = x & 0x0f0f0f0f, odd = x >> 4 & 0x0f0f0f0f;
    even = (even | even >> 4) & 0x00ff00ff;
    odd = (odd | odd >> 4) & 0x00ff00ff;
    return ((even | even >> 8) & 0xffff) | (odd | odd >> 8) << 16;
}

/* A row's place r in a run, from the disk's bytes; what is beyond the columns is zero. */
static void pack_run(const packed *w, const uint8_t *from, int64_t columns, int64_t r, uint8_t *to)
{
    uint8_t bytes[RUN];
    memset(bytes, w->bits == 4 ? 0x88 : 0x80, sizeof bytes);
    memcpy(bytes, from, (size_t)(w->bits == 4 ? (columns + 1) / 2 : columns));
    if (w->bits == 4) {
        if (columns % 2)
            bytes[columns / 2] = (bytes[columns / 2] & 15) | 0x80;
        for (int j = 0; j < 4; j++) {
            uint32_t x;
            memcpy(&x, bytes + 4 * j, sizeof x);
            x = even_then_odd(x);
            memcpy(to + 32 * j + 4 * r, &x, sizeof x);
        }
        return;
    }
    for (int p = 0; p < RUN / 2; p++) {
        to[16 * p + 2 * r] = bytes[2 * p] ^ 0x80;
        to[16 * p + 2 * r + 1] = bytes[2 * p + 1] ^ 0x80;
    }
}

typedef struct {
    const packed *w;
    const uint8_t *data;
    const uint16_t *scale;
    int64_t row_bytes;
} repacking;

static void pack_block(const void *job, int64_t block)
{
    const repacking *j = job;
    const packed *w = j->w;
    const int64_t groups = w->runs / w->runs_a_group, bytes = run_bytes(w);
    uint8_t *to = w->data + block * block_bytes(w);
    memset(to, 0, (size_t)block_bytes(w));
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t i = 0; i < w->runs_a_group; i++, to += bytes)
            for (int64_t r = 0; r < ROWS; r++) {
                const int64_t row = block * ROWS + r, first = (g * w->runs_a_group + i) * RUN;
                const int64_t left = w->columns - first;
                if (row < w->rows)
                    pack_run(w, j->data + row * j->row_bytes + first * w->bits / 8,
                             left < RUN ? left : RUN, r, to);
            }
        for (int64_t r = 0; r < ROWS; r++, to += 2)
            if (block * ROWS + r < w->rows)
                memcpy(to, j->scale + (block * ROWS + r) * groups + g, 2);
    }
}

/* Fill w->data, which has qinfer_packed_bytes, from the layout on disk: see quant/affine.py. */
void qinfer_repack(const packed *w, const uint8_t *data, const uint16_t *scale, int64_t row_bytes,
                   int threads)
{
    const repacking job = {w, data, scale, row_bytes};
    qinfer_parallel(pack_block, &job, (w->rows + ROWS - 1) / ROWS, threads);
}

/* ---- activations ---- */

typedef struct {
    activations *a;
    const float *x;
    int64_t columns, tokens_a_pass;
} quantization;

static float power_of_two(int32_t exponent)
{
    const uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The unit is the power of two with which the largest value takes all of 15 bits and a sign. */
static void quantize_run(const float *x, int64_t count, int16_t *values, float *scale, int32_t *sum)
{
    float most = 0, poison = 0, run[RUN] = {0};
    int exponent;
    memcpy(run, x, (size_t)count * sizeof *x);
    for (int i = 0; i < RUN; i++) {
        const float size = fabsf(run[i]);
        most = size > most ? size : most;
        poison += run[i] * 0.f; /* NaN if one of them is NaN or infinite */
    }
    if (poison != 0 || most < 0x1p-100f) {
        memset(values, 0, RUN * sizeof *values);
        *scale = poison;
        *sum = 0;
        return;
    }
    frexpf(most, &exponent); /* most < 2^exponent */
    const float unit = power_of_two(exponent - 15), per_unit = power_of_two(15 - exponent);
    int32_t total = 0;
    for (int i = 0; i < RUN; i++) {
        const float rounded = (run[i] * per_unit + 0x1.8p23f) - 0x1.8p23f;
        values[i] = (int16_t)(rounded > 32767 ? 32767 : rounded);
        total += values[i];
    }
    *scale = unit;
    *sum = 8 * total;
}

static void quantize_pass(const void *job, int64_t i)
{
    const quantization *q = job;
    const activations *a = q->a;
    const int64_t begin = i * q->tokens_a_pass, end = begin + q->tokens_a_pass;
    for (int64_t t = begin; t < (end < a->tokens ? end : a->tokens); t++)
        for (int64_t r = 0; r < a->runs; r++) {
            const int64_t left = q->columns - r * RUN;
            quantize_run(q->x + t * q->columns + r * RUN, left < RUN ? left : RUN,
                         a->values + (t * a->runs + r) * RUN, a->scales + t * a->runs + r,
                         a->sums + t * a->runs + r);
        }
}

int64_t activations_bytes(int64_t tokens, int64_t columns)
{
    return tokens * ((columns + RUN - 1) / RUN) * (int64_t)(RUN * sizeof(int16_t) + 2 * sizeof(float));
}

void quantize_activations(activations *a, void *memory, const float *x, int64_t tokens, int64_t columns,
                          int threads)
{
    a->tokens = tokens;
    a->runs = (columns + RUN - 1) / RUN;
    a->scales = memory;
    a->sums = (int32_t *)(a->scales + tokens * a->runs);
    a->values = (int16_t *)(a->sums + tokens * a->runs);
    const quantization q = {a, x, columns, 1 + QUANTIZED_FLOATS / columns};
    qinfer_parallel(quantize_pass, &q, (tokens + q.tokens_a_pass - 1) / q.tokens_a_pass, threads);
}

/* ---- products ---- */

static inline float scale_at(const packed *w, const uint8_t *scales, int r)
{
    uint16_t bits;
    memcpy(&bits, scales + 2 * r, sizeof bits);
    return w->scale_is_fp16 ? from_fp16(bits) : from_bf16(bits);
}

/* The products of one block of rows with up to TILE tokens, whose results are `stride` apart. */
INLINE void tile_plain(const packed *w, const uint8_t *data, const activations *x, int64_t token,
                       float *out, int64_t stride, int bits, int tokens)
{
    float sums[TILE][ROWS] = {{0}};
    for (int64_t run = 0; run < x->runs;) {
        float of_group[TILE][ROWS] = {{0}};
        for (int64_t i = 0; i < w->runs_a_group; i++, run++, data += bits == 4 ? 128 : 256)
            for (int t = 0; t < tokens; t++) {
                const int64_t at = (token + t) * x->runs + run;
                for (int r = 0; r < ROWS; r++) {
                    int32_t dot = bits == 4 ? -x->sums[at] : 0;
                    for (int k = 0; k < RUN; k++) {
                        const uint8_t *d = bits == 4 ? data + k / 8 * 32 + 4 * r : data + k / 2 * 16 + 2 * r;
                        const int nibble = k % 8 / 2 + k % 2 * 4;
                        const int32_t weight = bits == 4 ? d[nibble / 2] >> nibble % 2 * 4 & 15
                                                         : (int8_t)d[k % 2];
                        dot += weight * x->values[at * RUN + k];
                    }
                    of_group[t][r] += (float)dot * x->scales[at];
                }
            }
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < ROWS; r++)
                sums[t][r] += of_group[t][r] * scale_at(w, data, r);
        data += 2 * ROWS;
    }
    for (int t = 0; t < tokens; t++)
        memcpy(out + t * stride, sums[t], sizeof sums[t]);
}

#ifdef HAVE_AVX2_VARIANTS
AVX2 INLINE __m256i pair_at(const int16_t *x)
{
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm256_set1_epi32(pair);
}

AVX2 INLINE void dot_run_avx2(const uint8_t *data, const int16_t *const x[TILE], __m256i dots[TILE],
                              int bits, int tokens)
{
    const __m256i mask = _mm256_set1_epi16(15);
    for (int j = 0; j < 4; j++) {
        __m256i w[4];
        if (bits == 4) {
            const __m256i v = _mm256_loadu_si256((const __m256i *)data + j);
            w[0] = _mm256_and_si256(v, mask);
            w[1] = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
            w[2] = _mm256_and_si256(_mm256_srli_epi16(v, 8), mask);
            w[3] = _mm256_srli_epi16(v, 12);
        } else {
            for (int i = 0; i < 4; i++)
                w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)data + 4 * j + i));
        }
        for (int i = 0; i < 4; i++)
            for (int t = 0; t < tokens; t++) {
                const __m256i pair = pair_at(x[t] + 8 * j + 2 * i);
                dots[t] = _mm256_add_epi32(dots[t], _mm256_madd_epi16(w[i], pair));
                __asm__("" : "+x"(dots[t])); /* else gcc collects products first, and spills them */
            }
    }
}

AVX2 INLINE __m256 scales_avx2(const packed *w, const uint8_t *scales)
{
    const __m128i bits = _mm_loadu_si128((const __m128i *)scales);
    if (w->scale_is_fp16)
        return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

AVX2 INLINE void tile_avx2(const packed *w, const uint8_t *data, const activations *x, int64_t token,
                           float *out, int64_t stride, int bits, int tokens)
{
    const int64_t bytes = bits == 4 ? 128 : 256;
    const int16_t *values[TILE];
    __m256 sums[TILE], of_group[TILE];
    __m256i dots[TILE];
    for (int t = 0; t < tokens; t++) {
        sums[t] = _mm256_setzero_ps();
        values[t] = x->values + (token + t) * x->runs * RUN;
    }
    for (int64_t run = 0; run < x->runs;) {
        for (int t = 0; t < tokens; t++)
            of_group[t] = _mm256_setzero_ps();
        for (int64_t i = 0; i < w->runs_a_group; i++, run++, data += bytes) {
            for (int64_t line = 0; line < bytes; line += 64)
                _mm_prefetch((const char *)data + 1024 + line, _MM_HINT_T0);
            for (int t = 0; t < tokens; t++)
                dots[t] = bits == 4 ? _mm256_set1_epi32(-x->sums[(token + t) * x->runs + run])
                                    : _mm256_setzero_si256();
            dot_run_avx2(data, values, dots, bits, tokens);
            for (int t = 0; t < tokens; t++) {
                const __m256 scale = _mm256_set1_ps(x->scales[(token + t) * x->runs + run]);
                of_group[t] = _mm256_add_ps(of_group[t], _mm256_mul_ps(_mm256_cvtepi32_ps(dots[t]), scale));
                values[t] += RUN;
            }
        }
        const __m256 scale = scales_avx2(w, data);
        for (int t = 0; t < tokens; t++)
            sums[t] = _mm256_add_ps(sums[t], _mm256_mul_ps(of_group[t], scale));
        data += 2 * ROWS;
    }
    for (int t = 0; t < tokens; t++)
        _mm256_storeu_ps(out + t * stride, sums[t]);
}
#endif

typedef struct {
    const packed *w;
    const activations *x;
    float *out;
    int64_t blocks_a_pass;
} product;

/* One block with all tokens. A block that is not full is computed as a whole, to a place of its own. */
#define DEFINE_BLOCK(name, attributes, tile, bits)                                                 \
    attributes static void name(const product *p, int64_t block)                                   \
    {                                                                                              \
        const packed *w = p->w;                                                                    \
        const activations *x = p->x;                                                               \
        const uint8_t *data = w->data + block * block_bytes(w);                                    \
        const int64_t left = w->rows - block * ROWS;                                               \
        float part[TILE * ROWS];                                                                   \
        for (int64_t t = 0; t < x->tokens; t += TILE) {                                            \
            float *to = p->out + t * w->rows + block * ROWS, *out = left < ROWS ? part : to;       \
            const int64_t stride = left < ROWS ? ROWS : w->rows, count = x->tokens - t;            \
            switch (count) {                                                                       \
            case 1: tile(w, data, x, t, out, stride, bits, 1); break;                              \
            case 2: tile(w, data, x, t, out, stride, bits, 2); break;                              \
            case 3: tile(w, data, x, t, out, stride, bits, 3); break;                              \
            default: tile(w, data, x, t, out, stride, bits, TILE);                                 \
            }                                                                                      \
            for (int64_t i = 0; left < ROWS && i < (count < TILE ? count : TILE); i++)             \
                memcpy(to + i * w->rows, part + i * ROWS, (size_t)left * sizeof *to);              \
        }                                                                                          \
    }

DEFINE_BLOCK(block_int4_plain, , tile_plain, 4)
DEFINE_BLOCK(block_int8_plain, , tile_plain, 8)
#ifdef HAVE_AVX2_VARIANTS
DEFINE_BLOCK(block_int4_avx2, AVX2, tile_avx2, 4)
DEFINE_BLOCK(block_int8_avx2, AVX2, tile_avx2, 8)
#endif

static void product_pass(const void *job, int64_t i)
{
    const product *p = job;
    void (*block)(const product *, int64_t) = p->w->bits == 4 ? block_int4_plain : block_int8_plain;
#ifdef HAVE_AVX2_VARIANTS
    if (has_avx2())
        block = p->w->bits == 4 ? block_int4_avx2 : block_int8_avx2;
#endif
    const int64_t blocks = (p->w->rows + ROWS - 1) / ROWS, begin = i * p->blocks_a_pass;
    for (int64_t b = begin; b < blocks && b < begin + p->blocks_a_pass; b++)
        block(p, b);
}

void packed_linear(const packed *w, const activations *x, float *out, int threads)
{
    const int64_t blocks = (w->rows + ROWS - 1) / ROWS, share = blocks / (8 * threads);
    const product p = {w, x, out, share > LEAST_BLOCKS ? share : LEAST_BLOCKS};
    qinfer_parallel(product_pass, &p, (blocks + p.blocks_a_pass - 1) / p.blocks_a_pass, threads);
}

/* The same from activations in fp32. Returns 0 if out of memory. */
int qinfer_packed_linear(const packed *w, const float *x, int64_t tokens, float *out, int threads)
{
    void *memory = malloc((size_t)activations_bytes(tokens, w->columns));
    activations a;
    if (!memory)
        return 0;
    quantize_activations(&a, memory, x, tokens, w->columns, threads);
    packed_linear(w, &a, out, threads);
    free(memory);
    return 1;
}
