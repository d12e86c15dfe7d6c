/* What a processor with AVX2 multiplies at most, out of registers, beside which kernels can be set.
 *
 *     gcc -O3 -mavx2 -mfma -pthread scripts/peaks.c -o peaks && ./peaks 2
 *
 * Prints for one thread, and for as many as named, the best of five runs: multiplications and additions of
 * fp32; of 16-bit integers to 32-bit sums, as packed.c does them for 4- and 8-bit weights; and of 8-bit
 * integers to 16-bit sums, which overflow unless activations have 8 bits.
 */
#define _POSIX_C_SOURCE 200809L
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifndef REPETITIONS /* to test with fewer */
#define REPETITIONS 20000000
#endif

enum { SUMS = 10, MAX_THREADS = 256 };

static void *fp32(void *unused)
{
    __m256 sums[SUMS] = {0}, x = _mm256_set1_ps(1.0001f);
    for (long n = 0; n < REPETITIONS; n++)
#pragma GCC unroll 10
        for (int i = 0; i < SUMS; i++) {
            sums[i] = _mm256_fmadd_ps(x, x, sums[i]);
            __asm__ volatile("" : "+x"(x), "+x"(sums[i]));
        }
    return unused;
}

static void *int16(void *unused)
{
    __m256i sums[SUMS] = {0}, x = _mm256_set1_epi16(3);
    for (long n = 0; n < REPETITIONS; n++)
#pragma GCC unroll 10
        for (int i = 0; i < SUMS; i++) {
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(x, x));
            __asm__ volatile("" : "+x"(x), "+x"(sums[i]));
        }
    return unused;
}

static void *int8(void *unused)
{
    __m256i sums[SUMS] = {0}, x = _mm256_set1_epi8(3);
    for (long n = 0; n < REPETITIONS; n++)
#pragma GCC unroll 10
        for (int i = 0; i < SUMS; i++) {
            sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(x, x));
            __asm__ volatile("" : "+x"(x), "+x"(sums[i]));
        }
    return unused;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Billions of operations a second, a multiplication and an addition being two. */
static double rate(void *(*loop)(void *), int threads, int lanes)
{
    double best = 0;
    for (int run = 0; run < 5; run++) {
        pthread_t started[MAX_THREADS];
        const double start = now();
        for (int i = 0; i < threads; i++)
            if (pthread_create(&started[i], NULL, loop, NULL))
                exit(1);
        for (int i = 0; i < threads; i++)
            pthread_join(started[i], NULL);
        const double found = 2e-9 * lanes * SUMS * REPETITIONS * threads / (now() - start);
        best = found > best ? found : best;
    }
    return best;
}

int main(int count, char **words)
{
    const int threads = count > 1 ? atoi(words[1]) : 1;
    if (threads < 1 || threads > MAX_THREADS) {
        fprintf(stderr, "Error: threads must be from 1 to %d\n", MAX_THREADS);
        return 1;
    }
    printf("GOP/s%12s%12d\n", "1 thread", threads);
    printf("fp32 %12.0f%12.0f\n", rate(fp32, 1, 8), rate(fp32, threads, 8));
    printf("int16%12.0f%12.0f\n", rate(int16, 1, 16), rate(int16, threads, 16));
    printf("int8 %12.0f%12.0f\n", rate(int8, 1, 32), rate(int8, threads, 32));
    return 0;
}
