/* Vectors in the compiler's own notation, and which variants of the code over them there are. */
#ifndef QINFER_VARIANTS_H
#define QINFER_VARIANTS_H

#include "half.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__) && !defined(QINFER_PLAIN) /* to test without */
#include <immintrin.h>
#define HAVE_X86_VARIANTS 1
#ifndef QINFER_AVX2 /* to test without newer ones */
#define HAVE_AVX512_VNNI 1
#if (defined(__clang__) && __clang_major__ >= 20) || (!defined(__clang__) && __GNUC__ >= 11)
#define HAVE_AVX_VNNI 1 /* older compilers do not know it, or not how to ask for it */
#endif
#endif
#elif defined(__aarch64__) && !defined(QINFER_PLAIN)
#include <arm_neon.h>
#define HAVE_NEON 1 /* every such processor has it, so the plain variant uses it */
#endif

/* Before a loop: so many rounds of it at once. */
#define PRAGMA(words) _Pragma(#words)
#ifdef __clang__
#define UNROLL(n) PRAGMA(unroll n)
#else
#define UNROLL(n) PRAGMA(GCC unroll n)
#endif

/* Around functions for processors with these features. */
#ifdef __clang__
#define BEGIN_VARIANT(features)                                                                    \
    PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_VARIANT PRAGMA(clang attribute pop)
#else
#define BEGIN_VARIANT(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_VARIANT PRAGMA(GCC pop_options)
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef int16_t v16s __attribute__((vector_size(32)));
typedef uint16_t v16u __attribute__((vector_size(32)));
typedef float v8_in_memory __attribute__((vector_size(32), aligned(4), may_alias));
typedef int16_t v16s_in_memory __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t v16u_in_memory __attribute__((vector_size(32), aligned(1), may_alias));

/* The variants, the later ones for newer processors. */
enum { PLAIN, AVX2, AVX_VNNI, AVX512_VNNI };

/* The one that this processor runs. */
static inline int variant(void)
{
#ifdef HAVE_X86_VARIANTS
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return PLAIN;
#ifdef HAVE_AVX512_VNNI
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        return AVX512_VNNI;
#endif
#ifdef HAVE_AVX_VNNI
    if (__builtin_cpu_supports("avxvnni"))
        return AVX_VNNI;
#endif
    return AVX2;
#else
    return PLAIN;
#endif
}

#endif
