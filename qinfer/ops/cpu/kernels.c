/* Matrix-vector products with weights that stay as they lie on disk, and their dequantization.
 *
 * Activations, sums and results are fp32, so these differ from the reference operations only in the
 * order of addition. A row of the result is computed by one thread in one order: it depends neither
 * on the number of threads nor on the other rows. Plain C11, and AVX2 variants chosen at run time.
 * Called through ctypes: no Python API here.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__) && !defined(QINFER_PLAIN) /* to test without */
#include <immintrin.h>
#define HAVE_AVX2_VARIANTS 1
#define AVX2 __attribute__((target("avx2,fma")))
#endif

enum { LANES = 16, CHUNK_ROWS = 16 };
enum { INT4, INT8, NF4, BF16 };

/* A weight of `rows` outputs and `columns` inputs; must match `_Weight` in kernels.py. */
typedef struct {
    int32_t kind;
    int32_t scale_is_fp16; /* else bf16 */
    int64_t rows, columns;
    int64_t group;      /* weights a scale, or a block of NF4 */
    int64_t row_bytes;  /* of `data` */
    const uint8_t *data;
    const uint16_t *scale; /* INT4, INT8: [rows, columns / group] */
    const float *absmax;   /* NF4: [rows * columns / group] */
    const float *code;     /* NF4: [16] */
} weight;

static inline float from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline float from_fp16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    float value;
    if (rest >= 0x0400 && rest < 0x7c00) {
        wide = sign | ((rest << 13) + 0x38000000);
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    if (rest < 0x0400) { /* subnormal: a multiple of 2^-24 */
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    wide = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline float scale_at(const weight *w, int64_t i)
{
    return w->scale_is_fp16 ? from_fp16(w->scale[i]) : from_bf16(w->scale[i]);
}

static inline float sum_lanes(const float *a)
{
    float s[LANES];
    memcpy(s, a, sizeof s);
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++)
            s[j] += s[j + width];
    return s[0];
}

/* x of a row as the kernels read it: for the 4-bit formats each run of 32 is the 16 values that go
 * with the first nibbles, then the 16 that go with the second ones. */
static inline void split_pairs(float *to, const float *x, int64_t columns)
{
    for (int64_t k = 0; k < columns; k += 2 * LANES)
        for (int j = 0; j < LANES; j++) {
            to[k + j] = x[k + 2 * j];
            to[k + LANES + j] = x[k + 2 * j + 1];
        }
}

static float dot_int4(const weight *w, int64_t row, const float *x)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    int64_t groups = w->columns / w->group;
    float sum[LANES] = {0};
    for (int64_t g = 0; g < groups; g++) {
        float s = scale_at(w, row * groups + g), part[LANES] = {0};
        for (int64_t k = 0; k < w->group; k += 2 * LANES, data += LANES, x += 2 * LANES)
            for (int j = 0; j < LANES; j++)
                part[j] += (float)((data[j] & 15) - 8) * x[j] +
                           (float)((data[j] >> 4) - 8) * x[LANES + j];
        for (int j = 0; j < LANES; j++)
            sum[j] += s * part[j];
    }
    return sum_lanes(sum);
}

static float dot_int8(const weight *w, int64_t row, const float *x)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    int64_t groups = w->columns / w->group;
    float sum[LANES] = {0}, tail = 0;
    for (int64_t g = 0; g < groups; g++) {
        float s = scale_at(w, row * groups + g), part[LANES] = {0}, rest = 0;
        int64_t k = 0;
        for (; k + LANES <= w->group; k += LANES)
            for (int j = 0; j < LANES; j++)
                part[j] += (float)(data[k + j] - 128) * x[k + j];
        for (; k < w->group; k++)
            rest += (float)(data[k] - 128) * x[k];
        for (int j = 0; j < LANES; j++)
            sum[j] += s * part[j];
        tail += s * rest;
        data += w->group;
        x += w->group;
    }
    return sum_lanes(sum) + tail;
}

static float dot_nf4(const weight *w, int64_t row, const float *x)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    int64_t blocks = w->columns / w->group;
    float sum[LANES] = {0};
    for (int64_t b = 0; b < blocks; b++) {
        float s = w->absmax[row * blocks + b], part[LANES] = {0};
        for (int64_t k = 0; k < w->group; k += 2 * LANES, data += LANES, x += 2 * LANES)
            for (int j = 0; j < LANES; j++)
                part[j] += w->code[data[j] >> 4] * x[j] + w->code[data[j] & 15] * x[LANES + j];
        for (int j = 0; j < LANES; j++)
            sum[j] += s * part[j];
    }
    return sum_lanes(sum);
}

