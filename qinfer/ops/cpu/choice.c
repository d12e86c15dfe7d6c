/* The choice of tokens: the likeliest, or drawn ones without sorting the vocabulary.
 *
 * What the filters can keep lies within some reach of the peak: mostly some dozens of tokens, which are
 * listed. The filters' limits are found among them by bisection, over the bits of the numbers themselves. */
#include "choice.h"

#include "bounds.h"
#include "pool.h"
#include "rows.h"
#include "variants.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

/* DRAW_COLUMNS and DRAW_UNIFORMS must match COLUMNS and UNIFORMS in qinfer/ops/draws.py. */
enum { PIECE = 1024, SPAN = 32, DRAW_UNIFORMS = 32, DRAW_COLUMNS = 4 + DRAW_UNIFORMS };

#define CODE "choice_masses.h"
#include "each_variant.h"

/* A row that is drawn from. */
typedef struct {
    const float *x;
    int64_t count;
    float peak, temperature;
} row;

/* Tokens that may be drawn, by their ids. */
typedef struct {
    int32_t *id, *depth; /* depth: its bits, which order like it */
    int64_t *mass;
    int32_t *place; /* to search in, and the amounts there */
    int64_t *amount;
    int64_t count, room;
} list;

static int32_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Integers that order like the numbers, the largest first. */
static int32_t rank_of(float x)
{
    const int32_t bits = bits_of(x == 0 ? 0 : x);
    return -(bits < 0 ? bits ^ INT32_MAX : bits);
}

static int64_t row_mass(const row *r)
{
    int64_t total = 0;
    for (int64_t i = 0; i < r->count; i += PIECE)
        total += CHOOSE(mass_of)(r->x + i, smaller(PIECE, r->count - i), r->peak, r->temperature);
    return total;
}

static int has_room(list *few, int64_t count)
{
    if (count <= few->room)
        return 1;
    few->room = larger(2 * few->room, 256);
    few->id = realloc(few->id, (size_t)few->room * sizeof *few->id);
    few->depth = realloc(few->depth, (size_t)few->room * sizeof *few->depth);
    return few->id && few->depth;
}

/* List what lies within a reach; the mass of it, or -1 if out of memory. */
static int64_t collect(const row *r, float reach, list *few)
{
    /* What is below this is out of reach, however depths are rounded. */
    const float least = r->peak - reach * r->temperature * (1 + 0x1p-20f) - fabsf(r->peak) * 0x1p-20f;
    const int32_t most = bits_of(reach);
    int32_t depth[SPAN];
    few->count = 0;
    for (int64_t i = 0; (i = CHOOSE(find)(r->x, i, r->count, least)) < r->count; i += SPAN) {
        if (!has_room(few, few->count + SPAN))
            return -1;
        const int64_t size = smaller(SPAN, r->count - i);
        CHOOSE(depths_of)(r->x + i, size, r->peak, r->temperature, depth);
        for (int64_t j = 0; j < size; j++) {
            few->id[few->count] = (int32_t)(i + j);
            few->depth[few->count] = depth[j];
            few->count += depth[j] <= most;
        }
    }
    if (!has_room(few, few->count + 8))
        return -1;
    free(few->mass);
    free(few->place);
    few->mass = malloc((size_t)few->room * 2 * sizeof *few->mass);
    few->place = malloc((size_t)few->room * sizeof *few->place);
    if (!few->mass || !few->place)
        return -1;
    few->amount = few->mass + few->room;
    memset(few->depth + few->count, 0, 8 * sizeof *few->depth);
    CHOOSE(masses)(few->depth, few->count, few->mass);
    int64_t total = 0;
    for (int64_t i = 0; i < few->count; i++)
        total += few->mass[i];
    return total;
}

/* The place down to which numbers have this amount in all; beyond them if they have less. By bisection between
 * numbers that there are, with those on the wrong side left out. Reorders both arrays. */
static int64_t search(int32_t *place, int64_t *amount, int64_t count, int64_t needed)
{
    int64_t low = INT32_MIN, high = INT32_MAX;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        int64_t before = 0, sum = 0, last = INT32_MIN, next = INT32_MAX;
        for (int64_t i = 0; i < count; i++) {
            const int32_t p = place[i];
            const int64_t a = amount[i];
            if (p <= middle) {
                last = larger(last, p);
                sum += a;
                place[i] = place[before], amount[i] = amount[before];
                place[before] = p, amount[before++] = a;
            } else {
                next = smaller(next, p);
            }
        }
        if (sum >= needed) {
            high = last;
            count = before;
        } else {
            low = next;
            needed -= sum;
            place += before, amount += before, count -= before;
        }
    }
    return low;
}

/* Drop what is not among the k likeliest, but not their equals; the mass that is left. */
static int64_t keep_top_k(const row *r, list *few, int64_t k)
{
    for (int64_t i = 0; i < few->count; i++) {
        few->place[i] = rank_of(r->x[few->id[i]]);
        few->amount[i] = 1;
    }
    const int64_t limit = search(few->place, few->amount, few->count, k);
    int64_t kept = 0, total = 0;
    for (int64_t i = 0; i < few->count; i++) {
        if (rank_of(r->x[few->id[i]]) > limit)
            continue;
        few->id[kept] = few->id[i];
        few->depth[kept] = few->depth[i];
        few->mass[kept] = few->mass[i];
        total += few->mass[kept++];
    }
    few->count = kept;
    return total;
}

