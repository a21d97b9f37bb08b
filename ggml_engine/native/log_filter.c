/* The libraries tell a good deal while they load a model, from threads that have let go of Python's lock. To hand a line to
   Python they would wait for it, line by line; what nobody would see is dropped before. */
#include "log_filter.h"

#include <stddef.h>

#if defined(__GNUC__)
enum { LEVEL_CONTINUES = 5 }; /* GGML_LOG_LEVEL_CONT: more of the line before */

static int least_level;
static log_callback next_callback;
static __thread int goes_on; /* the thread's last line */

void log_filter_set(int least, log_callback callback) {
    __atomic_store_n(&least_level, least, __ATOMIC_RELAXED);
    __atomic_store_n(&next_callback, callback, __ATOMIC_RELEASE);
}

void log_filter(int level, const char * text, void * user_data) {
    const log_callback callback = __atomic_load_n(&next_callback, __ATOMIC_ACQUIRE);
    if (level != LEVEL_CONTINUES) goes_on = level >= __atomic_load_n(&least_level, __ATOMIC_RELAXED);
    if (goes_on && callback != NULL) callback(level, text, user_data);
}
#endif
