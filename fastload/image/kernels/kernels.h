/* What the kernels share. The entry points are in runs.c and passes.c; `tables.py` has the structs of Python's side. */

#ifndef FASTLOAD_KERNELS_H
#define FASTLOAD_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define ENTRY __attribute__((visibility("default")))

/* ---- tables that Python fills: 8 bytes a number, in the order of tables.py ---- */

struct image {
    uint64_t key;       /* of the sample's random stream */
    int64_t file;       /* an open file, to be read at `source`; -1: `source` is an address */
    int64_t source;     /* where the payload begins */
    int64_t length;     /* bytes of the payload */
    int64_t checksum;   /* CRC-32 that the payload must have; -1: do not check it */
    int64_t height;     /* of the image, in pixels; a decoder sets it */
    int64_t width;
    int64_t top;        /* the box in the image, set by the draw */
    int64_t left;
    int64_t box_height;
    int64_t box_width;
    int64_t flip;       /* 0 or 1 */
    int64_t row;        /* address of the first element of the result */
    int64_t state;      /* one of the states below */
    int64_t read_ns;    /* the time of each stage */
    int64_t decode_ns;
    int64_t transform_ns;
};

struct plan {
    int64_t kind;                   /* one of the kinds below */
    int64_t height, width;          /* of the result, in pixels */
    double area_base, area_span;    /* float32 values, as doubles: a draw is `base + unit * span`, rounded once */
    double log_ratio_base, log_ratio_span;
    double ratio_low, ratio_high;   /* as given, in double precision */
    double flip;                    /* the probability, rounded to float32; 0: draw nothing for it */
    int64_t resize_height;          /* the size before a center crop; with resize_width -1 that of the shorter side */
    int64_t resize_width;
    int64_t scaled;                 /* 1: a decoder may decode at 1/2, 1/4, 1/8 */
    int64_t colour_step;            /* distances in the result, in elements: from a colour, a row, a pixel to the next */
    int64_t row_step;
    int64_t pixel_step;
    int64_t floats;                 /* 1: results are float32, `byte * factor - shift`, 0: uint8 */
    double factors[3], shifts[3];   /* float32 values, as doubles, of red, green and blue */
    int64_t most_pixels;            /* a larger image is refused; 0: no limit */
};

enum kind { RANDOM_RESIZED_CROP, RESIZE, RESIZE_CENTER_CROP };

/* If it is not DONE, the content of the row is undefined, and Python reads the sample again. */
enum state {
    DONE,
    UNDECIDED,  /* the last bit of exp decides the length of a side of the box */
    UNREADABLE, /* a read failed, or the file ends too soon */
    DAMAGED,    /* a wrong checksum, or an image that the decoder refuses or warns of */
    TOO_LARGE   /* more than `most_pixels`, or than the arena holds */
};

/* Sides of images and results are below this, so that no product of two sides and a few bytes overflows. */
#define LONGEST_SIDE ((INT64_C(1) << 28) - 1)

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static inline void *pointer(int64_t address) { return (void *)(uintptr_t)address; }

static inline int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* ---- scratch memory of a thread, divided anew for each image ---- */

struct arena {
    uint8_t *begin; /* a multiple of 64 */
    int64_t bytes;
    int64_t used;   /* also counts what did not fit */
};

static inline int64_t rounded_up(int64_t bytes) { return (bytes + 63) & ~INT64_C(63); }

/* Returns memory at a multiple of 64, or NULL if the arena has too little. Then `used` says how much it needs. */
static inline void *take(struct arena *arena, int64_t bytes)
{
    int64_t at = arena->used;
    arena->used += rounded_up(bytes);
    return arena->used <= arena->bytes ? arena->begin + at : NULL;
}

static inline bool fits(const struct arena *arena) { return arena->used <= arena->bytes; }

/* ---- draws.c ---- */

/* Draws the box and the flip of an image of `height` by `width`. Sets its state, and returns whether that is DONE. */
bool draw(struct image *image, const struct plan *plan);

struct size { int64_t height, width; };

/* Returns the size to which the box is resized, before a center crop. */
struct size size_before_crop(const struct image *image, const struct plan *plan);

/* ---- payload.c ---- */

/* Returns the payload's bytes from `first` on, checked: where they are, or read into `room`. Sets the state if it cannot. */
const uint8_t *read_payload(struct image *image, int64_t first, int64_t count, uint8_t *room);

/* Reads the file whose name is at `source`, and sets length and state. Returns its bytes, or NULL. */
const uint8_t *read_file(struct image *image, struct arena *arena);

/* Lets the system read the payloads of images in open files, if some of them are not in the page cache. */
void read_ahead(const struct image *images, int64_t count);

/* ---- checksum.c ---- */

