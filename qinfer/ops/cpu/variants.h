/* Which variants of vector code there are, and which one this processor runs. */
#ifndef QINFER_VARIANTS_H
#define QINFER_VARIANTS_H

#include "half.h"

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__) && !defined(QINFER_PLAIN) /* to test without */
#include <immintrin.h>
#define HAVE_AVX2_VARIANTS 1
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef float v8_in_memory __attribute__((vector_size(32), aligned(4), may_alias));

static inline int has_avx2(void)
{
#ifdef HAVE_AVX2_VARIANTS
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

#endif
