/* Which inner loops this processor runs. Files that others use never use those in return. */

#include "kernels.h"

#if defined(__x86_64__)

#include <cpuid.h>

/* Asks the processor, since __builtin_cpu_supports knows nothing in what Zig compiles. Checksums multiply without carry. */
static bool has_avx2(void)
{
    unsigned a, b, c, d, kept, needed = bit_SSE4_1 | bit_PCLMUL | bit_OSXSAVE;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed)
        return false;
    __asm__("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    bool wide = (kept & 6) == 6; /* the system keeps all 256 bits of a register when it turns to another thread */
    return wide && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

#endif

static const struct passes *chosen; /* set when the library is loaded, and before the first run */

/* Uses the passes for any processor from now on, or the best for this one. No run may be in progress. */
ENTRY void use_plain(bool plain)
{
    chosen = &plain_passes;
#if defined(__x86_64__)
    if (!plain && has_avx2())
        chosen = &avx2_passes;
#elif defined(__aarch64__)
    if (!plain)
        chosen = &neon_passes;
#endif
}

__attribute__((constructor)) static void choose(void) { use_plain(false); }

const struct passes *passes(void) { return chosen; }

ENTRY const char *passes_name(void) { return passes()->name; }