static float dot_bf16(const weight *w, int64_t row, const float *x)
{
    const uint16_t *data = (const uint16_t *)(w->data + row * w->row_bytes);
    float sum[LANES] = {0}, tail = 0;
    int64_t k = 0;
    for (; k + LANES <= w->columns; k += LANES)
        for (int j = 0; j < LANES; j++)
            sum[j] += from_bf16(data[k + j]) * x[k + j];
    for (; k < w->columns; k++)
        tail += from_bf16(data[k]) * x[k];
    return sum_lanes(sum) + tail;
}

#ifdef HAVE_AVX2_VARIANTS
AVX2 static inline __m256 widen(__m128i bytes) /* the low 8 signed bytes */
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

AVX2 static inline float sum_avx2(__m256 a, __m256 b)
{
    float lanes[LANES];
    _mm256_storeu_ps(lanes, a);
    _mm256_storeu_ps(lanes + 8, b);
    return sum_lanes(lanes);
}

/* a, b += s * (16 values `first` times x[0..15] + 16 values `second` times x[16..31]) */
#define ADD_PAIRS(first, second)                                                                  \
    do {                                                                                          \
        __m128i f_ = (first), s_ = (second);                                                      \
        __m256 p_ = _mm256_mul_ps(widen(f_), _mm256_loadu_ps(x));                                 \
        __m256 q_ = _mm256_mul_ps(widen(_mm_srli_si128(f_, 8)), _mm256_loadu_ps(x + 8));          \
        p_ = _mm256_fmadd_ps(widen(s_), _mm256_loadu_ps(x + 16), p_);                             \
        q_ = _mm256_fmadd_ps(widen(_mm_srli_si128(s_, 8)), _mm256_loadu_ps(x + 24), q_);          \
        a = _mm256_fmadd_ps(s, p_, a);                                                            \
        b = _mm256_fmadd_ps(s, q_, b);                                                            \
    } while (0)

AVX2 static float dot_int4_avx2(const weight *w, int64_t row, const float *x)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    const __m128i mask = _mm_set1_epi8(15), zero = _mm_set1_epi8(8);
    int64_t groups = w->columns / w->group;
    __m256 a = _mm256_setzero_ps(), b = a;
    for (int64_t g = 0; g < groups; g++) {
        __m256 s = _mm256_set1_ps(scale_at(w, row * groups + g));
        for (int64_t k = 0; k < w->group; k += 2 * LANES, data += LANES, x += 2 * LANES) {
            __m128i pair = _mm_loadu_si128((const __m128i *)data);
            ADD_PAIRS(_mm_sub_epi8(_mm_and_si128(pair, mask), zero),
                      _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(pair, 4), mask), zero));
        }
    }
    return sum_avx2(a, b);
}

AVX2 static float dot_int8_avx2(const weight *w, int64_t row, const float *x)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    const __m128i sign = _mm_set1_epi8((char)0x80);
    int64_t groups = w->columns / w->group;
    __m256 a = _mm256_setzero_ps(), b = a;
    float tail = 0;
    for (int64_t g = 0; g < groups; g++, data += w->group, x += w->group) {
        float scale = scale_at(w, row * groups + g), rest = 0;
        __m256 s = _mm256_set1_ps(scale), p = _mm256_setzero_ps(), q = p;
        int64_t k = 0;
        for (; k + LANES <= w->group; k += LANES) {
            __m128i v = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(data + k)), sign);
            p = _mm256_fmadd_ps(widen(v), _mm256_loadu_ps(x + k), p);
            q = _mm256_fmadd_ps(widen(_mm_srli_si128(v, 8)), _mm256_loadu_ps(x + k + 8), q);
        }
        for (; k < w->group; k++)
            rest += (float)(data[k] - 128) * x[k];
        a = _mm256_fmadd_ps(s, p, a);
        b = _mm256_fmadd_ps(s, q, b);
        tail += scale * rest;
    }
    return sum_avx2(a, b) + tail;
}

/* code[i] of 8 small indices: two permutations of 8 entries, chosen by the index's fourth bit */
AVX2 static inline __m256 look_up(__m128i bytes, __m256 low, __m256 high)
{
    __m256i i = _mm256_cvtepu8_epi32(bytes);
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                            upper);
}

