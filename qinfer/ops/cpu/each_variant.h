/* Includes vectors.h and then CODE, a file of functions named VARIANT(name): once as plain C, and once for
 * AVX2 where that can be compiled. CHOOSE(name) is the one that this processor runs. */
#define VARIANT(name) name##_plain
#include "vectors.h"
#include CODE
#undef VARIANT

#ifdef HAVE_AVX2_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define VARIANT(name) name##_avx2
#define VARIANT_IS_AVX2
#include "vectors.h"
#include CODE
#undef VARIANT_IS_AVX2
#undef VARIANT
#pragma GCC pop_options
#define CHOOSE(name) (has_avx2() ? name##_avx2 : name##_plain)
#else
#define CHOOSE(name) name##_plain
#endif
#undef CODE
