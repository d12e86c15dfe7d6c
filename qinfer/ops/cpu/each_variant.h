/* Includes vectors.h and then CODE, a file of functions named VARIANT(name): once as plain C, and once for
 * each kind of x86 processor where that can be compiled. CHOOSE(name) is the one that this processor
 * runs. */
#define VARIANT(name) name##_plain
#include "vectors.h"
#include CODE
#undef VARIANT

#ifdef HAVE_X86_VARIANTS
#define VARIANT_IS_AVX2

BEGIN_VARIANT("avx2,fma,f16c")
#define VARIANT(name) name##_avx2
#include "vectors.h"
#include CODE
#undef VARIANT
END_VARIANT

#ifdef HAVE_AVX_VNNI
#define DOT_PAIRS _mm256_dpwssd_avx_epi32
BEGIN_VARIANT("avx2,fma,f16c,avxvnni")
#define VARIANT(name) name##_avx_vnni
#include "vectors.h"
#include CODE
#undef VARIANT
END_VARIANT
#undef DOT_PAIRS
#define IF_AVX_VNNI(name) variant() == AVX_VNNI ? name##_avx_vnni:
#else
#define IF_AVX_VNNI(name)
#endif

#ifdef HAVE_AVX512_VNNI
#define DOT_PAIRS _mm256_dpwssd_epi32
BEGIN_VARIANT("avx2,fma,f16c,avx512vl,avx512bw,avx512dq,avx512vnni")
#define VARIANT(name) name##_avx512_vnni
#include "vectors.h"
#include CODE
#undef VARIANT
END_VARIANT
#undef DOT_PAIRS
#define IF_AVX512_VNNI(name) variant() == AVX512_VNNI ? name##_avx512_vnni:
#else
#define IF_AVX512_VNNI(name)
#endif

#undef VARIANT_IS_AVX2
#define CHOOSE(name)                                                                               \
    (IF_AVX512_VNNI(name) IF_AVX_VNNI(name) variant() == AVX2 ? name##_avx2 : name##_plain)
#else
#define CHOOSE(name) name##_plain
#endif
#undef CODE