AVX2 static float dot_nf4_avx2(const weight *w, int64_t row, const float *x)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    const __m256 low = _mm256_loadu_ps(w->code), high = _mm256_loadu_ps(w->code + 8);
    const __m128i mask = _mm_set1_epi8(15);
    int64_t blocks = w->columns / w->group;
    __m256 a = _mm256_setzero_ps(), b = a;
    for (int64_t g = 0; g < blocks; g++) {
        __m256 s = _mm256_set1_ps(w->absmax[row * blocks + g]);
        for (int64_t k = 0; k < w->group; k += 2 * LANES, data += LANES, x += 2 * LANES) {
            __m128i pair = _mm_loadu_si128((const __m128i *)data);
            __m128i f = _mm_and_si128(_mm_srli_epi16(pair, 4), mask);
            __m128i r = _mm_and_si128(pair, mask);
            __m256 p = _mm256_mul_ps(look_up(f, low, high), _mm256_loadu_ps(x));
            __m256 q = _mm256_mul_ps(look_up(_mm_srli_si128(f, 8), low, high),
                                     _mm256_loadu_ps(x + 8));
            p = _mm256_fmadd_ps(look_up(r, low, high), _mm256_loadu_ps(x + 16), p);
            q = _mm256_fmadd_ps(look_up(_mm_srli_si128(r, 8), low, high),
                                _mm256_loadu_ps(x + 24), q);
            a = _mm256_fmadd_ps(s, p, a);
            b = _mm256_fmadd_ps(s, q, b);
        }
    }
    return sum_avx2(a, b);
}

AVX2 static float dot_bf16_avx2(const weight *w, int64_t row, const float *x)
{
    const uint16_t *data = (const uint16_t *)(w->data + row * w->row_bytes);
    __m256 a = _mm256_setzero_ps(), b = a;
    float tail = 0;
    int64_t k = 0;
    for (; k + LANES <= w->columns; k += LANES) {
        __m128i low = _mm_loadu_si128((const __m128i *)(data + k));
        __m128i high = _mm_loadu_si128((const __m128i *)(data + k + 8));
        __m256i p = _mm256_slli_epi32(_mm256_cvtepu16_epi32(low), 16);
        __m256i q = _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16);
        a = _mm256_fmadd_ps(_mm256_castsi256_ps(p), _mm256_loadu_ps(x + k), a);
        b = _mm256_fmadd_ps(_mm256_castsi256_ps(q), _mm256_loadu_ps(x + k + 8), b);
    }
    for (; k < w->columns; k++)
        tail += from_bf16(data[k]) * x[k];
    return sum_avx2(a, b) + tail;
}
#endif

static void row_int4(const weight *w, int64_t row, float *out)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    int64_t groups = w->columns / w->group;
    for (int64_t g = 0; g < groups; g++) {
        float s = scale_at(w, row * groups + g);
        for (int64_t k = 0; k < w->group / 2; k++, out += 2) {
            out[0] = s * (float)((data[k] & 15) - 8);
            out[1] = s * (float)((data[k] >> 4) - 8);
        }
        data += w->group / 2;
    }
}

static void row_int8(const weight *w, int64_t row, float *out)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    int64_t groups = w->columns / w->group;
    for (int64_t g = 0; g < groups; g++, data += w->group, out += w->group) {
        float s = scale_at(w, row * groups + g);
        for (int64_t k = 0; k < w->group; k++)
            out[k] = s * (float)(data[k] - 128);
    }
}

static void row_nf4(const weight *w, int64_t row, float *out)
{
    const uint8_t *data = w->data + row * w->row_bytes;
    for (int64_t k = 0; k < w->columns; k += 2) {
        float s = w->absmax[(row * w->columns + k) / w->group];
        out[k] = s * w->code[data[k / 2] >> 4];
        out[k + 1] = s * w->code[data[k / 2] & 15];
    }
}

static void row_bf16(const weight *w, int64_t row, float *out)
{
    const uint16_t *data = (const uint16_t *)(w->data + row * w->row_bytes);
    for (int64_t k = 0; k < w->columns; k++)
        out[k] = from_bf16(data[k]);
}

typedef float (*dot_function)(const weight *, int64_t, const float *);
typedef void (*row_function)(const weight *, int64_t, float *);

static dot_function dot_of(int32_t kind)
{
#ifdef HAVE_AVX2_VARIANTS
    static const dot_function avx2[] = {dot_int4_avx2, dot_int8_avx2, dot_nf4_avx2, dot_bf16_avx2};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return avx2[kind];
#endif
    static const dot_function plain[] = {dot_int4, dot_int8, dot_nf4, dot_bf16};
    return plain[kind];
}

static row_function row_of(int32_t kind)
{
    static const row_function rows[] = {row_int4, row_int8, row_nf4, row_bf16};
    return rows[kind];
}

/* One call's work, cut into chunks of rows that threads take as they get to them: a thread that the
 * system has put aside delays no more than the chunk it holds. */
typedef struct {
    const weight *w;
    const float *x;
    float *out;
    int64_t tokens, first, rows;
    int dequantize;
} job;

