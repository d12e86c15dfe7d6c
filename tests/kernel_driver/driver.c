/* Calls every kernel from several threads at once, for a sanitizer to watch. */
#include "driver.h"

#include <pthread.h>

enum { CALLERS = 4, CALLS = 4 };

static void *caller(void *argument)
{
    unsigned seed = 1 + (unsigned)(uintptr_t)argument;
    for (int call = 0; call < CALLS; call++) {
        check_linear(&seed);
        check_attention(&seed);
        check_decode(&seed);
        check_rows(&seed);
        check_choice(&seed);
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[CALLERS];
    for (int i = 0; i < CALLERS; i++)
        pthread_create(&threads[i], NULL, caller, (void *)(uintptr_t)i);
    for (int i = 0; i < CALLERS; i++)
        pthread_join(threads[i], NULL);
    puts("done");
    return 0;
}
