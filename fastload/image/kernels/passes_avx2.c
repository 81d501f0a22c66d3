/* The inner loops for x86-64 with AVX2. A vector has two lanes of 128 bits: two rows of the box, or two halves of a row. */

#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE_AVX2 static inline __attribute__((always_inline, target("avx2")))

/* ---- the first pass: columns ---- */

/* Loads 16 bytes, which are 5 pixels, of each of two rows. */
INLINE_AVX2 __m256i load_halves(const uint8_t *upper, const uint8_t *lower)
{
    __m128i low = _mm_loadu_si128((const __m128i *)upper), high = _mm_loadu_si128((const __m128i *)lower);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

INLINE_AVX2 __m256i in_both_lanes(const void *bytes)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes));
}

/* Moves bytes within each lane: byte k of the result is byte `from[k]`, or 0 if that is -1. */
INLINE_AVX2 __m256i shuffled(__m256i bytes, const int8_t *from) { return _mm256_shuffle_epi8(bytes, in_both_lanes(from)); }

/* Returns eight copies of a pair of weights. */
INLINE_AVX2 __m256i pair_of(const int16_t *weights)
{
    int32_t pair;
    memcpy(&pair, weights, sizeof pair);
    return _mm256_set1_epi32(pair);
}

/* Shifts right by `bits`, and clamps to int16. */
INLINE_AVX2 __m256i shifted(__m256i low, __m256i high, __m128i bits)
{
    return _mm256_packs_epi32(_mm256_sra_epi32(low, bits), _mm256_sra_epi32(high, bits));
}

/* Stores the low 8 bytes of each lane, and the high ones. */
INLINE_AVX2 void store_low(__m256i lanes, uint8_t *line, uint8_t *next)
{
    _mm_storel_epi64((__m128i *)line, _mm256_castsi256_si128(lanes));
    _mm_storel_epi64((__m128i *)next, _mm256_extracti128_si256(lanes, 1));
}

INLINE_AVX2 void store_high(__m256i lanes, uint8_t *line, uint8_t *next)
{
    _mm_storeh_pd((double *)line, _mm_castsi128_pd(_mm256_castsi256_si128(lanes)));
    _mm_storeh_pd((double *)next, _mm_castsi128_pd(_mm256_extracti128_si256(lanes, 1)));
}

struct tones { __m256i red_green, blue; }; /* of 8 columns: 8 bytes of red and 8 of green in each lane, 8 of blue */

/* Returns the first 16 bytes of the pixels, and the other 8. */
INLINE_AVX2 struct tones interleaved(struct tones tones)
{
    static const int8_t red_green_first[] = {0, 8, -1, 1, 9, -1, 2, 10, -1, 3, 11, -1, 4, 12, -1, 5};
    static const int8_t blue_first[] = {-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1};
    static const int8_t red_green_rest[] = {13, -1, 6, 14, -1, 7, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    static const int8_t blue_rest[] = {-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, -1, -1, -1, -1, -1, -1};
    return (struct tones){
        shuffled(tones.red_green, red_green_first) | shuffled(tones.blue, blue_first),
        shuffled(tones.red_green, red_green_rest) | shuffled(tones.blue, blue_rest),
    };
}

INLINE_AVX2 void store_tones(struct tones tones, int64_t plane_bytes, int64_t x, uint8_t *line, uint8_t *next)
{
    int64_t at = plane_bytes ? x : 3 * x, step = plane_bytes ? plane_bytes : 8;
    if (!plane_bytes)
        tones = interleaved(tones);
    store_low(tones.red_green, line + at, next + at);
    store_high(tones.red_green, line + at + step, next + at + step);
    store_low(tones.blue, line + at + 2 * step, next + at + 2 * step);
}

/* Four columns of two taps need 16 bytes of a row if their first bytes are within 10: 10 + 3 for the second pixel + 2 for
 * its blue. A group has the lowest of their begins, and the others relative to it, a byte each. Begins rise, or fall if they
 * are mirrored. */
AVX2 static bool prepare(const struct table *columns)
{
    for (int64_t x = 0; x < ((columns->kept + 7) & ~INT64_C(7)); x += 4) {
        const int64_t *begins = columns->begins + x;
        int64_t lowest = smaller(begins[0], begins[3]), places = 0;
        if (columns->taps != 2 || larger(begins[0], begins[3]) - lowest > 10)
            return false;
        for (int k = 0; k < 4; k++)
            places |= (begins[k] - lowest) << (8 * k);
        columns->groups[x / 2] = lowest;
        columns->groups[x / 2 + 1] = places;
    }
    return true;
}

struct sums { __m256i red, green, blue; }; /* of 4 columns, int32 */

INLINE_AVX2 struct sums sums_of_4(const uint8_t *upper, const uint8_t *lower, const struct table *columns, int64_t x,
                                  __m256i half)
{
    int64_t lowest = columns->groups[x / 2];
    __m256i pixels = load_halves(upper + lowest, lower + lowest);
    /* From 4 places p: words of (p, 0x80), (p + 3, 0x80), of which the shuffle makes int16. */
    static const int8_t words[] = {0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1};
    __m256i places = shuffled(_mm256_set1_epi32((int)columns->groups[x / 2 + 1]), words);
    __m256i red = _mm256_add_epi16(places, _mm256_set1_epi32((int)0x80038000));
    __m256i green = _mm256_add_epi16(red, _mm256_set1_epi16(1));
    __m256i blue = _mm256_add_epi16(green, _mm256_set1_epi16(1));
    __m256i weights = in_both_lanes(columns->weights + 2 * x);
    return (struct sums){
        _mm256_add_epi32(half, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, red), weights)),
        _mm256_add_epi32(half, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, green), weights)),
        _mm256_add_epi32(half, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, blue), weights)),
    };
}