/* The mass that top_p needs; not nothing, as it always keeps the likeliest. */
static int64_t share(double p, int64_t total)
{
    return larger((int64_t)ceil(p * (double)total), 1);
}

/* Where the cumulative mass passes a number of [0, 1). */
static int64_t target_of(double uniform, int64_t total)
{
    return smaller((int64_t)(uniform * (double)total), total - 1);
}

static int64_t draw_from_all(const row *r, double uniform)
{
    int64_t left = target_of(uniform, row_mass(r));
    for (int64_t i = 0; i < r->count; i += PIECE) {
        const int64_t size = smaller(PIECE, r->count - i);
        const int64_t its = CHOOSE(mass_of)(r->x + i, size, r->peak, r->temperature);
        if (its <= left) {
            left -= its;
            continue;
        }
        int32_t depth[PIECE];
        int64_t mass[PIECE], j = 0;
        CHOOSE(depths_of)(r->x + i, size, r->peak, r->temperature, depth);
        CHOOSE(masses)(depth, size, mass);
        while (mass[j] <= left)
            left -= mass[j++];
        return i + j;
    }
    return 0; /* a row has a peak, and that a mass */
}

/* Down to a depth, of which the first `ties` are kept, by a number of [0, 1). */
static int64_t draw_from(const list *few, int64_t limit, int64_t ties, int64_t total, double uniform)
{
    int64_t left = target_of(uniform, total);
    for (int64_t i = 0; i < few->count; i++) {
        if (few->depth[i] > limit || (few->depth[i] == limit && ties-- <= 0))
            continue;
        if (few->mass[i] > left)
            return few->id[i];
        left -= few->mass[i];
    }
    return 0;
}

/* What is listed down to this mass, and to this logarithm of a probability; and a draw. */
static int64_t draw_filtered(const list *few, int64_t needed, float floor, double uniform)
{
    int64_t reached = INT32_MAX;
    if (needed < INT64_MAX) {
        memcpy(few->place, few->depth, (size_t)few->count * sizeof *few->place);
        memcpy(few->amount, few->mass, (size_t)few->count * sizeof *few->amount);
        reached = search(few->place, few->amount, few->count, needed);
    }
    const int64_t lowest = bits_of(0 - floor), limit = smaller(reached, lowest);
    int64_t above = 0, each = 0, ties = 0;
    for (int64_t i = 0; i < few->count; i++) {
        if (few->depth[i] < limit)
            above += few->mass[i];
        if (few->depth[i] == limit) {
            each = few->mass[i];
            ties++;
        }
    }
    if (reached <= lowest)
        ties = smaller(larger((needed - above + each - 1) / larger(each, 1), 1), ties);
    return draw_from(few, limit, ties, above + ties * each, uniform);
}

/* A row's token; -1 if out of memory. */
static int64_t draw(const row *r, const double *settings, double uniform)
{
    const int64_t top_k = (int64_t)settings[1];
    const double top_p = settings[2];
    const float floor = (float)settings[3];
    if (!top_k && top_p >= 1 && floor == -INFINITY)
        return draw_from_all(r, uniform);
    int64_t needed = top_p < 1 && !top_k ? share(top_p, row_mass(r)) : 0, total = 0;
    list few = {0};
    for (float reach = 8; reach <= 16; reach *= 2) {
        total = collect(r, reach, &few);
        if (total < 0 || (top_k ? few.count >= top_k : top_p < 1 ? total >= needed : -floor <= reach))
            break;
        if (reach == 16)
            total = collect(r, INFINITY, &few);
    }
    if (total >= 0 && top_k)
        total = keep_top_k(r, &few, top_k);
    if (top_p >= 1)
        needed = INT64_MAX;
    else if (top_k)
        needed = share(top_p, total);
    const int64_t token = total < 0 ? -1 : draw_filtered(&few, needed, floor, uniform);
    free(few.id);
    free(few.depth);
    free(few.mass);
    free(few.place);
    return token;
}

typedef struct {
    const choice *c;
    atomic_int failed;
} work;

static void pass(const void *job, int64_t i)
{
    work *w = (work *)job;
    const choice *c = w->c;
    row r = {.x = c->logits + i * c->stride, .count = c->vocab_size};
    c->chosen[i] = likeliest(r.x, r.count, &r.peak);
    c->broken[i] = !isfinite(r.peak);
    const double *settings = c->draws ? c->draws + i * DRAW_COLUMNS : NULL;
    if (c->broken[i] || !settings || settings[0] == 0)
        return;
    r.temperature = (float)settings[0];
    const int64_t token = draw(&r, settings, settings[4 + c->positions[i] % DRAW_UNIFORMS]);
    if (token < 0)
        atomic_store(&w->failed, 1);
    else
        c->chosen[i] = token;
}

int qinfer_choose(const choice *c, int threads)
{
    work w = {.c = c};
    qinfer_parallel(pass, &w, c->rows, threads);
    return !atomic_load(&w.failed);
}
