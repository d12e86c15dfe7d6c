/* Norms and nonlinearities on rows of floats; included for each variant, behind vectors.h. */

/* Up to 8 floats, the rest 0. */
INLINE v8 VARIANT(load_some)(const float *p, int64_t left)
{
    float part[8] = {0};
    if (left >= 8)
        return VARIANT(load)(p);
    memcpy(part, p, (size_t)left * sizeof *part);
    return VARIANT(load)(part);
}

INLINE void VARIANT(store_some)(float *p, v8 x, int64_t left)
{
    float part[8];
    if (left >= 8) {
        VARIANT(store)(p, x);
        return;
    }
    VARIANT(store)(part, x);
    memcpy(p, part, (size_t)left * sizeof *part);
}

static void VARIANT(copy)(const rows *c, const float *x, float *y)
{
    memcpy(y, x, (size_t)c->size * sizeof *y);
}

static void VARIANT(rotate)(float *x, int64_t half, const float *cos, const float *sin)
{
    for (int64_t i = 0; i < half; i += 8) {
        const int64_t left = half - i;
        const v8 a = VARIANT(load_some)(x + i, left), b = VARIANT(load_some)(x + half + i, left);
        const v8 c = VARIANT(load_some)(cos + i, left), s = VARIANT(load_some)(sin + i, left);
        VARIANT(store_some)(x + i, a * c - b * s, left);
        VARIANT(store_some)(x + half + i, b * c + a * s, left);
    }
}

/* The largest of some numbers; NaN if one is. */
static float VARIANT(most)(const float *x, int64_t count)
{
    v8 most = VARIANT(splat)(-INFINITY);
    const int64_t whole = count / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8)
        most = VARIANT(max)(VARIANT(load)(x + i), most);
    float largest = VARIANT(largest)(most);
    for (int64_t i = whole; i < count; i++)
        if (!(x[i] <= largest) && !isnan(largest))
            largest = x[i];
    return largest;
}

static void VARIANT(rms_norm)(const rows *c, const float *x, float *y)
{
    v8 squares = VARIANT(splat)(0);
    for (int64_t i = 0; i < c->size; i += 8) {
        const v8 a = VARIANT(load_some)(x + i, c->size - i);
        squares = VARIANT(madd)(a, a, squares);
    }
    const float mean = VARIANT(sum)(squares) / (float)c->size;
    const v8 factor = VARIANT(splat)(1 / sqrtf(mean + c->eps));
    for (int64_t i = 0; i < c->size; i += 8) {
        const int64_t left = c->size - i;
        const v8 a = VARIANT(load_some)(x + i, left), w = VARIANT(load_some)(c->weight + i, left);
        VARIANT(store_some)(y + i, a * factor * w, left);
    }
}

static void VARIANT(layer_norm)(const rows *c, const float *x, float *y)
{
    v8 sum = VARIANT(splat)(0), squares = sum;
    for (int64_t i = 0; i < c->size; i += 8)
        sum += VARIANT(load_some)(x + i, c->size - i);
    const v8 mean = VARIANT(splat)(VARIANT(sum)(sum) / (float)c->size);
    for (int64_t i = 0; i < c->size; i += 8) {
        const int64_t left = c->size - i;
        VARIANT(store_some)(y + i, VARIANT(load_some)(x + i, left) - mean, left);
        const v8 a = VARIANT(load_some)(y + i, left);
        squares = VARIANT(madd)(a, a, squares);
    }
    const float variance = VARIANT(sum)(squares) / (float)c->size;
    const v8 factor = VARIANT(splat)(1 / sqrtf(variance + c->eps));
    for (int64_t i = 0; i < c->size; i += 8) {
        const int64_t left = c->size - i;
        const v8 a = VARIANT(load_some)(y + i, left), w = VARIANT(load_some)(c->weight + i, left);
        VARIANT(store_some)(y + i, a * factor * w + VARIANT(load_some)(c->bias + i, left), left);
    }
}

INLINE v8 VARIANT(activate)(v8 x, int kind)
{
    const v8 zero = VARIANT(splat)(0), one = VARIANT(splat)(1);
    v8 y = x;
    switch (kind) {
    case RELU: return VARIANT(select)(x < zero, zero, x);
    case GELU:
        for (int j = 0; j < 8; j++)
            y[j] = x[j] * 0.5f * (1 + erff(x[j] * 0x1.6a09e6p-1f));
        return y;
    case GELU_TANH: /* x · (1 + tanh u) / 2 = x · sigmoid(2u), u = sqrt(2/π) · (x + 0.044715 x³) */
        y = (x + 0.044715f * x * x * x) * 0x1.988454p+0f;
        break;
    }
    return x / (one + VARIANT(exp)(-y));
}

static void VARIANT(activate_row)(const rows *c, const float *x, float *y)
{
    const float *up = c->up ? c->up + (x - c->x) : NULL;
    for (int64_t i = 0; i < c->size; i += 8) {
        const int64_t left = c->size - i;
        v8 a = VARIANT(activate)(VARIANT(load_some)(x + i, left), c->kind);
        if (up)
            a *= VARIANT(load_some)(up + i, left);
        VARIANT(store_some)(y + i, a, left);
    }
}
