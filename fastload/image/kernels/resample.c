/* From the box of an image to its row of the batch: antialiased resize, flip, crop, to planes or interleaved colours.
 *
 * Source of the arithmetic: ATen/native/cpu/UpSampleKernelAVXAntialias.h, which follows Pillow's Resample.c. There are two
 * passes, columns first. Weights are int16, with as many bits as the largest one allows. Pixels between the passes are
 * uint8. ATen leaves out a pass that changes no size. Here it has weights 1 and 0, which give the same pixels.
 *
 * Flips, crops and the order of colours cost nothing in the loops. The tables of columns have the order of the result, and
 * the first pass writes planes or interleaved colours.
 */

#include <math.h>

#include "kernels.h"

enum {
    GROUP = 8,            /* columns that a pass computes at once, at most */
    PAST_PIXELS = 16,     /* bytes that the first pass may read after the pixels of the taps, and pixels that it may write */
    PAST_BLEND = 64,      /* bytes that the second pass may read after its lines */
    LINES_BESIDE_TAPS = 24 /* so that lines are rarely moved, and stay in the first-level cache */
};

/* Unlike fmax, this is one instruction. No share is NaN. */
static inline double maximum(double a, double b) { return a > b ? a : b; }

/* ---- memory. Sides are below 2^28, so the largest product here, of weights and pixels, is below 2^62 ---- */

/* A crop is in the middle, as torchvision's center crop. If `result` is larger, the pixels around `after` are black. */
static int64_t lay_out_table(struct table *table, int64_t before, int64_t after, int64_t result, struct arena *arena)
{
    bool is_cropped = result <= after;
    int64_t support = (int64_t)ceil(maximum((double)before / (double)after, 1.0));
    table->before = before;
    table->after = after;
    table->first = is_cropped ? (int64_t)rint((double)(after - result) / 2.0) : 0;
    table->kept = is_cropped ? result : after;
    table->black = is_cropped ? 0 : (result - after) / 2;
    table->mirrored = false;
    table->most_taps = 2 * support + 1;
    int64_t taps = (smaller(before, table->most_taps) + 1) & ~INT64_C(1);
    int64_t places = table->kept + GROUP;
    table->shares = take(arena, (int64_t)sizeof(double) * table->most_taps * after);
    table->spans = take(arena, (int64_t)sizeof(struct span) * after);
    table->begins = take(arena, (int64_t)sizeof(int64_t) * places);
    table->weights = take(arena, (int64_t)sizeof(int16_t) * taps * places);
    return taps;
}

static void lay_out_lines(struct work *work, int64_t height, int64_t taps, struct arena *arena)
{
    work->plane_bytes = (work->columns.kept + PAST_PIXELS + 63) & ~INT64_C(63);
    work->line_bytes = 3 * work->plane_bytes;
    work->most_lines = smaller(height + 2, 2 * taps + LINES_BESIDE_TAPS);
    /* Taps of weight 0 read up to `taps` lines further. */
    work->lines = take(arena, (work->most_lines + taps + 2) * work->line_bytes + PAST_BLEND);
}

void lay_out(struct work *work, const struct image *image, const struct plan *plan, int64_t height, int64_t width,
             struct arena *arena)
{
    struct size resized = size_before_crop(image, plan);
    work->passes = passes();
    int64_t row_taps = lay_out_table(&work->rows, height, resized.height, plan->height, arena);
    int64_t column_taps = lay_out_table(&work->columns, width, resized.width, plan->width, arena);
    if (image->flip) {
        work->columns.mirrored = true;
        work->columns.black = plan->width - work->columns.black - work->columns.kept;
    }
    work->columns.groups = take(arena, 4 * (work->columns.kept + GROUP));
    work->is_interleaved = plan->colour_step == 1;
    work->is_direct = work->rows.kept == plan->height && work->columns.kept == plan->width && !plan->levels;
    work->padded_bytes = (3 * width + 3 * column_taps + PAST_PIXELS + 63) & ~INT64_C(63);
    work->padded = take(arena, 2 * work->padded_bytes);
    lay_out_lines(work, height, row_taps, arena);
    work->assembled = take(arena, 3 * plan->width + PAST_BLEND);
    work->factors = take(arena, 2 * 3 * PATTERN * (int64_t)sizeof(float));
}

