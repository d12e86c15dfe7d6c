/* 16-bit floats in plain C. Rounding is to the nearest, ties to even, as the hardware does it. */
#ifndef QINFER_HALF_H
#define QINFER_HALF_H

#include <stdint.h>
#include <string.h>

static inline float from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline float from_fp16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    float value;
    if (rest >= 0x0400 && rest < 0x7c00) {
        wide = sign | ((rest << 13) + 0x38000000);
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    if (rest < 0x0400) { /* subnormal: a multiple of 2^-24 */
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    wide = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t to_fp16(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    const uint16_t sign = (uint16_t)(wide >> 16 & 0x8000);
    wide &= 0x7fffffff;
    if (wide > 0x7f800000)
        return sign | 0x7e00 | (uint16_t)(wide >> 13 & 0x3ff);
    if (wide >= 0x477ff000) /* rounds beyond 65504 */
        return sign | 0x7c00;
    if (wide < 0x38800000) { /* below 2^-14: the sum has 2^-24 as the unit of its last place */
        float sum, magnitude;
        memcpy(&magnitude, &wide, sizeof magnitude);
        sum = magnitude + 0.5f;
        memcpy(&wide, &sum, sizeof wide);
        return sign | (uint16_t)(wide - 0x3f000000);
    }
    return sign | (uint16_t)((wide - 0x38000000 + 0xfff + (wide >> 13 & 1)) >> 13);
}

#endif