static void run_chunk(const job *j, int64_t chunk)
{
    int64_t begin = chunk * CHUNK_ROWS, end = begin + CHUNK_ROWS;
    if (end > j->rows)
        end = j->rows;
    if (j->dequantize) {
        row_function f = row_of(j->w->kind);
        for (int64_t row = begin; row < end; row++)
            f(j->w, j->first + row, j->out + row * j->w->columns);
        return;
    }
    dot_function f = dot_of(j->w->kind);
    for (int64_t t = 0; t < j->tokens; t++)
        for (int64_t row = begin; row < end; row++)
            j->out[t * j->rows + row] = f(j->w, row, j->x + t * j->w->columns);
}

/* The pool. `next` holds the number of the job in its upper half and the next chunk in its lower one,
 * so that a thread that comes late cannot take a chunk of a job it does not know; while a job is being
 * replaced it holds CLOSED. */
enum { MAX_WORKERS = 255, SPINS = 10000 };
#define CLOSED UINT32_MAX

static struct {
    pthread_mutex_t entry; /* one job at a time */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int workers;
    job current;
    _Atomic int sleepers;
    _Atomic uint32_t turn;
    _Atomic uint64_t next;
    _Atomic int64_t chunks, finished;
} pool = {
    .entry = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_chunks(uint32_t turn)
{
    uint64_t seen = atomic_load(&pool.next);
    while ((uint32_t)(seen >> 32) == turn && (uint32_t)seen != CLOSED &&
           (int64_t)(uint32_t)seen < atomic_load(&pool.chunks))
        if (atomic_compare_exchange_weak(&pool.next, &seen, seen + 1)) {
            run_chunk(&pool.current, (int64_t)(uint32_t)seen);
            atomic_fetch_add(&pool.finished, 1);
            seen = atomic_load(&pool.next);
        }
}

static void *work(void *argument)
{
    uint32_t done = (uint32_t)(uintptr_t)argument;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.turn) == done; i++)
            relax();
        if (atomic_load(&pool.turn) == done) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleepers, 1);
            while (atomic_load(&pool.turn) == done)
                pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        done = atomic_load(&pool.turn);
        take_chunks(done);
    }
    return NULL;
}

static void grow_pool(int workers)
{
    while (pool.workers < workers && pool.workers < MAX_WORKERS) {
        pthread_t thread;
        void *turn = (void *)(uintptr_t)atomic_load(&pool.turn);
        if (pthread_create(&thread, NULL, work, turn))
            return; /* fewer threads do the same work */
        pthread_detach(thread);
        pool.workers++;
    }
}

/* A fork waits for the job that another thread runs; the child has none of its parent's threads. */
static void before_fork(void) { pthread_mutex_lock(&pool.entry); }
static void after_fork(void) { pthread_mutex_unlock(&pool.entry); }
static void in_child(void)
{
    pool.workers = 0;
    atomic_store(&pool.sleepers, 0);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_mutex_unlock(&pool.entry);
}

static void prepare_for_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

static void run(const job *j, int threads)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int64_t chunks = (j->rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    pthread_once(&once, prepare_for_forks);
    pthread_mutex_lock(&pool.entry);
    grow_pool(threads - 1);
    uint32_t turn = atomic_load(&pool.turn) + 1;
    atomic_store(&pool.next, (uint64_t)turn << 32 | CLOSED);
    pool.current = *j;
    atomic_store(&pool.chunks, chunks);
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.next, (uint64_t)turn << 32);
    atomic_store(&pool.turn, turn);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    take_chunks(turn);
    for (int i = 0; atomic_load(&pool.finished) < chunks; i++)
        if (i < SPINS)
            relax();
        else
            sched_yield();
    pthread_mutex_unlock(&pool.entry);
}

/* out[t][n] = sum over k of x[t][k] * w[n][k]; out is [tokens, rows]. Returns 0 if out of memory. */
int qinfer_linear(const weight *w, const float *x, int64_t tokens, float *out, int threads)
{
    float *split = NULL;
    if (w->kind == INT4 || w->kind == NF4) {
        split = malloc((size_t)(tokens * w->columns) * sizeof *split);
        if (!split)
            return 0;
        for (int64_t t = 0; t < tokens; t++)
            split_pairs(split + t * w->columns, x + t * w->columns, w->columns);
    }
    job j = {.w = w, .x = split ? split : x, .out = out, .tokens = tokens, .rows = w->rows};
    run(&j, threads);
    free(split);
    return 1;
}

/* Rows first .. first + rows of the weight in fp32; out is [rows, columns]. */
void qinfer_dequantize(const weight *w, int64_t first, int64_t rows, float *out, int threads)
{
    job j = {.w = w, .out = out, .first = first, .rows = rows, .dequantize = 1};
    run(&j, threads);
}
