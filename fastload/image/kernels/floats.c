/* From bytes of a resized image to elements of the result: as they are, by a factor and a shift, or by a table. */

#include "kernels.h"

enum { LEVELS = 256 };

static const int64_t BEYOND_CACHES = 1 << 18; /* bytes of a result that evicts itself from the second-level cache */

/* Returns the float whose bits are `steps` after those of `number`. */
static float neighbour(float number, int steps)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    bits += (uint32_t)steps;
    memcpy(&number, &bits, sizeof bits);
    return number;
}

/* Returns whether a factor gives all levels of a colour to the bit. */
static bool gives(const float *levels, float factor, float shift)
{
    float found[LEVELS];
    for (int level = 0; level < LEVELS; level++)
        found[level] = (float)level * factor - shift;
    return memcmp(found, levels, sizeof found) == 0;
}

static bool find_factor(const float *levels, float *factor, float *shift)
{
    *shift = -levels[0];
    float nearest = (levels[LEVELS - 1] + *shift) / 255.0F;
    for (int steps = -2; steps <= 2; steps++) {
        *factor = neighbour(nearest, steps);
        if (gives(levels, *factor, *shift))
            return true;
    }
    return false;
}

void find_factors(struct work *work, const struct plan *plan)
{
    const float *levels = pointer(plan->levels);
    float factors[3], shifts[3];
    work->is_linear = true;
    for (int colour = 0; colour < 3; colour++)
        work->is_linear &= find_factor(levels + LEVELS * colour, factors + colour, shifts + colour);
    for (int plane = 0; plane < 3; plane++)
        for (int k = 0; k < PATTERN; k++) {
            int colour = work->planes == 1 ? k % 3 : plane;
            work->factors[plane][k] = factors[colour];
            work->shifts[plane][k] = shifts[colour];
        }
    work->past_caches = 3 * (int64_t)sizeof(float) * plan->height * plan->width >= BEYOND_CACHES;
}

void write_row(const struct work *work, const struct plan *plan, const uint8_t *bytes, int64_t count, int plane, void *to)
{
    const float *levels = pointer(plan->levels);
    if (levels == NULL)
        memcpy(to, bytes, (size_t)count);
    else if (work->is_linear)
        work->passes->to_floats(bytes, count, work->factors[plane], work->shifts[plane], work->past_caches, to);
    else
        for (int64_t x = 0; x < count; x++)
            ((float *)to)[x] = levels[LEVELS * (work->planes == 1 ? x % 3 : plane) + bytes[x]];
}
