/* Matrix products with dense and NF4 weights that stay as they lie on disk.
 *
 * Activations, sums and results are fp32, so these differ from the reference operations only in the
 * order of addition. A row of the result is computed by one thread in one order: it depends neither
 * on the number of threads nor on the other rows. Plain C11, and AVX2 variants chosen at run time.
 * Called through ctypes: no Python API in this directory's C.
 */
#include "pool.h"
#include "variants.h"

#include <stdlib.h>

enum { RUN = 32, TILE = 4, CHUNK_ROWS = 16, SCRATCH_FLOATS = 32768 };
enum { NF4, BF16, FP16, FP32 };

/* A weight of `rows` outputs and `columns` inputs; must match `Unpacked` in kernels.py. */
typedef struct {
    int64_t kind;
    int64_t rows, columns;
    int64_t group;     /* columns, or a block of NF4 */
    int64_t row_bytes; /* of `data` */
    const uint8_t *data;
    const float *absmax; /* NF4: [rows * columns / group] */
    const float *code;   /* NF4: [16] */
} weight;

static inline float scale_at(const weight *w, int64_t i, int kind)
{
    return kind == NF4 ? w->absmax[i] : 1;
}

static inline int64_t run_bytes(int kind)
{
    static const int64_t bytes[] = {RUN / 2, 2 * RUN, 2 * RUN, 4 * RUN};
    return bytes[kind];
}

/* Sum of two vectors of 8 lanes, always in this order. */
static inline float sum_lanes(const float a[8], const float b[8])
{
    float s[8];
    for (int j = 0; j < 8; j++)
        s[j] = a[j] + b[j];
    for (int width = 4; width; width /= 2)
        for (int j = 0; j < width; j++)
            s[j] += s[j + width];
    return s[0];
}

/* x as NF4 reads it: in each run of 32, the 16 values that go with the first nibbles of
 * 16 bytes, then the 16 that go with the second ones. */
static void split_pairs(float *to, const float *x, int64_t columns)
{
    for (int64_t k = 0; k < columns; k += RUN)
        for (int j = 0; j < RUN / 2; j++) {
            to[k + j] = x[k + 2 * j];
            to[k + RUN / 2 + j] = x[k + 2 * j + 1];
        }
}

/* Weight k behind `data`, of the dense formats. */
static inline float single(const uint8_t *data, int64_t k, int kind)
{
    switch (kind) {
    case BF16: return from_bf16(((const uint16_t *)data)[k]);
    case FP16: return from_fp16(((const uint16_t *)data)[k]);
    default: return ((const float *)data)[k];
    }
}

/* A tile is the dot products of one row with up to TILE tokens. Weights are unpacked run by run, so
 * that `q * s` is the very number that the reference dequantizes to, and go to 16 lanes of sums per
 * token, whose order does not depend on how many tokens there are. INLINE with a constant `kind` and
 * `tokens` makes each case a loop of its own. */
INLINE void unpack(const weight *w, const uint8_t *data, float s, float v[RUN], int kind)
{
    for (int j = 0; j < RUN / 2; j++) {
        switch (kind) {
        case NF4:
            v[j] = s * w->code[data[j] >> 4];
            v[RUN / 2 + j] = s * w->code[data[j] & 15];
            break;
        default:
            v[j] = single(data, j, kind);
            v[RUN / 2 + j] = single(data, RUN / 2 + j, kind);
        }
    }
}

INLINE void tile(const weight *w, int64_t row, const float *x, float *out, int64_t stride, int kind,
                 int tokens)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    const int64_t groups = w->columns / w->group, step = run_bytes(kind);
    float a[TILE][8] = {{0}}, b[TILE][8] = {{0}}, tail[TILE] = {0}, v[RUN];
    for (int64_t g = 0; g < groups; g++) {
        const float s = scale_at(w, row * groups + g, kind);
        int64_t k = 0;
        for (; k + RUN <= w->group; k += RUN, data += step, x += RUN) {
            unpack(w, data, s, v, kind);
            for (int t = 0; t < tokens; t++)
                for (int j = 0; j < 8; j++) {
                    a[t][j] += v[j] * x[t * w->columns + j];
                    b[t][j] += v[8 + j] * x[t * w->columns + 8 + j];
                    a[t][j] += v[16 + j] * x[t * w->columns + 16 + j];
                    b[t][j] += v[24 + j] * x[t * w->columns + 24 + j];
                }
        }
        for (int64_t i = 0; k < w->group; i++, k++)
            for (int t = 0; t < tokens; t++)
                tail[t] += single(data, i, kind) * x[t * w->columns + i];
        data += w->group % RUN * step / RUN;
        x += w->group % RUN;
    }
    for (int t = 0; t < tokens; t++)
        out[t * stride] = sum_lanes(a[t], b[t]) + tail[t];
}

#ifdef HAVE_AVX2_VARIANTS
/* code[i] of 8 indices below 16: permutations of the lower and upper 8 entries, chosen by bit 3 */
AVX2 INLINE __m256 look_up(__m128i bytes, __m256 low, __m256 high)
{
    __m256i i = _mm256_cvtepu8_epi32(bytes);
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                            upper);
}

