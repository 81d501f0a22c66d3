/* The EXIF orientation of a JPEG, if Pillow finds it where everyone else does, and segments that Pillow refuses. */

#include "kernels.h"

static int64_t number(const uint8_t *at, int bytes, bool big)
{
    int64_t value = 0;
    for (int place = 0; place < bytes; place++)
        value = value << 8 | at[big ? place : bytes - 1 - place];
    return value;
}

/* Returns the tag in a TIFF header with its first directory: 0 for none, -1 if Pillow must look at it. */
static int tag_in_tiff(const uint8_t *tiff, int64_t bytes)
{
    static const uint8_t sizes[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8}; /* of a value of each type */
    enum { ORIENTATION = 0x0112, X_RESOLUTION = 0x011A, SHORT = 3, RATIONAL = 5, ENTRY_BYTES = 12 };
    if (bytes < 8 || (memcmp(tiff, "II*\0", 4) && memcmp(tiff, "MM\0*", 4)))
        return -1;
    bool big = *tiff == 'M';
    int64_t at = number(tiff + 4, 4, big);
    if (at < 8 || at > bytes - 2)
        return -1;
    int64_t entries = number(tiff + at, 2, big), total = 0;
    at += 2;
    /* Here is the proof that all reads below are inside: the entries and the next directory's offset are. */
    if (at + entries * ENTRY_BYTES + 4 > bytes)
        return -1;
    int found = 0;
    for (const uint8_t *entry = tiff + at; entries > 0; entries--, entry += ENTRY_BYTES) {
        int64_t name = number(entry, 2, big), type = number(entry + 2, 2, big), count = number(entry + 4, 4, big);
        if (type < 1 || type >= (int64_t)sizeof sizes || (name == X_RESOLUTION && type != RATIONAL))
            return -1; /* Pillow fails for some types of a resolution */
        int64_t size = count * sizes[type]; /* below 2^35 */
        total += size > 4 ? size : 0;
        if (total > bytes || (size > 4 && number(entry + 8, 4, big) > bytes - size))
            return -1;
        if (name != ORIENTATION)
            continue;
        if (found || type != SHORT || count != 1)
            return -1;
        int64_t tag = number(entry + 8, 2, big);
        found = tag >= 1 && tag <= 8 ? (int)tag : 1;
    }
    return found;
}

/* Pillow joins several segments of EXIF. If there is no tag in them, it searches the XMP. It refuses some short
 * segments, some types of a resolution, and a block of Photoshop that is cut off after its number. */
int orientation(const uint8_t *payload, const uint8_t *scan, bool upright)
{
    enum { APP0 = 0xE0, APP1 = 0xE1, APP2 = 0xE2, APP13 = 0xED, APP15 = 0xEF, LEAST_SEGMENT = 12, LEAST_PROFILE = 14 };
    int tag = 0;
    bool has_exif = false, has_other = false;
    for (const uint8_t *at = payload + 2; at < scan;) {
        if (scan - at < 4 || at[0] != 0xFF || at[1] < 0xC0 || at[1] == 0xFF || (at[1] >= 0xD0 && at[1] <= 0xD8))
            return -1; /* a marker that has no length, or no marker */
        int marker = at[1];
        int64_t bytes = number(at + 2, 2, true) - 2;
        at += 4;
        if (bytes < 0 || bytes > scan - at)
            return -1;
        if (marker >= APP0 && marker <= APP15 && bytes < LEAST_SEGMENT)
            return -1;
        if (marker == APP2 && (bytes < LEAST_PROFILE || (upright && !memcmp(at, "MPF\0", 4))))
            return -1;
        if (marker == APP13 && !memcmp(at + bytes - 6, "8BIM", 4))
            return -1;
        if (marker == APP1 && memcmp(at, "Exif\0\0", 6))
            has_other = true;
        else if (marker == APP1) {
            tag = has_exif ? -1 : tag_in_tiff(at + 6, bytes - 6);
            if (tag < 0)
                return -1;
            has_exif = true;
        }
        at += bytes;
    }
    if (upright && !tag && has_other)
        return -1;
    return upright && tag ? tag : 1;
}
