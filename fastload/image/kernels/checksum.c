/* zlib's CRC-32, 16 bytes at a time: M. E. Kounavis and F. L. Berry, "A Systematic Approach to Building High Performance
 * Software-Based CRC Generators", 2005. */

#include "kernels.h"

/* The message is a polynomial over GF(2), and its checksum the remainder modulo this one, with x^32 left out. All is
 * reflected: the highest coefficient is bit 0. */
#define POLYNOMIAL UINT32_C(0xEDB88320)

enum { SLICES = 16 };

static uint32_t remainders[SLICES][256]; /* of a byte and 0 to 15 zero bytes after it */

__attribute__((constructor)) static void find_remainders(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t remainder = byte;
        for (int zeros = 0; zeros < SLICES; zeros++) {
            for (int bit = 0; bit < 8; bit++)
                remainder = (remainder >> 1) ^ (POLYNOMIAL & -(remainder & 1));
            remainders[zeros][byte] = remainder;
        }
    }
}

uint32_t checksum(const uint8_t *bytes, int64_t count)
{
    uint32_t inverted = UINT32_MAX; /* as zlib keeps it between its first and its last step */
    for (; count >= SLICES; bytes += SLICES, count -= SLICES) {
        uint32_t next = 0;
        for (int k = 0; k < SLICES; k++)
            next ^= remainders[SLICES - 1 - k][k < 4 ? bytes[k] ^ ((inverted >> (8 * k)) & 255) : bytes[k]];
        inverted = next;
    }
    for (; count > 0; bytes++, count--)
        inverted = (inverted >> 8) ^ remainders[0][(inverted ^ *bytes) & 255];
    return ~inverted;
}
