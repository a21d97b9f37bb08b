/* What of the libraries' log goes on to Python; see log_filter.c. */
#ifndef GGML_ENGINE_LOG_FILTER_H
#define GGML_ENGINE_LOG_FILTER_H

typedef void (*log_callback)(int level, const char * text, void * user_data);

/* Lines of `least` and above go on to `callback`. Any thread, also while others log. */
void log_filter_set(int least, log_callback callback);

/* A ggml_log_callback. */
void log_filter(int level, const char * text, void * user_data);

#endif