/* Returns zlib's CRC-32. */
uint32_t checksum(const uint8_t *bytes, int64_t count);

/* ---- resample.c ---- */

/* One pass, in one direction: which pixels of the box make each kept pixel of the resized image, with which weights. */
struct table {
    int64_t before;    /* pixels of the box */
    int64_t after;     /* pixels of the resized image */
    int64_t first;     /* the first of these that is kept, in the order of the result */
    int64_t kept;      /* their number */
    int64_t black;     /* black pixels of the result before them */
    int64_t most_taps; /* an even number, and a bound of `taps` */
    double *shares;    /* unrounded weights, `most_taps` for each pixel of the resized image */
    int64_t *begins;   /* the first pixel of the box for each kept pixel; of columns: its byte */
    int16_t *weights;  /* `taps` for each kept pixel */
    int64_t *groups;   /* of columns, if `is_grouped`: see `prepare` in passes_avx2.c */
    int taps;          /* an even number */
    int bits;          /* weights are multiples of 2^-bits */
    bool mirrored;
    bool is_grouped;
};

struct passes;

enum { PATTERN = 24 }; /* the least common multiple of 3 colours and 8 floats of a vector */

/* All that the passes of an image share. */
struct work {
    const struct passes *passes;
    struct table columns, rows;
    const uint8_t *pixels; /* of the box */
    int64_t stride;
    int64_t safe_rows;     /* rows from the top that may be read beyond their end */
    uint8_t *padded;       /* copies of two rows that may not */
    int64_t padded_bytes;
    uint8_t *lines;        /* rows of the box after the first pass */
    int64_t most_lines;
    int64_t line_bytes;
    int64_t plane_bytes;   /* 0: colours are interleaved */
    uint8_t *assembled;    /* a row of the result, if it is not written directly */
    int planes;            /* of lines and result: 3, or 1 if colours are interleaved */
    bool is_direct;
    bool past_caches;
    float factors[3][PATTERN]; /* of the elements of a plane, repeated */
    float shifts[3][PATTERN];
};

/* Takes the memory to resize a box of `height` by `width` pixels, of this image or of the image decoded smaller. */
void lay_out(struct work *work, const struct image *image, const struct plan *plan, int64_t height, int64_t width,
             struct arena *arena);

/* Writes the row of an image of state DONE from the box at `pixels`, uint8[height][width][3], rows `stride` bytes apart.
 * Bytes between the rows must be readable. Nothing after the last pixel is read. Sets UNDECIDED if the result is neither
 * in planes nor interleaved. `lay_out` must have been given enough memory. */
void resample(struct work *work, struct image *image, const struct plan *plan, const uint8_t *pixels, int64_t stride);

/* ---- jpeg.c ---- */

/* Draws the box of a JPEG in memory, decodes no more than it needs, and writes the row. Sets the state. */
void render_jpeg(struct image *image, const struct plan *plan, const uint8_t *payload, struct arena *arena);

/* The name and version of libjpeg-turbo, or NULL if this was built without it. */
extern const char *const jpeg_library;

/* ---- passes_*.c: the inner loops, for each kind of processor ---- */

enum { BLOCK = 32 };

struct passes {
    const char *name;

    /* Fills `columns->groups`, two numbers for each four columns, and returns true if `two_lines` can use them. May be NULL. */
    bool (*prepare)(const struct table *columns);

    /* Computes two lines of `columns->kept` pixels from two rows of the box. It may read 16 bytes after the pixels of the
     * taps, and write 16 pixels more. `plane_bytes` 0: interleaved colours. */
    void (*two_lines)(const uint8_t *upper, const uint8_t *lower, const struct table *columns, int64_t plane_bytes,
                      uint8_t *line, uint8_t *next);

    /* Blends `count` bytes, a multiple of BLOCK, of lines that are `line_bytes` apart, to a row. */
    void (*blend)(const uint8_t *line, int64_t line_bytes, const struct table *rows, int64_t row, uint8_t *to,
                  int64_t count);

    /* Writes `byte * factor - shift`, each operation rounded. Factors and shifts repeat after PATTERN floats. */
    void (*to_floats)(const uint8_t *bytes, int64_t count, const float *factors, const float *shifts, bool past_caches,
                      float *to);

    /* Makes the floats visible to other threads before any later store. NULL: they are. */
    void (*finish)(void);
};

void plain_to_floats(const uint8_t *bytes, int64_t count, const float *factors, const float *shifts, bool past_caches,
                     float *to);

extern const struct passes plain_passes, avx2_passes, neon_passes;

/* ---- passes.c ---- */

/* The passes for this processor, or the plain ones if Python asked for them. */
const struct passes *passes(void);

#endif
