/* Products with 4- and 8-bit weights that are repacked once so that a vector holds 8 rows.
 *
 * Activations are rounded to 16 bits: up to 128 of them share a unit, 1/32767 of the largest, less than
 * 16-bit weights can tell. Products are summed in integers, so exactly, per span
 * of columns that share a scale and a unit, and the spans in fp32 in their order. A result depends neither
 * on the other rows and tokens, nor on the number of threads, nor on the processor's variant.
 *
 * A block of 8 rows is, per group of columns, its runs and then 8 scales of 16 bits, and 8 zero points of 16
 * bits if there are any. A run at 4 bits is
 * four vectors of 8 dwords: dword r of vector j has row r's columns 8j … 8j + 7, stored + 8, in nibbles of
 * the order 0 2 4 6 1 3 5 7, so that a shift and a mask give pairs of neighbours in 16 bits each. At 8
 * bits it is 16 half vectors: bytes 2r and 2r + 1 of number p are row r's columns 2p and 2p + 1.
 */
#include "bounds.h"
#include "pool.h"
#include "variants.h"
#include "weight.h"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 8, CHUNK_RUNS = 20, BYTES_AHEAD = 3072 };

/* Where things are in a repacked weight. */
typedef struct {
    int64_t runs, runs_a_group, run_bytes, tail_bytes, block_bytes;
} layout;

static layout layout_of(const weight *w)
{
    layout l = {.runs = (w->columns + RUN - 1) / RUN,
                .runs_a_group = (w->group + RUN - 1) / RUN,
                .run_bytes = w->kind == INT4 ? ROWS * RUN / 2 : ROWS * RUN,
                .tail_bytes = (w->has_zeros ? 4 : 2) * ROWS};
    l.block_bytes = l.runs * l.run_bytes + l.runs / l.runs_a_group * l.tail_bytes;
    return l;
}

static int64_t blocks_of(const weight *w) { return (w->rows + ROWS - 1) / ROWS; }

int64_t packed_bytes(const weight *w) { return blocks_of(w) * layout_of(w).block_bytes; }

int64_t span_runs(const weight *w)
{
    if (w->group == w->columns || w->group % (4 * RUN) == 0)
        return 4;
    return w->group % (2 * RUN) ? 1 : 2;
}

/* ---- repacking ---- */

/* Nibbles 0 … 7 in the order 0 2 4 6 1 3 5 7. */
static uint32_t even_then_odd(uint32_t x)
{
    uint32_t even = x & 0x0f0f0f0f, odd = x >> 4 & 0x0f0f0f0f;
    even = (even | even >> 4) & 0x00ff00ff;
    odd = (odd | odd >> 4) & 0x00ff00ff;
    return ((even | even >> 8) & 0xffff) | (odd | odd >> 8) << 16;
}

typedef struct {
    const weight *w;
    const uint8_t *data;
    const uint16_t *scale;
    const int8_t *zero;
} repacking;

/* A row's place r in a run, from the disk's bytes, 4-bit ones less their zero point; what is beyond the columns
 * is zero. */
static void pack_run(const weight *w, const uint8_t *from, const int8_t *zero, int64_t columns, int64_t r,
                     uint8_t *to)
{
    uint8_t bytes[RUN];
    memset(bytes, w->kind == INT4 ? 0x88 : 0x80, sizeof bytes);
    if (zero)
        for (int64_t i = 0; i < columns; i++)
            bytes[i] = (uint8_t)(0x80 + (from[i / 2] >> i % 2 * 4 & 15) - 8 - *zero);
    else
        memcpy(bytes, from, (size_t)(w->kind == INT4 ? (columns + 1) / 2 : columns));
    if (w->kind == INT4) {
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

static void pack_block(const void *job, int64_t block)
{
    const repacking *j = job;
    const weight *w = j->w;
    const layout l = layout_of(w);
    const int64_t groups = l.runs / l.runs_a_group, rows = smaller(ROWS, w->rows - block * ROWS);
    const int8_t *zero = w->has_zeros ? NULL : j->zero;
    uint8_t *to = w->data + block * l.block_bytes;
    memset(to, 0, (size_t)l.block_bytes);
    for (int64_t run = 0; run < l.runs; run++, to += l.run_bytes) {
        const int64_t first = run * RUN, group = run / l.runs_a_group;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t row = block * ROWS + r, byte = w->kind == INT4 || zero ? first / 2 : first;
            pack_run(w, j->data + row * w->row_bytes + byte, zero ? zero + row * groups + group : NULL,
                     smaller(w->columns - first, RUN), r, to);
        }
        if ((run + 1) % l.runs_a_group)
            continue;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t at = (block * ROWS + r) * groups + group;
            memcpy(to + l.run_bytes + 2 * r, j->scale + at, 2);
            const int16_t point = w->has_zeros ? j->zero[at] : 0;
            if (w->has_zeros)
                memcpy(to + l.run_bytes + 2 * ROWS + 2 * r, &point, 2);
        }
        to += l.tail_bytes;
    }
}

void packed_repack(const weight *w, const uint8_t *data, const uint16_t *scale, const int8_t *zero,
                   int threads)
{
    const repacking job = {w, data, scale, zero};
    qinfer_parallel(pack_block, &job, blocks_of(w), threads);
}

/* ---- products ---- */

/* 16 rows of some runs, unpacked once for many tokens: pairs of columns of 8 and 8 rows, and their scales
 * and zero points, one per span. */
typedef struct {
    _Alignas(64) int16_t pairs[CHUNK_RUNS * RUN / 2][2][2 * ROWS];
    float scales[CHUNK_RUNS][2][ROWS];
    int32_t zeros[CHUNK_RUNS][2][ROWS];
    int64_t has_zeros;
} chunk;

#define CODE "packed_tiles.h"
#include "each_variant.h"

void quantize_token(const input *x, int64_t token) { CHOOSE(quantize)(x, token); }

void clear_token(const input *x, int64_t token)
{
    for (int64_t span = 0; span < x->spans; span++) {
        x->units[place_of(x, token, x->spans, span)] = 0;
        x->sums[place_of(x, token, x->spans, span)] = 0;
    }
    for (int64_t run = 0; run < x->runs; run++)
        memset(x->values + place_of(x, token, x->runs, run) * RUN, 0, RUN * sizeof *x->values);
}

void packed_rows(const product *p, const input *x, int64_t token, int64_t row, int64_t count)
{
    if (x->tokens <= PACKED_FEW)
        CHOOSE(few_tokens)(p, x, row, count);
    else
        CHOOSE(many_tokens)(p, x, token, row, count);
}
