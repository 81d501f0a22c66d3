/* Decodes the box of a JPEG with libjpeg-turbo: no columns beyond its margin, no rows below it, at a scaled size.
 *
 * Whatever libjpeg objects to or warns of is DAMAGED, and so are kinds that were not tested: Python decodes them. */

#include "kernels.h"

#ifndef FASTLOAD_JPEG

const char *const jpeg_library = NULL;

void render_jpeg(struct image *image, const struct plan *plan, const uint8_t *payload, struct arena *arena)
{
    (void)plan, (void)payload, (void)arena;
    image->state = DAMAGED;
}

#else

#include <math.h>
#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000000
#error "This needs libjpeg-turbo 2.0 or newer."
#endif

enum {
    MARGIN = 2, /* columns */
    LEAST_COLUMNS = 16,
    MOST_ROWS = 4,               /* to ask for at once: libjpeg gives one row group a call, which has at most four */
    MOST_LIBJPEG_BYTES = 1 << 28 /* that libjpeg may take for whole images; here it needs none */
};

/* All that a jump out of libjpeg must not lose. It is in the frame of `render_jpeg`, which the jump does not touch. */
struct decoder {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf jump;
    struct image *image;
    const struct plan *plan;
    const uint8_t *payload;
    struct arena *arena;
    struct work work;
    const uint8_t *pixels; /* the box */
    int64_t stride;
};

#define TEXT(version) #version
#define TEXT_OF(version) TEXT(version)

const char *const jpeg_library = "libjpeg-turbo " TEXT_OF(LIBJPEG_TURBO_VERSION);

/* ---- the header ---- */

/* Returns whether the image is of the kind that this file was tested with.
 *
 * That is: 8 bits, sequential, Huffman-coded, one scan, and grey, YCbCr or RGB. Only the first colour may have more
 * samples than the others: twice as many in one direction or in both, or four times as many in one. */
static bool is_plain(j_decompress_ptr jpeg)
{
    J_COLOR_SPACE space = jpeg->jpeg_color_space;
    bool is_grey = jpeg->num_components == 1 && space == JCS_GRAYSCALE;
    if (!is_grey && (jpeg->num_components != 3 || (space != JCS_YCbCr && space != JCS_RGB)))
        return false;
    /* A lossless image has another spectrum. */
    if (jpeg->data_precision != 8 || jpeg->progressive_mode || jpeg->arith_code || jpeg->Ss != 0 || jpeg->Se != 63)
        return false;
    const jpeg_component_info *component = jpeg->comp_info;
    int across = component->h_samp_factor, down = component->v_samp_factor;
    if (is_grey)
        return across == 1 && down == 1;
    for (int other = 1; other < 3; other++)
        if (component[other].h_samp_factor != 1 || component[other].v_samp_factor != 1)
            return false;
    /* Before 2.1, libjpeg-turbo did not interpolate colours between two rows only. */
    if (across == 1 && down == 2)
        return LIBJPEG_TURBO_VERSION_NUMBER >= 2001000;
    if (across == 1 || down == 1)
        return across + down == 2 || across + down == 3 || across + down == 5;
    return across == 2 && down == 2;
}

/* Returns whether the scan ends with the image, and has no markers inside but those of restarts, in their order.
 *
 * So an image that is cut off below the box is noticed too. This takes a few microseconds. */
static bool is_complete(const uint8_t *scan, const uint8_t *end, bool has_restarts)
{
    enum { FIRST_RESTART = 0xD0, END_OF_IMAGE = 0xD9 };
    int restart = 0;
    while (end - scan >= 2) {
        const uint8_t *marker = memchr(scan, 0xFF, (size_t)(end - scan - 1));
        if (!marker)
            return false;
        int code = marker[1]; /* before `end`, because the search left out the last byte */
        if (code == END_OF_IMAGE)
            return true;
        if (code != 0) {
            if (!has_restarts || code != FIRST_RESTART + restart)
                return false;
            restart = (restart + 1) & 7;
        }
        scan = marker + 2;
    }
    return false;
}

/* Returns whether Pillow accepts the segments before the scan. It refuses some that are short, and a block of Photoshop
 * that is cut off after its number. */
