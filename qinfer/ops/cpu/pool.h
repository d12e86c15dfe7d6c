/* A pool of threads for loops whose passes are independent. */
#ifndef QINFER_POOL_H
#define QINFER_POOL_H

#include <stdint.h>

/* Call pass(job, i) for each i below `passes`, on up to `threads` threads, this one included. Threads
 * take passes as they get to them: one that the system has put aside delays no more than its own. */
void qinfer_parallel(void (*pass)(const void *job, int64_t i), const void *job, int64_t passes,
                     int threads);

#endif
