/* Vectors of 8 floats in the compiler's own notation, and what it has no notation for.
 *
 * Code over them is a file of its own that is included for each variant (see each_variant.h), with
 * VARIANT(name) naming its functions and this file included before it. Every operation works lane by
 * lane, so an element's result does not depend on its neighbours or its place in a vector.
 */
#ifdef VARIANT

INLINE v8 VARIANT(load)(const float *p) { return *(const v8_in_memory *)p; }

INLINE void VARIANT(store)(float *p, v8 x) { *(v8_in_memory *)p = x; }

INLINE v8 VARIANT(splat)(float x) { return (v8){x, x, x, x, x, x, x, x}; }

INLINE v8i VARIANT(splat_int)(int32_t x) { return (v8i){x, x, x, x, x, x, x, x}; }

/* a * b + c */
INLINE v8 VARIANT(madd)(v8 a, v8 b, v8 c)
{
#ifdef VARIANT_IS_AVX2
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* The same, rounded once by every processor. */
INLINE v8 VARIANT(fused)(v8 a, v8 b, v8 c)
{
#if defined VARIANT_IS_AVX2
    return VARIANT(madd)(a, b, c);
#elif defined HAVE_NEON
    float32x4_t x[2], y[2], z[2];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    memcpy(z, &c, sizeof z);
    for (int i = 0; i < 2; i++)
        z[i] = vfmaq_f32(z[i], x[i], y[i]);
    memcpy(&c, z, sizeof c);
    return c;
#else
    for (int j = 0; j < 8; j++)
        c[j] = fmaf(a[j], b[j], c[j]);
    return c;
#endif
}

INLINE v8 VARIANT(load_fp16)(const uint16_t *p)
{
#ifdef VARIANT_IS_AVX2
    return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    v8 x;
    for (int j = 0; j < 8; j++)
        x[j] = from_fp16(p[j]);
    return x;
#endif
}

/* Round to 16 bits. */
INLINE void VARIANT(store_fp16)(uint16_t *p, v8 x)
{
#ifdef VARIANT_IS_AVX2
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int j = 0; j < 8; j++)
        p[j] = to_fp16(x[j]);
#endif
}

INLINE v8 VARIANT(load_bf16)(const uint16_t *p)
{
#ifdef VARIANT_IS_AVX2
    return (v8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    v8 x;
    for (int j = 0; j < 8; j++)
        x[j] = from_bf16(p[j]);
    return x;
#endif
}

INLINE v8 VARIANT(load_int8)(const int8_t *p)
{
#ifdef VARIANT_IS_AVX2
    return (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    v8 x;
    for (int j = 0; j < 8; j++)
        x[j] = (float)p[j];
    return x;
#endif
}

/* The lower or upper nibbles of 8 bytes. */
INLINE v8 VARIANT(load_nibbles)(const uint8_t *p, int upper)
{
#ifdef VARIANT_IS_AVX2
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return (v8)_mm256_cvtepi32_ps(upper ? _mm256_srli_epi32(bytes, 4)
                                        : _mm256_and_si256(bytes, _mm256_set1_epi32(15)));
#else
    v8 x;
    for (int j = 0; j < 8; j++)
        x[j] = (float)(upper ? p[j] >> 4 : p[j] & 15);
    return x;
#endif
}

/* 16 signed bytes in 16 bits each. */
INLINE v16s VARIANT(load_16_int8)(const int8_t *p)
{
#ifdef VARIANT_IS_AVX2
    return (v16s)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
    v16s x;
    for (int j = 0; j < 16; j++)
        x[j] = p[j];
    return x;
#endif
}

/* Both vectors rounded to the nearest, at most 32767; they are above -32769 and below 2^22. */
INLINE v16s VARIANT(round_int16)(v8 a, v8 b)
{
    const v8 shift = VARIANT(splat)(0x1.8p23f);
    const v8i x = (v8i)(a + shift) - (v8i)shift, y = (v8i)(b + shift) - (v8i)shift;
#ifdef VARIANT_IS_AVX2
    return (v16s)_mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x, (__m256i)y), 0xd8);
#else
    v16s z;
    for (int j = 0; j < 8; j++) {
        z[j] = (int16_t)(x[j] > INT16_MAX ? INT16_MAX : x[j]);
        z[8 + j] = (int16_t)(y[j] > INT16_MAX ? INT16_MAX : y[j]);
    }
    return z;
#endif
}

/* Store lanes that fit in 8 bits. */
INLINE void VARIANT(store_int8)(int8_t *p, v8i x)
{
    typedef int8_t v8c __attribute__((vector_size(8)));
    const v8c narrow = __builtin_convertvector(x, v8c);
    memcpy(p, &narrow, sizeof narrow);
}

