/* The entry points: a run of images in one call, each with its own state in its row of `struct image`.
 *
 * Python checks that tables, results and arenas have the sizes that they say. No Python object is touched, so the caller
 * need not hold the GIL.
 */

#include "kernels.h"

/* Renders one image. It may need more bytes of the arena than there are. */
typedef void renderer(struct image *image, const struct plan *plan, struct arena *arena);

static void render_raw(struct image *image, const struct plan *plan, struct arena *arena)
{
    if (!draw(image, plan))
        return;
    int64_t stride = 3 * image->width;
    if (image->length != image->height * stride) {
        image->state = DAMAGED;
        return;
    }
    /* The bytes of the payload that the box needs. A checksum needs all. */
    int64_t box = image->top * stride + 3 * image->left;
    int64_t first = box, count = (image->box_height - 1) * stride + 3 * image->box_width;
    if (image->checksum >= 0) {
        first = 0;
        count = image->length;
    }
    uint8_t *room = image->file >= 0 ? take(arena, count) : NULL;
    struct work work;
    lay_out(&work, image, plan, image->box_height, image->box_width, arena);
    const uint8_t *pixels = fits(arena) ? read_payload(image, first, count, room) : NULL;
    if (pixels)
        resample(&work, image, plan, pixels + box - first, stride);
}

static const int64_t MOST_BYTES = INT64_C(1) << 40; /* so that no sum of sizes overflows */

static void render_encoded(struct image *image, const struct plan *plan, struct arena *arena)
{
    if (image->length < 1 || image->length > MOST_BYTES) {
        image->state = DAMAGED;
        return;
    }
    uint8_t *room = image->file >= 0 ? take(arena, image->length) : NULL;
    const uint8_t *payload = fits(arena) ? read_payload(image, 0, image->length, room) : NULL;
    if (payload)
        render_jpeg(image, plan, payload, arena);
}

static void render_file(struct image *image, const struct plan *plan, struct arena *arena)
{
    const uint8_t *payload = read_file(image, arena);
    if (payload)
        render_jpeg(image, plan, payload, arena);
}

static int64_t run(struct image *images, int64_t count, const struct plan *plan, uint8_t *arena, int64_t arena_bytes,
                   renderer *render)
{
    int64_t needed = 0;
    for (struct image *image = images; image < images + count; image++) {
        struct arena scratch = {arena, arena_bytes, 0};
        if (image->state != DONE)
            continue;
        render(image, plan, &scratch);
        if (!fits(&scratch)) {
            image->state = TOO_LARGE;
            needed = larger(needed, scratch.used);
        }
    }
    return needed;
}

/* ---- entry points ---- */

/* The three runs below write the row of each image that is DONE. They return the bytes of the arena that the largest image
 * needs beyond those that there are, or 0 if all fit. */

/* From raw pixels in a file or in memory. */
ENTRY int64_t raw_run(struct image *images, int64_t count, const struct plan *plan, uint8_t *arena, int64_t arena_bytes)
{
    read_ahead(images, count);
    return run(images, count, plan, arena, arena_bytes, render_raw);
}

/* From a JPEG in an open file or in memory. */
ENTRY int64_t jpeg_run(struct image *images, int64_t count, const struct plan *plan, uint8_t *arena, int64_t arena_bytes)
{
    read_ahead(images, count);
    return run(images, count, plan, arena, arena_bytes, render_encoded);
}

/* From a whole file: `source` is the address of its name, which ends with a zero byte. */
ENTRY int64_t file_run(struct image *images, int64_t count, const struct plan *plan, uint8_t *arena, int64_t arena_bytes)
{
    return run(images, count, plan, arena, arena_bytes, render_file);
}

/* Returns the name and version of libjpeg, or NULL if this was built without it. */
ENTRY const char *jpeg_name(void) { return jpeg_library; }