static bool has_plain_segments(const uint8_t *payload, const uint8_t *scan)
{
    enum { APP0 = 0xE0, APP2 = 0xE2, APP13 = 0xED, APP15 = 0xEF, LEAST_SEGMENT = 12, LEAST_PROFILE = 14 };
    for (const uint8_t *at = payload + 2; at < scan;) {
        if (scan - at < 4 || at[0] != 0xFF || at[1] < 0xC0 || at[1] == 0xFF || (at[1] >= 0xD0 && at[1] <= 0xD8))
            return false; /* a marker that has no length, or no marker */
        int marker = at[1];
        int64_t bytes = (at[2] << 8 | at[3]) - 2;
        at += 4;
        if (bytes < 0 || bytes > scan - at)
            return false;
        if (marker >= APP0 && marker <= APP15 && bytes < LEAST_SEGMENT)
            return false;
        if (marker == APP2 && bytes < LEAST_PROFILE)
            return false;
        if (marker == APP13 && !memcmp(at + bytes - 6, "8BIM", 4))
            return false;
        at += bytes;
    }
    return true;
}

/* Reads the header, and draws the box. */
static enum state begin(struct decoder *decoder)
{
    j_decompress_ptr jpeg = &decoder->jpeg;
    struct image *image = decoder->image;
    jpeg_create_decompress(jpeg);
    jpeg->mem->max_memory_to_use = MOST_LIBJPEG_BYTES;
    jpeg_mem_src(jpeg, decoder->payload, (unsigned long)image->length);
    jpeg_read_header(jpeg, TRUE);
    if (!is_plain(jpeg) || jpeg_has_multiple_scans(jpeg))
        return DAMAGED;
    const uint8_t *scan = jpeg->src->next_input_byte;
    if (!is_complete(scan, decoder->payload + image->length, jpeg->restart_interval != 0))
        return DAMAGED;
    if (!has_plain_segments(decoder->payload, scan))
        return DAMAGED;
    image->height = jpeg->image_height;
    image->width = jpeg->image_width;
    draw(image, decoder->plan);
    return (enum state)image->state;
}

/* ---- the scale, and the box in the decoded pixels ---- */

/* Returns the length to which a side of the image may shrink. See `Plan.least`. A JPEG's side has 16 bits. */
static int64_t least_side(int64_t side, int64_t result, int64_t box)
{
    return (int64_t)fmin((double)side, ceil((double)(side * result) / (double)box));
}

/* Returns 1, 2, 4 or 8, by which the sides may be divided. Pillow's `draft` chooses it so. */
static unsigned divisor(const struct image *image, const struct plan *plan)
{
    if (!plan->scaled)
        return 1;
    struct size result = size_before_crop(image, plan);
    int64_t height = least_side(image->height, result.height, image->box_height);
    int64_t width = least_side(image->width, result.width, image->box_width);
    unsigned by = 8;
    while (by > 1 && (height * by > image->height || width * by > image->width))
        by /= 2;
    return by;
}

/* Sets a side of the box in the decoded pixels. See `scaled` in regions.py. */
static void scale_side(int64_t *first, int64_t *count, int64_t decoded, int64_t whole)
{
    if (decoded == whole)
        return;
    double end = rint((double)((*first + *count) * decoded) / (double)whole);
    *first = (int64_t)rint((double)(*first * decoded) / (double)whole);
    *count = larger(1, (int64_t)end - *first);
}

/* ---- pixels ---- */

/* Lets libjpeg decode only `count` columns from `left` on, and those that their colours depend on. Returns the first.
 *
 * Colours are interpolated from the next sample on either side, two columns away. At the border of the decoded columns
 * libjpeg uses another rule. It moves the left border to that of a block, and sets `output_width`. */
static int64_t crop_columns(j_decompress_ptr jpeg, int64_t left, int64_t count)
{
    int64_t width = jpeg->output_width;
    int64_t first = larger(0, left - MARGIN), last = smaller(width, left + count + MARGIN);
    /* Of too few columns, libjpeg would not interpolate the colours. */
    if (last - first < LEAST_COLUMNS) {
        last = smaller(width, first + LEAST_COLUMNS);
        first = larger(0, last - LEAST_COLUMNS);
    }
    JDIMENSION begin = (JDIMENSION)first, columns = (JDIMENSION)(last - first);
    jpeg_crop_scanline(jpeg, &begin, &columns);
    return begin;
}

