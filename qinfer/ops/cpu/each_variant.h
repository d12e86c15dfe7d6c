/* Includes vectors.h and then CODE, a file of functions named VARIANT(name): once as plain C, and once for
 * each kind of x86 processor where that can be compiled. CHOOSE(name) is the one that this processor
 * runs. */
#define VARIANT(name) name##_plain
#include "vectors.h"
#include CODE
#undef VARIANT

#ifdef HAVE_X86_VARIANTS
#define VARIANT_IS_AVX2

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define VARIANT(name) name##_avx2
#include "vectors.h"
#include CODE
#undef VARIANT
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define VARIANT_IS_AVX512_VNNI
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c,avx512vl,avx512bw,avx512dq,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512vl,avx512bw,avx512dq,avx512vnni")
#endif
#define VARIANT(name) name##_avx512_vnni
#include "vectors.h"
#include CODE
#undef VARIANT
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef VARIANT_IS_AVX512_VNNI

#undef VARIANT_IS_AVX2
#define CHOOSE(name)                                                                               \
    (variant() == AVX512_VNNI ? name##_avx512_vnni : variant() == AVX2 ? name##_avx2 : name##_plain)
#else
#define CHOOSE(name) name##_plain
#endif
#undef CODE