/* ---- weights, operation by operation as ATen computes them (`_compute_indices_min_size_weights_aa`) ---- */

struct largest { double share; int64_t count; };

/* Stores the begin, the count and the unrounded weights of each pixel of the resized image. */
static struct largest find_shares(struct table *table)
{
    double scale = (double)table->before / (double)table->after;
    double support = maximum(scale, 1.0), inverse = scale >= 1.0 ? 1.0 / scale : 1.0;
    struct largest largest = {0.0, 1};
    for (int64_t place = 0; place < table->after; place++) {
        double *shares = table->shares + table->most_taps * place;
        double centre = scale * ((double)place + 0.5), total = 0.0;
        int64_t begin = larger((int64_t)(centre - support + 0.5), 0);
        int64_t end = smaller((int64_t)(centre + support + 0.5), table->before);
        int64_t count = smaller(larger(end - begin, 0), table->most_taps);
        for (int64_t k = 0; k < count; k++) {
            shares[k] = maximum(1.0 - fabs(((double)(k + begin) - centre + 0.5) * inverse), 0.0);
            total += shares[k];
        }
        for (int64_t k = 0; k < count && total != 0.0; k++) {
            shares[k] /= total;
            largest.share = maximum(largest.share, shares[k]);
        }
        table->spans[place] = (struct span){begin, count};
        largest.count = larger(largest.count, count);
    }
    return largest;
}

/* Fills the begins, in units of `unit`, and the weights of the pixels that are kept. */
static void fill_table(struct table *table, int64_t unit)
{
    struct largest largest = find_shares(table);
    int bits = 0;
    while (bits < 22 && (int64_t)(0.5 + largest.share * (double)(INT64_C(1) << (bits + 1))) < 1 << 15)
        bits++;
    table->bits = bits;
    table->taps = (int)((largest.count + 1) & ~INT64_C(1));
    for (int64_t place = 0; place < table->kept; place++) {
        int64_t from = table->first + (table->mirrored ? table->kept - 1 - place : place);
        const double *shares = table->shares + table->most_taps * from;
        int16_t *weights = table->weights + table->taps * place;
        struct span span = table->spans[from];
        table->begins[place] = unit * span.begin;
        for (int64_t k = 0; k < table->taps; k++)
            weights[k] = k < span.count ? (int16_t)(0.5 + shares[k] * (double)(1 << bits)) : 0;
    }
    /* The pixels that fill the last group are computed, and not used. */
    for (int64_t place = table->kept; place < table->kept + GROUP; place++)
        table->begins[place] = table->begins[table->kept - 1];
    memset(table->weights + table->taps * table->kept, 0, sizeof(int16_t) * GROUP * (size_t)table->taps);
}

/* ---- rows ---- */

struct source {
    const uint8_t *pixels;
    int64_t stride;
    int64_t safe_rows; /* rows from the top that may be read beyond their end */
};

static struct source source_of(const struct work *work, const uint8_t *pixels, int64_t stride)
{
    int64_t row_bytes = 3 * work->columns.before;
    int64_t span = row_bytes + 3 * work->columns.taps + PAST_PIXELS;
    int64_t room = (work->rows.before - 1) * stride + row_bytes - span;
    return (struct source){pixels, stride, room < 0 ? 0 : room / stride + 1};
}

/* Returns a row of the box at an address where it can be read beyond its end. */
static const uint8_t *source_row(const struct work *work, const struct source *source, int64_t row, int slot)
{
    const uint8_t *pixels = source->pixels + row * source->stride;
    if (row < source->safe_rows)
        return pixels;
    uint8_t *padded = work->padded + slot * work->padded_bytes;
    memcpy(padded, pixels, 3 * (size_t)work->columns.before);
    return padded;
}

/* Computes the lines of a row of the box, and of the next one if there is one. */
static void make_lines(const struct work *work, const struct source *source, int64_t row, uint8_t *line)
{
    const uint8_t *upper = source_row(work, source, row, 0), *lower = upper;
    if (row + 1 < work->rows.before)
        lower = source_row(work, source, row + 1, 1);
    int64_t plane_bytes = work->is_interleaved ? 0 : work->plane_bytes;
    work->passes->two_lines(upper, lower, &work->columns, plane_bytes, line, line + work->line_bytes);
}

