/* The inner loops for aarch64, whose processors all have these instructions. */

#include "kernels.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { NONE = 255 }; /* vqtbl1q_u8 gives 0 for an index above 15 */

/* A pair of weights, twice. */
ALWAYS_INLINE int16x4_t pair_at(const int16_t *weights)
{
    uint32_t pair;
    memcpy(&pair, weights, sizeof pair);
    return vreinterpret_s16_u32(vdup_n_u32(pair));
}

/* Shifts right and clamps to 0..255. The shift by a negative number rounds down. */
ALWAYS_INLINE uint8x8_t narrow(int32x4_t first, int32x4_t second, int32x4_t shift)
{
    int16x4_t low = vqmovn_s32(vshlq_s32(first, shift)), high = vqmovn_s32(vshlq_s32(second, shift));
    return vqmovun_s16(vcombine_s16(low, high));
}

/* ---- the first pass: columns ---- */

struct sums { int32x4_t upper, lower; }; /* of three colours, and of nothing */

/* Adds two pixels of 3 bytes, the first of the 16 that it reads: no more than 10 after the last tap. */
ALWAYS_INLINE int32x4_t add_two_pixels(int32x4_t sum, const uint8_t *pixels, int16x4_t pair)
{
    const uint8x16_t places = {0, NONE, 1, NONE, 2, NONE, NONE, NONE, 3, NONE, 4, NONE, 5, NONE, NONE, NONE};
    int16x8_t words = vreinterpretq_s16_u8(vqtbl1q_u8(vld1q_u8(pixels), places));
    sum = vmlal_lane_s16(sum, vget_low_s16(words), pair, 0);
    return vmlal_high_lane_s16(sum, words, pair, 1);
}

ALWAYS_INLINE struct sums pixel(const uint8_t *upper, const uint8_t *lower, const int16_t *weights, int taps,
                                int32x4_t half)
{
    struct sums sums = {half, half};
    for (int k = 0; k < taps; k += 2) {
        int16x4_t pair = pair_at(weights + k);
        sums.upper = add_two_pixels(sums.upper, upper + 3 * k, pair);
        sums.lower = add_two_pixels(sums.lower, lower + 3 * k, pair);
    }
    return sums;
}

ALWAYS_INLINE void store_4_bytes(uint8_t *to, uint32_t bytes) { memcpy(to, &bytes, sizeof bytes); }

/* Stores four pixels of four bytes each, without the fourth. */
ALWAYS_INLINE void store_pixels(uint8x16_t pixels, uint8_t *line, int64_t x, int64_t plane_bytes)
{
    const uint8x16_t in_planes = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, NONE, NONE, NONE, NONE};
    const uint8x16_t interleaved = {0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, NONE, NONE, NONE, NONE};
    uint32x4_t colours = vreinterpretq_u32_u8(vqtbl1q_u8(pixels, plane_bytes ? in_planes : interleaved));
    uint8_t *to = line + (plane_bytes ? x : 3 * x);
    int64_t step = plane_bytes ? plane_bytes : 4;
    store_4_bytes(to, vgetq_lane_u32(colours, 0));
    store_4_bytes(to + step, vgetq_lane_u32(colours, 1));
    store_4_bytes(to + 2 * step, vgetq_lane_u32(colours, 2));
}

ALWAYS_INLINE void two_lines_of(int taps, const uint8_t *upper, const uint8_t *lower, const struct table *columns,
                                int64_t plane_bytes, uint8_t *line, uint8_t *next)
{
    const int32x4_t half = vdupq_n_s32(1 << (columns->bits - 1)), shift = vdupq_n_s32(-columns->bits);
    const int64_t *begins = columns->begins, kept = columns->kept;
    const int16_t *weights = columns->weights;
    for (int64_t x = 0; x < kept; x += 4, begins += 4, weights += 4 * taps) {
        struct sums first = pixel(upper + begins[0], lower + begins[0], weights, taps, half);
        struct sums second = pixel(upper + begins[1], lower + begins[1], weights + taps, taps, half);
        struct sums third = pixel(upper + begins[2], lower + begins[2], weights + 2 * taps, taps, half);
        struct sums fourth = pixel(upper + begins[3], lower + begins[3], weights + 3 * taps, taps, half);
        uint8x8_t low = narrow(first.upper, second.upper, shift), high = narrow(third.upper, fourth.upper, shift);
        store_pixels(vcombine_u8(low, high), line, x, plane_bytes);
        low = narrow(first.lower, second.lower, shift);
        high = narrow(third.lower, fourth.lower, shift);
        store_pixels(vcombine_u8(low, high), next, x, plane_bytes);
    }
}

static void two_lines(const uint8_t *upper, const uint8_t *lower, const struct table *columns, int64_t plane_bytes,
                      uint8_t *line, uint8_t *next)
{
    /* Each loop has its number of taps as a constant. */
    if (columns->taps == 2)
        two_lines_of(2, upper, lower, columns, plane_bytes, line, next);
    else if (columns->taps == 4)
        two_lines_of(4, upper, lower, columns, plane_bytes, line, next);
    else
        two_lines_of(columns->taps, upper, lower, columns, plane_bytes, line, next);
}

/* ---- the second pass: rows ---- */

ALWAYS_INLINE void blend_taps(int taps, const uint8_t *line, int64_t line_bytes, const int16_t *weights, int bits,
                              uint8_t *to, int64_t count)
{
    const int32x4_t half = vdupq_n_s32(1 << (bits - 1)), shift = vdupq_n_s32(-bits);
    for (int64_t x = 0; x < count; x += 16) {
        int32x4_t first = half, second = half, third = half, fourth = half;
        for (int k = 0; k < taps; k++) {
            uint8x16_t bytes = vld1q_u8(line + k * line_bytes + x);
            int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
            int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(bytes));
            int16x8_t weight = vdupq_n_s16(weights[k]);
            first = vmlal_s16(first, vget_low_s16(low), vget_low_s16(weight));
            second = vmlal_high_s16(second, low, weight);
            third = vmlal_s16(third, vget_low_s16(high), vget_low_s16(weight));
            fourth = vmlal_high_s16(fourth, high, weight);
        }
        vst1q_u8(to + x, vcombine_u8(narrow(first, second, shift), narrow(third, fourth, shift)));
    }
}

static void blend(const uint8_t *line, int64_t line_bytes, const struct table *rows, int64_t row, uint8_t *to,
                  int64_t count)
{
    const int16_t *weights = rows->weights + rows->taps * row;
    if (rows->taps == 2)
        blend_taps(2, line, line_bytes, weights, rows->bits, to, count);
    else if (rows->taps == 4)
        blend_taps(4, line, line_bytes, weights, rows->bits, to, count);
    else
        blend_taps(rows->taps, line, line_bytes, weights, rows->bits, to, count);
}

const struct passes neon_passes = {
    .name = "NEON", .two_lines = two_lines, .blend = blend, .to_floats = plain_to_floats};

#endif
