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
    GROUP = 8,             /* columns that a pass computes at once, at most */
    PAST_PIXELS = 16,      /* bytes that the first pass may read after the pixels of the taps, and pixels that it may write */
    LINES_BESIDE_TAPS = 24 /* so that lines are rarely moved, and stay in the first-level cache */
};

/* Unlike fmax, this is one instruction. No share is NaN. */
static inline double maximum(double a, double b) { return a > b ? a : b; }

/* ---- memory. Sides are below 2^28, so the largest product here, of weights and pixels, is below 2^62 ---- */

/* A crop is in the middle, as torchvision's center crop. If `result` is larger, the pixels around `after` are black. */
static void lay_out_table(struct table *table, int64_t before, int64_t after, int64_t result, bool mirrored,
                          struct arena *arena)
{
    bool is_cropped = result <= after;
    table->before = before;
    table->after = after;
    table->first = is_cropped ? (int64_t)rint((double)(after - result) / 2.0) : 0;
    table->kept = is_cropped ? result : after;
    table->black = is_cropped ? 0 : (result - after) / 2;
    table->mirrored = mirrored;
    if (mirrored) {
        table->first = after - table->kept - table->first;
        table->black = result - table->kept - table->black;
    }
    /* The taps are the whole numbers in an interval of length 2 * support: at most 2 * ceil(support) + 1. */
    table->most_taps = 2 * (int64_t)ceil(maximum((double)before / (double)after, 1.0)) + 2;
    int64_t most = smaller(before + 1, table->most_taps) * (table->kept + GROUP);
    table->shares = take(arena, (int64_t)sizeof(double) * table->most_taps * after);
    table->begins = take(arena, (int64_t)sizeof(int64_t) * (after + GROUP));
    table->weights = take(arena, (int64_t)sizeof(int16_t) * most);
}

void lay_out(struct work *work, const struct image *image, const struct plan *plan, int64_t height, int64_t width,
             struct arena *arena)
{
    struct size resized = size_before_crop(image, plan);
    struct table *rows = &work->rows, *columns = &work->columns;
    work->passes = passes();
    lay_out_table(rows, height, resized.height, plan->height, false, arena);
    lay_out_table(columns, width, resized.width, plan->width, image->flip, arena);
    columns->groups = take(arena, 4 * (columns->kept + GROUP));
    work->planes = plan->colour_step == 1 ? 1 : 3;
    work->is_direct = rows->kept == plan->height && columns->kept == plan->width && !plan->floats;
    work->padded_bytes = rounded_up(3 * (width + smaller(width + 1, columns->most_taps)) + PAST_PIXELS);
    work->padded = take(arena, 2 * work->padded_bytes);
    int64_t plane_bytes = rounded_up(columns->kept + PAST_PIXELS), taps = smaller(height + 1, rows->most_taps);
    work->plane_bytes = work->planes == 1 ? 0 : plane_bytes;
    work->line_bytes = 3 * plane_bytes;
    work->most_lines = smaller(height + 2, 2 * taps + LINES_BESIDE_TAPS);
    /* Taps of weight 0 read up to `taps` lines further, and the last block of a line reads beyond it. */
    work->lines = take(arena, (work->most_lines + taps + 2) * work->line_bytes + BLOCK);
    work->assembled = take(arena, 3 * plan->width + BLOCK);
}

/* ---- weights, operation by operation as ATen computes them (`_compute_indices_min_size_weights_aa`) ---- */

/* Stores the begins, in units of `unit`, and the unrounded weights of each pixel of the resized image. Sets `taps`, and
 * returns the largest weight. */
static double find_shares(struct table *table, int64_t unit)
{
    double scale = (double)table->before / (double)table->after;
    double support = maximum(scale, 1.0), inverse = scale >= 1.0 ? 1.0 / scale : 1.0, largest = 0.0;
    int64_t taps = 1;
    for (int64_t place = 0; place < table->after; place++) {
        double *shares = table->shares + table->most_taps * place;
        double pixel = (double)(table->mirrored ? table->after - 1 - place : place);
        double centre = scale * (pixel + 0.5), total = 0.0;
        int64_t begin = larger((int64_t)(centre - support + 0.5), 0);
        int64_t end = smaller((int64_t)(centre + support + 0.5), table->before);
        table->begins[place] = unit * begin;
        taps = larger(taps, end - begin);
        for (int64_t k = 0; k < table->most_taps; k++) {
            double share = 1.0 - fabs(((double)(k + begin) - centre + 0.5) * inverse);
            shares[k] = k < end - begin ? maximum(share, 0.0) : 0.0;
            total += shares[k];
        }
        /* No total is 0: the pixel at the centre has a share of a half or more. */
        for (int64_t k = 0; k < end - begin; k++) {
            shares[k] /= total;
            largest = maximum(largest, shares[k]);
        }
    }
    table->taps = (int)((taps + 1) & ~INT64_C(1));
    return largest;
}

static void fill_table(struct table *table, int64_t unit)
{
    double largest = find_shares(table, unit);
    int bits = 0;
    while (bits < 22 && (int64_t)(0.5 + largest * (double)(INT64_C(1) << (bits + 1))) < 1 << 15)
        bits++;
    table->bits = bits;
    int16_t *weights = table->weights;
    for (int64_t place = table->first; place < table->first + table->kept; place++)
        for (int64_t k = 0; k < table->taps; k++)
            *weights++ = (int16_t)(0.5 + table->shares[table->most_taps * place + k] * (double)(1 << bits));
    memset(weights, 0, sizeof(int16_t) * GROUP * (size_t)table->taps);
    /* The pixels that fill the last group are computed, and not used. */
    table->begins += table->first;
    for (int64_t place = table->kept; place < table->kept + GROUP; place++)
        table->begins[place] = table->begins[table->kept - 1];
}