/* sum[r] + w[2r] * pair[0] + w[2r + 1] * pair[1], without overflow on the way. */
INLINE v8i VARIANT(dot_pairs)(v8i sum, v16s w, const int16_t *pair)
{
#if defined VARIANT_IS_AVX2
    int32_t both;
    memcpy(&both, pair, sizeof both);
    const __m256i x = _mm256_set1_epi32(both);
#if defined DOT_PAIRS
    return (v8i)DOT_PAIRS((__m256i)sum, (__m256i)w, x);
#else
    sum += (v8i)_mm256_madd_epi16((__m256i)w, x);
    __asm__("" : "+x"(sum)); /* else gcc computes products first, to add them later, and spills them */
    return sum;
#endif
#elif defined HAVE_NEON
    int32_t both;
    int16x8_t half[2];
    int32x4_t sums[2];
    memcpy(&both, pair, sizeof both);
    memcpy(half, &w, sizeof half);
    memcpy(sums, &sum, sizeof sums);
    const int16x8_t x = vreinterpretq_s16_s32(vdupq_n_s32(both));
    for (int i = 0; i < 2; i++)
        sums[i] = vaddq_s32(sums[i], vpaddq_s32(vmull_s16(vget_low_s16(half[i]), vget_low_s16(x)),
                                                vmull_high_s16(half[i], x)));
    memcpy(&sum, sums, sizeof sum);
    return sum;
#else
    for (int r = 0; r < 8; r++)
        sum[r] += w[2 * r] * pair[0] + w[2 * r + 1] * pair[1];
    return sum;
#endif
}

INLINE v8 VARIANT(select)(v8i mask, v8 a, v8 b) { return (v8)((mask & (v8i)a) | (~mask & (v8i)b)); }

/* NaN is larger than any number. */
INLINE v8 VARIANT(max)(v8 a, v8 b)
{
#ifdef VARIANT_IS_AVX2 /* maxps is its second operand where one of them is NaN */
    const __m256 nan = _mm256_cmp_ps((__m256)a, (__m256)a, _CMP_UNORD_Q);
    return (v8)_mm256_blendv_ps(_mm256_max_ps((__m256)a, (__m256)b), (__m256)a, nan);
#else
    return VARIANT(select)((a > b) | (a != a), a, b);
#endif
}

/* The largest and the sum of the lanes, the sum always in this order. */
INLINE float VARIANT(largest)(v8 x)
{
    x = VARIANT(max)(x, (v8){x[4], x[5], x[6], x[7], x[0], x[1], x[2], x[3]});
    x = VARIANT(max)(x, (v8){x[2], x[3], x[0], x[1], x[6], x[7], x[4], x[5]});
    return VARIANT(max)(x, (v8){x[1], x[0], x[3], x[2], x[5], x[4], x[7], x[6]})[0];
}

INLINE float VARIANT(sum)(v8 x)
{
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* The sums of 8 vectors, in the same order. */
INLINE v8 VARIANT(sum_each)(const v8 x[8])
{
    v8 total;
#ifdef VARIANT_IS_AVX2 /* halves, then pairs, then neighbours, of two vectors in one addition */
    __m256 half[4], pair[2];
    for (int i = 0; i < 4; i++) {
        const __m256 a = (__m256)x[i], b = (__m256)x[i + 4];
        half[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int i = 0; i < 2; i++) {
        const __m256d a = _mm256_castps_pd(half[2 * i]), b = _mm256_castps_pd(half[2 * i + 1]);
        pair[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                                _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    total = (v8)_mm256_add_ps(_mm256_shuffle_ps(pair[0], pair[1], 0x88),
                              _mm256_shuffle_ps(pair[0], pair[1], 0xdd));
#else
    for (int i = 0; i < 8; i++)
        total[i] = VARIANT(sum)(x[i]);
#endif
    return total;
}

/* e^x to 2 units in the last place; 0 below -87, where results leave the normal range. 2^n · e^r with
 * |r| <= ln 2 / 2, ln 2 in two parts so that r is exact, and the series of e^r to the 7th power. */
INLINE v8 VARIANT(exp)(v8 x)
{
    const v8 low = VARIANT(splat)(-87), high = VARIANT(splat)(88), shift = VARIANT(splat)(0x1.8p23f);
    const v8i vanishes = x < low;
    x = VARIANT(select)(x > high, high, VARIANT(select)(vanishes, low, x));
    v8 n = VARIANT(madd)(x, VARIANT(splat)(0x1.715476p+0f), shift);
    const v8i exponent = ((v8i)n - (v8i)shift + 127) << 23;
    n -= shift;
    v8 r = VARIANT(madd)(n, VARIANT(splat)(-0x1.62e4p-1f), x);
    r = VARIANT(madd)(n, VARIANT(splat)(-0x1.7f7d1cp-20f), r);
    v8 y = VARIANT(splat)(1.f / 5040);
    static const float terms[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1, 1};
    for (int i = 0; i < 7; i++)
        y = VARIANT(madd)(y, r, VARIANT(splat)(terms[i]));
    return VARIANT(select)(vanishes, VARIANT(splat)(0), y * (v8)exponent);
}

#endif
