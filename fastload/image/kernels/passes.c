/* Which inner loops this processor runs. Files that others use never use those in return. */

#include "kernels.h"

static bool is_plain; /* set once, before the first run */

const struct passes *passes(void)
{
    const struct passes *best = &plain_passes;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        best = &avx2_passes;
#elif defined(__aarch64__)
    best = &neon_passes;
#endif
    return is_plain ? &plain_passes : best;
}

/* Uses the passes for any processor from now on. No run may be in progress. */
ENTRY void use_plain(bool plain) { is_plain = plain; }

ENTRY const char *passes_name(void) { return passes()->name; }
