/* What the kernels are on this processor. */
#include "variants.h"

/* The variant that runs here; a constant string. */
const char *qinfer_variant(void)
{
    static const char *const names[] = {"plain", "avx2", "avx_vnni", "avx512_vnni"};
    return names[variant()];
}
