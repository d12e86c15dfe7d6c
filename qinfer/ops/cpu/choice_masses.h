/* Logits as depths below their peak, and those as masses; included for each variant, behind vectors.h.
 *
 * A mass is e^-depth in units of 2^-40, cut to an integer: 20 bits of it, and the 20 bits below. */

/* Of 8 logits or fewer, the rest infinite; never negative zero. */
INLINE v8 VARIANT(depths)(const float *x, int64_t count, float peak, float temperature)
{
    float part[8];
    for (int j = 0; count < 8 && j < 8; j++)
        part[j] = j < count ? x[j] : -INFINITY;
    const v8 depth = (peak - VARIANT(load)(count < 8 ? part : x)) / temperature;
    return (v8)((v8i)depth & INT32_MAX);
}

INLINE void VARIANT(mass)(v8 depth, v8i *high, v8i *low)
{
    const v8 scaled = VARIANT(exp)(-depth) * 0x1p20f;
    *high = __builtin_convertvector(scaled, v8i);
    *low = __builtin_convertvector((scaled - __builtin_convertvector(*high, v8)) * 0x1p20f, v8i);
}

/* The mass of at most PIECE logits. */
static int64_t VARIANT(mass_of)(const float *x, int64_t count, float peak, float temperature)
{
    v8i high = {0}, low = {0};
    for (int64_t i = 0; i < count; i += 8) {
        v8i h, l;
        VARIANT(mass)(VARIANT(depths)(x + i, count - i, peak, temperature), &h, &l);
        high += h;
        low += l;
    }
    int64_t total = 0;
    for (int j = 0; j < 8; j++)
        total += ((int64_t)high[j] << 20) + low[j];
    return total;
}

/* The bits of depths; `depth` has room for a multiple of 8. */
static void VARIANT(depths_of)(const float *x, int64_t count, float peak, float temperature, int32_t *depth)
{
    for (int64_t i = 0; i < count; i += 8)
        VARIANT(store)((float *)(depth + i), VARIANT(depths)(x + i, count - i, peak, temperature));
}

/* Masses of depths, whose bits are given. Both arrays have room for a multiple of 8. */
static void VARIANT(masses)(const int32_t *depth, int64_t count, int64_t *mass)
{
    for (int64_t i = 0; i < count; i += 8) {
        v8i high, low;
        VARIANT(mass)(VARIANT(load)((const float *)(depth + i)), &high, &low);
        for (int j = 0; j < 8; j++)
            mass[i + j] = ((int64_t)high[j] << 20) + low[j];
    }
}

/* The first of SPAN numbers, from the i-th on, among which there is one that is not less than the least. */
static int64_t VARIANT(find)(const float *x, int64_t i, int64_t count, float least)
{
    for (; i + SPAN <= count; i += SPAN) {
        v8i is_there = {0};
        for (int j = 0; j < SPAN; j += 8)
            is_there |= VARIANT(load)(x + i + j) >= least;
        if (is_there[0] | is_there[1] | is_there[2] | is_there[3] | is_there[4] | is_there[5] | is_there[6] |
            is_there[7])
            break;
    }
    return i;
}