AVX2 INLINE __m256 load_dense(const uint8_t *data, int i, int kind) /* the i-th 8 weights */
{
    if (kind == FP32)
        return _mm256_loadu_ps((const float *)data + 8 * i);
    __m128i half = _mm_loadu_si128((const __m128i *)data + i);
    if (kind == FP16)
        return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

AVX2 INLINE void unpack_avx2(const weight *w, const uint8_t *data, __m256 s, __m256 v[4], int kind)
{
    if (kind >= BF16) {
        for (int i = 0; i < 4; i++)
            v[i] = load_dense(data, i, kind);
        return;
    }
    const __m128i bytes = _mm_loadu_si128((const __m128i *)data), mask = _mm_set1_epi8(15);
    const __m128i p = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask); /* the first one is high */
    const __m128i q = _mm_and_si128(bytes, mask);
    const __m256 low = _mm256_loadu_ps(w->code), high = _mm256_loadu_ps(w->code + 8);
    v[0] = look_up(p, low, high);
    v[1] = look_up(_mm_srli_si128(p, 8), low, high);
    v[2] = look_up(q, low, high);
    v[3] = look_up(_mm_srli_si128(q, 8), low, high);
    for (int i = 0; i < 4; i++)
        v[i] = _mm256_mul_ps(s, v[i]);
}

AVX2 INLINE void tile_avx2(const weight *w, int64_t row, const float *x, float *out, int64_t stride,
                           int kind, int tokens)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    const int64_t groups = w->columns / w->group, step = run_bytes(kind);
    __m256 a[TILE], b[TILE], v[4];
    float tail[TILE] = {0}, lanes[2][8];
    for (int t = 0; t < tokens; t++)
        a[t] = b[t] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        const float s = scale_at(w, row * groups + g, kind);
        int64_t k = 0;
        for (; k + RUN <= w->group; k += RUN, data += step, x += RUN) {
            unpack_avx2(w, data, _mm256_set1_ps(s), v, kind);
            for (int t = 0; t < tokens; t++) {
                const float *y = x + t * w->columns;
                a[t] = _mm256_fmadd_ps(v[0], _mm256_loadu_ps(y), a[t]);
                b[t] = _mm256_fmadd_ps(v[1], _mm256_loadu_ps(y + 8), b[t]);
                a[t] = _mm256_fmadd_ps(v[2], _mm256_loadu_ps(y + 16), a[t]);
                b[t] = _mm256_fmadd_ps(v[3], _mm256_loadu_ps(y + 24), b[t]);
            }
        }
        for (int64_t i = 0; k < w->group; i++, k++)
            for (int t = 0; t < tokens; t++)
                tail[t] = __builtin_fmaf(single(data, i, kind), x[t * w->columns + i], tail[t]);
        data += w->group % RUN * step / RUN;
        x += w->group % RUN;
    }
    for (int t = 0; t < tokens; t++) {
        _mm256_storeu_ps(lanes[0], a[t]);
        _mm256_storeu_ps(lanes[1], b[t]);
        out[t * stride] = sum_lanes(lanes[0], lanes[1]) + tail[t];
    }
}
#endif

/* A row as tiles of FP32 read it. */
INLINE void unpack_row(const weight *w, int64_t row, float *to, int kind)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    const int64_t groups = w->columns / w->group, step = run_bytes(kind);
    for (int64_t g = 0; g < groups; g++) {
        const float s = scale_at(w, row * groups + g, kind);
        int64_t k = 0;
        for (; k + RUN <= w->group; k += RUN, data += step, to += RUN)
            unpack(w, data, s, to, kind);
        for (int64_t i = 0; k < w->group; i++, k++)
            *to++ = single(data, i, kind);
        data += w->group % RUN * step / RUN;
    }
}

#ifdef HAVE_AVX2_VARIANTS
AVX2 INLINE void unpack_row_avx2(const weight *w, int64_t row, float *to, int kind)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    const int64_t groups = w->columns / w->group, step = run_bytes(kind);
    for (int64_t g = 0; g < groups; g++) {
        const float s = scale_at(w, row * groups + g, kind);
        int64_t k = 0;
        for (; k + RUN <= w->group; k += RUN, data += step, to += RUN) {
            __m256 v[4];
            unpack_avx2(w, data, _mm256_set1_ps(s), v, kind);
            for (int i = 0; i < 4; i++)
                _mm256_storeu_ps(to + 8 * i, v[i]);
        }
        for (int64_t i = 0; k < w->group; i++, k++)
            *to++ = single(data, i, kind);
        data += w->group % RUN * step / RUN;
    }
}
#endif

typedef void (*rows_function)(const weight *, int64_t begin, int64_t end, const float *x,
                              int64_t tokens, float *out);

