/* What the parts of the driver share: random numbers, and memory exactly as large as it must be, so
 * that a sanitizer sees a read beyond the end. */
#ifndef DRIVER_H
#define DRIVER_H

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

void check_linear(unsigned *seed);
void check_attention(unsigned *seed);
void check_rows(unsigned *seed);

#endif