INLINE_AVX2 struct tones tones_of_2_taps(const uint8_t *upper, const uint8_t *lower, const struct table *columns, int64_t x)
{
    __m256i half = _mm256_set1_epi32(1 << (columns->bits - 1));
    __m128i bits = _mm_cvtsi32_si128(columns->bits);
    struct sums first = sums_of_4(upper, lower, columns, x, half);
    struct sums second = sums_of_4(upper, lower, columns, x + 4, half);
    __m256i red = shifted(first.red, second.red, bits), green = shifted(first.green, second.green, bits);
    __m256i blue = shifted(first.blue, second.blue, bits);
    return (struct tones){_mm256_packus_epi16(red, green), _mm256_packus_epi16(blue, blue)};
}

/* Returns the sums of red, green and blue of one column, int32, in each lane. */
INLINE_AVX2 __m256i sum_of(const uint8_t *upper, const uint8_t *lower, const int16_t *weights, int taps, __m256i half)
{
    static const int8_t pixels_0_and_1[] = {0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1};
    static const int8_t pixels_2_and_3[] = {6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1};
    __m256i total = half;
    for (int k = 0; k < taps; k += 4) {
        __m256i pixels = load_halves(upper + 3 * k, lower + 3 * k);
        __m256i pairs = shuffled(pixels, pixels_0_and_1);
        total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, pair_of(weights + k)));
        if (k + 2 < taps) {
            pairs = shuffled(pixels, pixels_2_and_3);
            total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, pair_of(weights + k + 2)));
        }
    }
    return total;
}

INLINE_AVX2 struct tones tones_of(const uint8_t *upper, const uint8_t *lower, const struct table *columns, int64_t x, int taps)
{
    /* From 4 pixels of 4 bytes each, 4 bytes of each colour. */
    static const int8_t by_colour[] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1};
    __m256i half = _mm256_set1_epi32(1 << (columns->bits - 1));
    __m128i bits = _mm_cvtsi32_si128(columns->bits);
    const int16_t *weights = columns->weights + taps * x;
    __m256i colours[2];
    for (int four = 0; four < 2; four++) {
        __m256i sums[4];
        for (int k = 0; k < 4; k++) {
            int column = 4 * four + k;
            int64_t begin = columns->begins[x + column];
            sums[k] = sum_of(upper + begin, lower + begin, weights + taps * column, taps, half);
        }
        __m256i pixels = _mm256_packus_epi16(shifted(sums[0], sums[1], bits), shifted(sums[2], sums[3], bits));
        colours[four] = shuffled(pixels, by_colour);
    }
    return (struct tones){_mm256_unpacklo_epi32(colours[0], colours[1]), _mm256_unpackhi_epi32(colours[0], colours[1])};
}

