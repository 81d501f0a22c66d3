/* The entry points: a run of images in one call, each with its own state in its row of `struct image`.
 *
 * All arguments and results are integers of 64 bits, addresses too. Python checks that tables, results and arenas have the
 * sizes that they say. No Python object is touched, so the caller need not hold the GIL.
 */

#include "kernels.h"

#define ENTRY __attribute__((visibility("default"))) int64_t

static bool is_plain; /* set once, before the first run */

const struct passes *passes(void)
{
    if (is_plain)
        return &plain_passes;
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") ? &avx2_passes : &plain_passes;
#elif defined(__aarch64__)
    return &neon_passes;
#else
    return &plain_passes;
#endif
}

typedef void renderer(struct image *image, const struct plan *plan, struct arena *arena);

/* Calls `render` for each image that is DONE. Returns the bytes of the arena that the largest image needs beyond those that
 * there are, or 0 if all fit. */
static int64_t run(int64_t images, int64_t count, int64_t plan, int64_t arena, int64_t arena_bytes, renderer *render)
{
    int64_t needed = 0;
    for (int64_t k = 0; k < count; k++) {
        struct image *image = (struct image *)(uintptr_t)images + k;
        struct arena scratch = {(uint8_t *)(uintptr_t)arena, arena_bytes, 0};
        if (image->state != DONE)
            continue;
        render(image, (const struct plan *)(uintptr_t)plan, &scratch);
        if (!fits(&scratch)) {
            image->state = TOO_LARGE;
            needed = larger(needed, scratch.used);
        }
    }
    return needed;
}

static void render_box(struct image *image, const struct plan *plan, struct arena *arena)
{
    struct work work;
    lay_out(&work, image, plan, image->box_height, image->box_width, arena);
    if (fits(arena))
        resample(&work, image, plan, (const uint8_t *)(uintptr_t)image->source, image->stride);
}

static void render_raw(struct image *image, const struct plan *plan, struct arena *arena)
{
    if (draw(image, plan) != DONE)
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
    if (!fits(arena))
        return;
    const uint8_t *pixels = read_payload(image, first, count, room);
    if (pixels != NULL)
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
    if (payload != NULL)
        render_jpeg(image, plan, payload, arena);
}

static void render_file(struct image *image, const struct plan *plan, struct arena *arena)
{
    const uint8_t *payload = read_file(image, arena);
    if (payload != NULL)
        render_jpeg(image, plan, payload, arena);
}

/* Draws the boxes and flips of the images that are DONE. Returns how many are DONE after that. */
ENTRY draw_run(int64_t images, int64_t count, int64_t plan)
{
    int64_t done = 0;
    for (int64_t k = 0; k < count; k++) {
        struct image *image = (struct image *)(uintptr_t)images + k;
        done += image->state == DONE && draw(image, (const struct plan *)(uintptr_t)plan) == DONE;
    }
    return done;
}

/* Writes the rows of the images from their boxes at `source`. */
ENTRY resample_run(int64_t images, int64_t count, int64_t plan, int64_t arena, int64_t arena_bytes)
{
    return run(images, count, plan, arena, arena_bytes, render_box);
}

/* Writes the rows of the images from raw pixels in a file or in memory. */
ENTRY raw_run(int64_t images, int64_t count, int64_t plan, int64_t arena, int64_t arena_bytes)
{
    return run(images, count, plan, arena, arena_bytes, render_raw);
}

/* Writes the rows of the images from JPEGs in memory or in open files. */
ENTRY jpeg_run(int64_t images, int64_t count, int64_t plan, int64_t arena, int64_t arena_bytes)
{
    return run(images, count, plan, arena, arena_bytes, render_encoded);
}

/* Does as `jpeg_run`, with whole files: `source` is the address of a name that ends with a zero byte. */
ENTRY file_run(int64_t images, int64_t count, int64_t plan, int64_t arena, int64_t arena_bytes)
{
    return run(images, count, plan, arena, arena_bytes, render_file);
}

/* Returns `zlib.crc32` of bytes. */
ENTRY crc32(int64_t bytes, int64_t count, int64_t begin)
{
    return checksum((const uint8_t *)(uintptr_t)bytes, count, (uint32_t)begin);
}

/* Uses the passes for any processor from now on. No run may be in progress. */
ENTRY use_plain(int64_t plain)
{
    is_plain = plain != 0;
    return 0;
}

/* Returns the addresses of a name: of the passes, and of libjpeg or 0. */
ENTRY passes_name(void) { return (int64_t)(uintptr_t)passes()->name; }
ENTRY jpeg_name(void) { return (int64_t)(uintptr_t)jpeg_library(); }
