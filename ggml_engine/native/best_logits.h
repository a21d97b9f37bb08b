/* The best of a row of logits; see best_logits.c. */
#ifndef GGML_ENGINE_BEST_LOGITS_H
#define GGML_ENGINE_BEST_LOGITS_H

#include <stddef.h>
#include <stdint.h>

struct best_logit {
    float logit;
    int32_t id;
};

/* The k best of n logits into `best`, the first one best, equal ones by id; 1 <= k <= n <= INT32_MAX. Returns 1, 0 where
   some are not finite, -1 without memory. */
int best_logits(const float * x, size_t n, size_t k, struct best_logit * best);

#endif
