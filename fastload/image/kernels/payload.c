/* The bytes of an image: read from its file, compared with their checksum, and timed. */

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "kernels.h"

/* Python reads a larger file, or a directory, whose end some file systems put beyond this. */
#define MOST_FILE_BYTES (INT64_C(1) << 30)

/* Reads `count` bytes from `offset` on. Returns false if the file has fewer, or cannot be read. */
static bool read_all(int file, uint8_t *to, int64_t count, int64_t offset)
{
    int64_t end;
    if (count < 0 || __builtin_add_overflow(offset, count, &end))
        return false;
    /* `offset + done` is at most `end`, so it does not overflow. The kernel refuses a negative one. */
    for (int64_t done = 0; done < count;) {
        ssize_t got = pread(file, to + done, (size_t)(count - done), offset + done);
        if (got > 0)
            done += got;
        else if (got == 0 || errno != EINTR)
            return false;
    }
    return true;
}

static bool read_part(const struct image *image, int64_t first, int64_t count, uint8_t *room)
{
    int64_t offset;
    return !__builtin_add_overflow(image->source, first, &offset) && read_all((int)image->file, room, count, offset);
}

static bool has_checksum(const struct image *image, const uint8_t *bytes, int64_t count)
{
    return image->checksum < 0 || checksum(bytes, count) == image->checksum;
}

const uint8_t *read_payload(struct image *image, int64_t first, int64_t count, uint8_t *room)
{
    int64_t began = nanoseconds();
    const uint8_t *bytes = NULL;
    if (image->file < 0)
        bytes = (const uint8_t *)pointer(image->source) + first;
    else if (read_part(image, first, count, room))
        bytes = room;
    else
        image->state = UNREADABLE;
    if (bytes && !has_checksum(image, bytes, count)) {
        image->state = DAMAGED;
        bytes = NULL;
    }
    image->read_ns += nanoseconds() - began;
    return bytes;
}

/* ---- ahead ---- */

enum { EVERY = 8 }; /* images of which one is looked at: less than 1 us an image */

/* Returns whether a byte of an open file is not in the page cache. */
static bool is_cold(int file, int64_t offset)
{
    uint8_t byte;
    struct iovec one = {&byte, 1};
    return preadv2(file, &one, 1, offset, RWF_NOWAIT) < 0 && errno == EAGAIN;
}

void read_ahead(const struct image *images, int64_t count)
{
    bool cold = false;
    for (int64_t k = 0; k < count && !cold; k += EVERY)
        cold = is_cold((int)images[k].file, images[k].source);
    for (int64_t k = 0; k < count && cold; k++)
        posix_fadvise((int)images[k].file, images[k].source, images[k].length, POSIX_FADV_WILLNEED);
}

/* ---- files ---- */

/* Reads an open file whole. A file that another process shortens or lengthens meanwhile is UNREADABLE. */
static const uint8_t *read_whole(struct image *image, int file, struct arena *arena)
{
    int64_t length = lseek(file, 0, SEEK_END);
    image->length = length;
    if (length < 1 || length > MOST_FILE_BYTES) {
        image->state = UNREADABLE;
        return NULL;
    }
    uint8_t *bytes = take(arena, length);
    if (!bytes) {
        image->state = TOO_LARGE;
        return NULL;
    }
    if (!read_all(file, bytes, length, 0) || lseek(file, 0, SEEK_END) != length) {
        image->state = UNREADABLE;
        return NULL;
    }
    return bytes;
}

const uint8_t *read_file(struct image *image, struct arena *arena)
{
    int64_t began = nanoseconds();
    const uint8_t *bytes = NULL;
    int file = open(pointer(image->source), O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        image->state = UNREADABLE;
    } else {
        bytes = read_whole(image, file, arena);
        close(file);
    }
    image->read_ns += nanoseconds() - began;
    return bytes;
}