/* Rows begin .. end as they are stored; a tile's tokens stay in the first cache for all of them. */
#define DEFINE_TILES(name, attributes, tile, kind)                                                 \
    attributes static void name(const weight *w, int64_t begin, int64_t end, const float *x,       \
                                int64_t tokens, float *out)                                        \
    {                                                                                              \
        const int64_t rows = w->rows;                                                              \
        for (int64_t t = 0; t < tokens; t += TILE, x += TILE * w->columns, out += TILE * rows)     \
            for (int64_t row = begin; row < end; row++)                                            \
                switch (tokens - t) {                                                              \
                case 1: tile(w, row, x, out + row, rows, kind, 1); break;                          \
                case 2: tile(w, row, x, out + row, rows, kind, 2); break;                          \
                case 3: tile(w, row, x, out + row, rows, kind, 3); break;                          \
                default: tile(w, row, x, out + row, rows, kind, TILE);                             \
                }                                                                                  \
    }

/* The same, but for many tokens each row is unpacked once for all tiles: the same numbers in the same
 * order, so the result is the same to the bit. */
#define DEFINE_ROWS(name, attributes, unpack_row, format, tiles, tiles_fp32)                       \
    attributes static void name(const weight *w, int64_t begin, int64_t end, const float *x,       \
                                int64_t tokens, float *out)                                        \
    {                                                                                              \
        float scratch[SCRATCH_FLOATS];                                                             \
        const int64_t fit = SCRATCH_FLOATS / w->columns;                                           \
        if (tokens <= 2 * TILE || !fit) {                                                          \
            tiles(w, begin, end, x, tokens, out);                                                  \
            return;                                                                                \
        }                                                                                          \
        /* A group that ends within a run is kept, since the sum of its rest is kept apart. */     \
        const int64_t group = w->group % RUN ? w->group : w->columns;                              \
        weight dense = {.kind = FP32, .rows = w->rows, .columns = w->columns, .group = group,      \
                        .row_bytes = 4 * w->columns, .data = (const uint8_t *)scratch};            \
        for (; begin < end; begin += fit) {                                                        \
            const int64_t count = end - begin < fit ? end - begin : fit;                           \
            for (int64_t i = 0; i < count; i++)                                                    \
                unpack_row(w, begin + i, scratch + i * w->columns, format);                        \
            tiles_fp32(&dense, 0, count, x, tokens, out + begin);                                  \
        }                                                                                          \
    }

#define DEFINE_ALL(suffix, attributes, tile, unpack_row)                                           \
    DEFINE_TILES(tiles_nf4##suffix, attributes, tile, NF4)                                         \
    DEFINE_TILES(tiles_bf16##suffix, attributes, tile, BF16)                                       \
    DEFINE_TILES(tiles_fp16##suffix, attributes, tile, FP16)                                       \
    DEFINE_TILES(tiles_fp32##suffix, attributes, tile, FP32)                                       \
    DEFINE_ROWS(rows_nf4##suffix, attributes, unpack_row, NF4, tiles_nf4##suffix,                  \
                tiles_fp32##suffix)                                                                \
    DEFINE_ROWS(rows_bf16##suffix, attributes, unpack_row, BF16, tiles_bf16##suffix,               \
                tiles_fp32##suffix)                                                                \
    DEFINE_ROWS(rows_fp16##suffix, attributes, unpack_row, FP16, tiles_fp16##suffix,               \
                tiles_fp32##suffix)                                                                \
    static const rows_function rows_by_kind##suffix[] = {                                          \
        rows_nf4##suffix, rows_bf16##suffix, rows_fp16##suffix, tiles_fp32##suffix};

DEFINE_ALL(, , tile, unpack_row)
#ifdef HAVE_AVX2_VARIANTS
DEFINE_ALL(_avx2, AVX2, tile_avx2, unpack_row_avx2)
#endif

static rows_function rows_of(int32_t kind)
{
#ifdef HAVE_AVX2_VARIANTS
    if (has_avx2())
        return rows_by_kind_avx2[kind];
#endif
    return rows_by_kind[kind];
}

/* One call's work, shared out in chunks of rows. */
typedef struct {
    const weight *w;
    const float *x;
    float *out;
    int64_t tokens;
} job;

static void run_chunk(const void *work, int64_t chunk)
{
    const job *j = work;
    int64_t begin = chunk * CHUNK_ROWS, end = begin + CHUNK_ROWS;
    rows_of(j->w->kind)(j->w, begin, end < j->w->rows ? end : j->w->rows, j->x, j->tokens, j->out);
}

/* out[t][n] = sum over k of x[t][k] * w[n][k]; out is [tokens, rows]. Returns 0 if out of memory. */
int qinfer_linear(const weight *w, const float *x, int64_t tokens, float *out, int threads)
{
    float *split = NULL;
    if (w->kind == NF4) {
        split = malloc((size_t)(tokens * w->columns) * sizeof *split);
        if (!split)
            return 0;
        for (int64_t t = 0; t < tokens; t++)
            split_pairs(split + t * w->columns, x + t * w->columns, w->columns);
    }
    job j = {.w = w, .x = split ? split : x, .out = out, .tokens = tokens};
    qinfer_parallel(run_chunk, &j, (w->rows + CHUNK_ROWS - 1) / CHUNK_ROWS, threads);
    free(split);
    return 1;
}
