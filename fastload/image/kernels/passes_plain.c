/* The inner loops for any processor. */

#include "kernels.h"

static uint8_t narrowed(int32_t total, int bits)
{
    int32_t value = total >> bits;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void one_line(const uint8_t *restrict row, const struct table *columns, int64_t plane_bytes, uint8_t *restrict line)
{
    const int taps = columns->taps, bits = columns->bits;
    const int64_t pixel = plane_bytes ? 1 : 3, colour = plane_bytes ? plane_bytes : 1;
    for (int64_t x = 0; x < columns->kept; x++) {
        const uint8_t *pixels = row + columns->begins[x];
        const int16_t *weights = columns->weights + taps * x;
        int32_t red = 1 << (bits - 1), green = red, blue = red;
        for (int k = 0; k < taps; k++) {
            red += weights[k] * pixels[3 * k];
            green += weights[k] * pixels[3 * k + 1];
            blue += weights[k] * pixels[3 * k + 2];
        }
        line[pixel * x] = narrowed(red, bits);
        line[pixel * x + colour] = narrowed(green, bits);
        line[pixel * x + 2 * colour] = narrowed(blue, bits);
    }
}

static void two_lines(const uint8_t *upper, const uint8_t *lower, const struct table *columns, int64_t plane_bytes,
                      uint8_t *line, uint8_t *next)
{
    one_line(upper, columns, plane_bytes, line);
    one_line(lower, columns, plane_bytes, next);
}

static void blend(const uint8_t *restrict line, int64_t line_bytes, const struct table *restrict rows, int64_t row,
                  uint8_t *restrict to, int64_t count)
{
    const int taps = rows->taps, bits = rows->bits;
    const int16_t *weights = rows->weights + taps * row;
    for (int64_t x = 0; x < count; x += BLOCK) {
        int32_t totals[BLOCK];
        for (int k = 0; k < BLOCK; k++)
            totals[k] = 1 << (bits - 1);
        for (int tap = 0; tap < taps; tap++)
            for (int k = 0; k < BLOCK; k++)
                totals[k] += weights[tap] * line[tap * line_bytes + x + k];
        for (int k = 0; k < BLOCK; k++)
            to[x + k] = narrowed(totals[k], bits);
    }
}

/* The compiler contracts no operations, so each one is rounded. */
void plain_to_floats(const uint8_t *restrict bytes, int64_t count, const float *restrict factors,
                     const float *restrict shifts, bool past_caches, float *restrict to)
{
    (void)past_caches;
    int64_t x = 0;
    for (; x + PATTERN <= count; x += PATTERN)
        for (int k = 0; k < PATTERN; k++)
            to[x + k] = (float)bytes[x + k] * factors[k] - shifts[k];
    for (; x < count; x++)
        to[x] = (float)bytes[x] * factors[x % PATTERN] - shifts[x % PATTERN];
}

const struct passes plain_passes = {
    .name = "plain C", .two_lines = two_lines, .blend = blend, .to_floats = plain_to_floats};