/* ---- floats ---- */

static const int64_t BEYOND_CACHES = 1 << 18; /* bytes of a result that evicts itself from the second-level cache */

static void repeat_factors(struct work *work, const struct plan *plan)
{
    for (int plane = 0; plane < 3; plane++)
        for (int k = 0; k < PATTERN; k++) {
            int colour = work->planes == 1 ? k % 3 : plane;
            work->factors[plane][k] = (float)plan->factors[colour];
            work->shifts[plane][k] = (float)plan->shifts[colour];
        }
    work->past_caches = 3 * (int64_t)sizeof(float) * plan->height * plan->width >= BEYOND_CACHES;
}

/* ---- rows ---- */

/* Returns a row of the box at an address where it can be read beyond its end. */
static const uint8_t *box_row(const struct work *work, int64_t row)
{
    const uint8_t *pixels = work->pixels + row * work->stride;
    if (row < work->safe_rows)
        return pixels;
    uint8_t *padded = work->padded + row % 2 * work->padded_bytes;
    return memcpy(padded, pixels, 3 * (size_t)work->columns.before);
}

/* Computes the lines of a row of the box, and of the next one if there is one. */
static void make_lines(const struct work *work, int64_t row, uint8_t *line)
{
    const uint8_t *upper = box_row(work, row), *lower = upper;
    if (row + 1 < work->rows.before)
        lower = box_row(work, row + 1);
    work->passes->two_lines(upper, lower, &work->columns, work->plane_bytes, line, line + work->line_bytes);
}

/* Returns the elements of a row of a plane in the result. */
static uint8_t *elements(const struct plan *plan, uint8_t *result, int64_t row, int plane)
{
    int64_t size = plan->floats ? (int64_t)sizeof(float) : 1;
    return result + size * (row * plan->row_step + plane * plan->colour_step);
}

/* Writes a row of the result as its type, from the bytes that were assembled for it. */
static void write_assembled(const struct work *work, const struct plan *plan, uint8_t *result, int64_t row)
{
    int64_t count = 3 / work->planes * plan->width;
    for (int plane = 0; plane < work->planes; plane++) {
        const uint8_t *bytes = work->assembled + plane * count;
        void *to = elements(plan, result, row, plane);
        if (plan->floats)
            work->passes->to_floats(bytes, count, work->factors[plane], work->shifts[plane], work->past_caches, to);
        else
            memcpy(to, bytes, (size_t)count);
    }
}

/* Blends a row of a plane, and writes no byte beyond. */
static void blend_row(const struct work *work, int64_t row, const uint8_t *line, uint8_t *to)
{
    int64_t count = 3 / work->planes * work->columns.kept, rest = count % BLOCK, whole = count - rest;
    work->passes->blend(line, work->line_bytes, &work->rows, row, to, whole);
    if (rest) {
        uint8_t block[BLOCK];
        work->passes->blend(line + whole, work->line_bytes, &work->rows, row, block, BLOCK);
        memcpy(to + whole, block, (size_t)rest);
    }
}

/* Computes a row of the result from the lines at `line` and after it. */
static void make_row(const struct work *work, const struct plan *plan, int64_t row, const uint8_t *line, uint8_t *result)
{
    int64_t pixel = 3 / work->planes;
    for (int plane = 0; plane < work->planes; plane++) {
        uint8_t *to = work->is_direct ? elements(plan, result, row, plane)
                                      : work->assembled + pixel * (plane * plan->width + work->columns.black);
        blend_row(work, row, line + plane * work->plane_bytes, to);
    }
    if (!work->is_direct)
        write_assembled(work, plan, result, work->rows.black + row);
}

static void make_black_rows(const struct work *work, const struct plan *plan, uint8_t *result)
{
    memset(work->assembled, 0, 3 * (size_t)plan->width);
    for (int64_t row = 0; row < plan->height; row++)
        if (row < work->rows.black || row >= work->rows.black + work->rows.kept)
            write_assembled(work, plan, result, row);
}

/* Runs both passes. Keeps only the lines that the next rows need. */
static void make_rows(const struct work *work, const struct plan *plan, uint8_t *result)
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
            make_lines(work, done, work->lines + (done - base) * work->line_bytes);
            done = smaller(done + 2, rows->before);
        }
        make_row(work, plan, row, work->lines + (begin - base) * work->line_bytes, result);
    }
}

void resample(struct work *work, struct image *image, const struct plan *plan, const uint8_t *pixels, int64_t stride)
{
    if (plan->pixel_step != 3 / work->planes && plan->width > 1) {
        image->state = UNDECIDED;
        return;
    }
    int64_t began = nanoseconds();
    fill_table(&work->columns, 3);
    fill_table(&work->rows, 1);
    work->columns.is_grouped = work->passes->prepare && work->passes->prepare(&work->columns);
    if (plan->floats)
        repeat_factors(work, plan);
    work->pixels = pixels;
    work->stride = stride;
    int64_t before_last = (work->rows.before - 1) * stride - 3 * work->columns.taps - PAST_PIXELS;
    work->safe_rows = before_last < 0 ? 0 : before_last / stride + 1;
    make_rows(work, plan, pointer(image->row));
    if (work->passes->finish)
        work->passes->finish();
    image->transform_ns += nanoseconds() - began;
}