AVX2 static void two_lines(const uint8_t *upper, const uint8_t *lower, const struct table *columns, int64_t plane_bytes,
                           uint8_t *line, uint8_t *next)
{
    /* Each loop has its number of taps as a constant. */
    if (columns->is_grouped)
        for (int64_t x = 0; x < columns->kept; x += 8)
            store_tones(tones_of_2_taps(upper, lower, columns, x), plane_bytes, x, line, next);
    else if (columns->taps == 4)
        for (int64_t x = 0; x < columns->kept; x += 8)
            store_tones(tones_of(upper, lower, columns, x, 4), plane_bytes, x, line, next);
    else
        for (int64_t x = 0; x < columns->kept; x += 8)
            store_tones(tones_of(upper, lower, columns, x, columns->taps), plane_bytes, x, line, next);
}

/* ---- the second pass: rows ---- */

INLINE_AVX2 __m256i blended(const uint8_t *line, int64_t line_bytes, const int16_t *weights, int taps, int bits)
{
    const __m256i zero = _mm256_setzero_si256();
    __m256i first = _mm256_set1_epi32(1 << (bits - 1)), second = first, third = first, fourth = first;
    for (int k = 0; k < taps; k += 2) {
        __m256i even = _mm256_loadu_si256((const __m256i *)(line + k * line_bytes));
        __m256i odd = _mm256_loadu_si256((const __m256i *)(line + (k + 1) * line_bytes));
        __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
        __m256i pair = pair_of(weights + k);
        first = _mm256_add_epi32(first, _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), pair));
        second = _mm256_add_epi32(second, _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), pair));
        third = _mm256_add_epi32(third, _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), pair));
        fourth = _mm256_add_epi32(fourth, _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), pair));
    }
    __m128i shift = _mm_cvtsi32_si128(bits);
    return _mm256_packus_epi16(shifted(first, second, shift), shifted(third, fourth, shift));
}

INLINE_AVX2 void blend_taps(const uint8_t *line, int64_t line_bytes, const int16_t *weights, int taps, int bits, uint8_t *to,
                            int64_t count)
{
    for (int64_t x = 0; x < count; x += BLOCK)
        _mm256_storeu_si256((__m256i *)(to + x), blended(line + x, line_bytes, weights, taps, bits));
}

AVX2 static void blend(const uint8_t *line, int64_t line_bytes, const struct table *rows, int64_t row, uint8_t *to,
                       int64_t count)
{
    const int16_t *weights = rows->weights + rows->taps * row;
    if (rows->taps == 2)
        blend_taps(line, line_bytes, weights, 2, rows->bits, to, count);
    else if (rows->taps == 4)
        blend_taps(line, line_bytes, weights, 4, rows->bits, to, count);
    else
        blend_taps(line, line_bytes, weights, rows->taps, rows->bits, to, count);
}

/* ---- floats ---- */

AVX2 static void to_floats(const uint8_t *bytes, int64_t count, const float *factors, const float *shifts, bool past_caches,
                           float *to)
{
    bool streams = past_caches && (uintptr_t)to % 32 == 0;
    int64_t x = 0;
    for (int place = 0; x + 8 <= count; x += 8, place = place < PATTERN - 8 ? place + 8 : 0) {
        __m256 levels = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + x))));
        __m256 floats = levels * _mm256_loadu_ps(factors + place) - _mm256_loadu_ps(shifts + place);
        if (streams)
            _mm256_stream_ps(to + x, floats);
        else
            _mm256_storeu_ps(to + x, floats);
    }
    for (; x < count; x++)
        to[x] = (float)bytes[x] * factors[x % PATTERN] - shifts[x % PATTERN];
}

static void finish(void) { _mm_sfence(); }

const struct passes avx2_passes = {
    .name = "AVX2", .prepare = prepare, .two_lines = two_lines, .blend = blend, .to_floats = to_floats, .finish = finish};

#endif
