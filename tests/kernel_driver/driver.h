/* What the parts of the driver share: random numbers, and memory exactly as large as it must be, so
 * that a sanitizer sees a read beyond the end. */
#ifndef DRIVER_H
#define DRIVER_H

#include <attention.h>
#include <weight.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline unsigned random_below(unsigned *seed, unsigned n)
{
    *seed = *seed * 69069 + 1;
    return (*seed >> 8) % n;
}

static inline float *random_floats(unsigned *seed, int64_t count)
{
    float *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)random_below(seed, 2001) / 100 - 10;
    return x;
}

static inline void require_same(const void *a, const void *b, size_t bytes, const char *what)
{
    if (memcmp(a, b, bytes)) {
        fprintf(stderr, "%s differs\n", what);
        exit(3);
    }
}

/* A weight of random bytes; per_row: without groups. */
typedef struct {
    weight w;
    void *memory[4];
} random_weight;

random_weight new_weight(unsigned *seed, int kind, int64_t rows, int64_t columns, int per_row);
void free_weight(const random_weight *m);

/* The keys or values of a cache, all zero. */
enum { SEGMENTS = 3, WIDTH = 9 }; /* blocks of each segment's table */
side new_side(unsigned *seed, int64_t head_dim, int64_t kv_heads, int is_keys);
side copy_of(const side *from, int64_t kv_heads);
void free_side(const side *s);
void require_same_side(const side *a, const side *b, int64_t kv_heads);

void check_linear(unsigned *seed);
void check_attention(unsigned *seed);
void check_decode(unsigned *seed);
void check_rows(unsigned *seed);
void check_choice(unsigned *seed);

#endif
