#include "driver.h"

#include <choice.c>

/* Choices from random logits: tokens of the vocabulary, the same on any number of threads. */
void check_choice(unsigned *seed)
{
    const int64_t rows = 1 + random_below(seed, 4), vocab = 1 + random_below(seed, 3000);
    const int64_t stride = vocab + random_below(seed, 3);
    float *logits = random_floats(seed, rows * stride);
    double *draws = malloc((size_t)(rows * DRAW_COLUMNS) * sizeof *draws);
    const size_t bytes = (size_t)rows * sizeof(int64_t);
    int64_t *positions = malloc(bytes), *chosen = malloc(bytes), *again = malloc(bytes), *broken = malloc(bytes);
    static const double temperatures[] = {0, 0.3, 1, 30}, floors[] = {-INFINITY, -1, 0};
    for (int64_t i = 0; i < rows; i++) {
        double *row = draws + i * DRAW_COLUMNS;
        row[0] = temperatures[random_below(seed, 4)];
        row[1] = random_below(seed, 2) * (1 + random_below(seed, 2 * (unsigned)vocab));
        row[2] = random_below(seed, 2) ? 1 : random_below(seed, 100) / 100.0;
        row[3] = floors[random_below(seed, 3)];
        for (int j = 4; j < DRAW_COLUMNS; j++)
            row[j] = random_below(seed, 1000) / 1000.0;
        positions[i] = random_below(seed, 100);
        if (!random_below(seed, 5))
            logits[i * stride + random_below(seed, (unsigned)vocab)] = random_below(seed, 2) ? NAN : -INFINITY;
    }
    choice c = {.logits = logits, .rows = rows, .stride = stride, .vocab_size = vocab,
                .draws = random_below(seed, 4) ? draws : NULL, .positions = positions, .chosen = chosen,
                .broken = broken};
    if (!qinfer_choose(&c, 1))
        exit(4);
    c.chosen = again;
    if (!qinfer_choose(&c, 2 + (int)random_below(seed, 3)))
        exit(4);
    require_same(chosen, again, bytes, "a choice on other threads");
    for (int64_t i = 0; i < rows; i++)
        if (chosen[i] < 0 || chosen[i] >= vocab) {
            fprintf(stderr, "a choice is no token\n");
            exit(3);
        }
    free(logits), free(draws), free(positions), free(chosen), free(again), free(broken);
}