static uint8_t *element(const struct plan *plan, uint8_t *result, int64_t row, int64_t colour)
{
    int64_t size = plan->levels ? (int64_t)sizeof(float) : 1;
    return result + size * (row * plan->row_step + colour * plan->colour_step);
}

/* Writes a row of the result as its type, from the bytes that were assembled for it. */
static void write_assembled(const struct work *work, const struct plan *plan, uint8_t *result, int64_t row)
{
    if (work->is_interleaved) {
        write_row(work, plan, work->assembled, 3 * plan->width, 0, element(plan, result, row, 0));
        return;
    }
    for (int plane = 0; plane < 3; plane++)
        write_row(work, plan, work->assembled + plane * plan->width, plan->width, plane, element(plan, result, row, plane));
}

/* Computes a row of the result from the lines at `line` and after it. */
static void make_row(const struct work *work, const struct plan *plan, int64_t row, const uint8_t *line, uint8_t *result)
{
    const struct table *rows = &work->rows;
    const int16_t *weights = rows->weights + rows->taps * row;
    int64_t pixel = work->is_interleaved ? 3 : 1, to_next = work->is_direct ? plan->colour_step : plan->width;
    uint8_t *to = (work->is_direct ? element(plan, result, row, 0) : work->assembled) + pixel * work->columns.black;
    for (int64_t plane = 0; plane < 3 / pixel; plane++)
        work->passes->blend(line + plane * work->plane_bytes, work->line_bytes, weights, rows->taps, rows->bits,
                        to + plane * to_next, pixel * work->columns.kept);
    if (!work->is_direct)
        write_assembled(work, plan, result, rows->black + row);
}

static void make_black_rows(const struct work *work, const struct plan *plan, uint8_t *result)
{
    memset(work->assembled, 0, 3 * (size_t)plan->width);
    for (int64_t row = 0; row < plan->height; row++)
        if (row < work->rows.black || row >= work->rows.black + work->rows.kept)
            write_assembled(work, plan, result, row);
}

/* Runs both passes. Keeps only the lines that the next rows need. */
static void make_rows(const struct work *work, const struct plan *plan, const struct source *source, uint8_t *result)
{
    const struct table *rows = &work->rows;
    if (!work->is_direct)
        make_black_rows(work, plan, result);
    int64_t base = rows->begins[0], done = base; /* rows of the box: of the first line, after the last line */
    for (int64_t row = 0; row < rows->kept; row++) {
        int64_t begin = rows->begins[row];
        while (done < smaller(begin + rows->taps, rows->before)) {
            if (done + 2 - base > work->most_lines) {
                /* At most taps + 1 lines are kept, and more than taps + 20 are before them: no overlap. */
                memcpy(work->lines, work->lines + (begin - base) * work->line_bytes,
                       (size_t)((done - begin) * work->line_bytes));
                base = begin;
            }
            make_lines(work, source, done, work->lines + (done - base) * work->line_bytes);
            done = smaller(done + 2, rows->before);
        }
        make_row(work, plan, row, work->lines + (begin - base) * work->line_bytes, result);
    }
}

static bool can_write(const struct plan *plan)
{
    return plan->pixel_step == (plan->colour_step == 1 ? 3 : 1) || plan->width == 1;
}

void resample(struct work *work, struct image *image, const struct plan *plan, const uint8_t *pixels, int64_t stride)
{
    if (!can_write(plan)) {
        image->state = UNDECIDED;
        return;
    }
    int64_t began = nanoseconds();
    fill_table(&work->columns, 3);
    fill_table(&work->rows, 1);
    work->columns.is_grouped = work->passes->prepare != NULL && work->passes->prepare(&work->columns);
    if (plan->levels)
        find_factors(work, plan);
    struct source source = source_of(work, pixels, stride);
    make_rows(work, plan, &source, (uint8_t *)(uintptr_t)image->row);
    if (work->passes->finish)
        work->passes->finish();
    image->transform_ns += nanoseconds() - began;
}
