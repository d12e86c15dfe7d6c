/* The smaller and the larger of two sizes. */
#ifndef QINFER_BOUNDS_H
#define QINFER_BOUNDS_H

#include <stdint.h>

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