/* Decodes `count` rows to `pixels`. Returns false if libjpeg gives fewer. */
static bool decode_rows(j_decompress_ptr jpeg, int64_t first, int64_t count, uint8_t *pixels, int64_t stride)
{
    if (first)
        jpeg_skip_scanlines(jpeg, (JDIMENSION)first);
    for (int64_t row = 0; row < count;) {
        JSAMPROW rows[MOST_ROWS];
        int64_t asked = smaller(MOST_ROWS, count - row);
        for (int64_t place = 0; place < asked; place++)
            rows[place] = pixels + (row + place) * stride;
        JDIMENSION got = jpeg_read_scanlines(jpeg, rows, (JDIMENSION)asked);
        if (got < 1)
            return false;
        row += got;
    }
    /* If no row is left below, libjpeg reads the end too. It may warn of what it finds there. */
    if (first + count == jpeg->output_height)
        jpeg_finish_decompress(jpeg);
    return true;
}

/* Decodes the box into the arena, and divides the rest of the arena. */
static enum state decode(struct decoder *decoder)
{
    enum state state = begin(decoder);
    if (state != DONE)
        return state;
    j_decompress_ptr jpeg = &decoder->jpeg;
    const struct image *image = decoder->image;
    /* The options that Pillow sets. */
    jpeg->out_color_space = JCS_EXT_RGB;
    jpeg->scale_num = 1;
    jpeg->scale_denom = divisor(image, decoder->plan);
    jpeg->dct_method = JDCT_ISLOW;
    jpeg->do_fancy_upsampling = TRUE;
    jpeg_start_decompress(jpeg);
    int64_t height = jpeg->output_height, width = jpeg->output_width;
    int64_t top = image->top, rows = image->box_height, left = image->left, across = image->box_width;
    scale_side(&top, &rows, height, image->height);
    scale_side(&left, &across, width, image->width);
    if (top + rows > height || left + across > width)
        return DAMAGED; /* never: at each scale the box has at least a row and a column */
    int64_t first = crop_columns(jpeg, left, across);
    int64_t columns = jpeg->output_width, stride = 3 * columns;
    if (left < first || left + across > first + columns)
        return DAMAGED; /* never: libjpeg decodes more columns than it was asked for, not fewer */
    /* So the box is inside this memory. Of each row, libjpeg writes `output_width` pixels. */
    uint8_t *decoded = take(decoder->arena, rows * stride);
    lay_out(&decoder->work, image, decoder->plan, rows, across, decoder->arena);
    if (!fits(decoder->arena))
        return TOO_LARGE;
    if (!decode_rows(jpeg, top, rows, decoded, stride))
        return DAMAGED;
    decoder->pixels = decoded + 3 * (left - first);
    decoder->stride = stride;
    return DONE;
}

/* ---- errors ---- */

/* libjpeg's `error_exit`, which must not return. */
static void leave(j_common_ptr jpeg) { longjmp(*(jmp_buf *)jpeg->client_data, 1); }

/* libjpeg's `emit_message`. Of a warning the level is -1, of a trace 0 or more. */
static void leave_if_warned(j_common_ptr jpeg, int level)
{
    if (level < 0)
        leave(jpeg);
}

/* libjpeg's `reset_error_mgr`. Nothing is kept that could be reset. */
static void forget(j_common_ptr jpeg) { (void)jpeg; }

/* Decodes, or returns DAMAGED if libjpeg objects.
 *
 * No variable here or in `render_jpeg` has an undefined value after the jump. Only `decoder` could be read here then,
 * and it is never assigned. The struct it points to is not in this frame, so it keeps what was stored before. */
static enum state decode_or_return_here(struct decoder *decoder)
{
    if (setjmp(decoder->jump))
        return DAMAGED;
    return decode(decoder);
}

void render_jpeg(struct image *image, const struct plan *plan, const uint8_t *payload, struct arena *arena)
{
    int64_t began = nanoseconds();
    struct decoder decoder = {.image = image, .plan = plan, .payload = payload, .arena = arena};
    /* libjpeg calls no other function of its error manager. `jpeg_std_error` would also set those that print to stderr.
     * With them, Debian's libjpeg.a cannot be linked into a shared object. */
    decoder.errors.error_exit = leave;
    decoder.errors.emit_message = leave_if_warned;
    decoder.errors.reset_error_mgr = forget;
    decoder.jpeg.err = &decoder.errors;
    decoder.jpeg.client_data = &decoder.jump;
    image->state = decode_or_return_here(&decoder);
    /* libjpeg keeps its tables, and what an error leaves. Otherwise it would decode the next image by them. */
    jpeg_destroy_decompress(&decoder.jpeg);
    image->decode_ns += nanoseconds() - began;
    if (image->state == DONE)
        resample(&decoder.work, image, plan, decoder.pixels, decoder.stride);
}

#endif
