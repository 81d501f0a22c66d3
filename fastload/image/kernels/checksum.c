/* zlib's CRC-32: by carry-less multiplication, by the instructions of aarch64, or by tables. */

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__AARCH64EL__) && defined(__linux__)
#include <sys/auxv.h>
#endif

/* The message is a polynomial over GF(2), and its checksum the remainder modulo this one, with x^32 left out. All is
 * reflected: the highest coefficient is bit 0. */
#define POLYNOMIAL UINT32_C(0xEDB88320)

/* The functions below update an inverted checksum, as zlib keeps it between its first and its last step. */

static uint32_t one_byte(uint32_t inverted)
{
    for (int bit = 0; bit < 8; bit++)
        inverted = (inverted >> 1) ^ (POLYNOMIAL & -(inverted & 1));
    return inverted;
}

static uint32_t by_bytes(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    for (int64_t k = 0; k < count; k++)
        inverted = one_byte(inverted ^ bytes[k]);
    return inverted;
}

/* ---- by tables ---- */

enum { SLICES = 8, LEAST_FOR_TABLES = 256 }; /* to fill the tables takes as long as some 150 bytes one by one */

static inline uint32_t word_at(const uint8_t *bytes)
{
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

/* The remainder is linear, so 8 bytes are the sum of each one with zeros after it. `after[k][byte]` is a byte with k zeros. */
static uint32_t by_tables(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    uint32_t after[SLICES][256];
    for (uint32_t byte = 0; byte < 256; byte++)
        after[0][byte] = one_byte(byte);
    for (int k = 1; k < SLICES; k++)
        for (int byte = 0; byte < 256; byte++)
            after[k][byte] = (after[k - 1][byte] >> 8) ^ after[0][after[k - 1][byte] & 255];
    for (; count >= SLICES; bytes += SLICES, count -= SLICES) {
        uint32_t low = word_at(bytes) ^ inverted, high = word_at(bytes + 4);
        inverted = after[7][low & 255] ^ after[6][low >> 8 & 255] ^ after[5][low >> 16 & 255] ^ after[4][low >> 24]
                   ^ after[3][high & 255] ^ after[2][high >> 8 & 255] ^ after[1][high >> 16 & 255] ^ after[0][high >> 24];
    }
    return by_bytes(bytes, count, inverted);
}

static uint32_t plainly(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    return count < LEAST_FOR_TABLES ? by_bytes(bytes, count, inverted) : by_tables(bytes, count, inverted);
}

/* ---- by the instructions of the processor ---- */

#if defined(__x86_64__)

/* Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009: 128 bits are
 * multiplied by x^n modulo the polynomial, and added to the 128 bits that follow n bits later. The low half comes first,
 * so it moves 64 bits farther. A product of reflected numbers is one bit off, and 32 more bits of a factor are in use:
 * hence n + 32 for the low half and n - 32 for the high one, each reflected in 32 bits and shifted left by one.
 * These are the paper's k1 to k4. tests/image/test_kernels_checksum.py computes them from the polynomial. */
#define LOW_BY_512_BITS 0x154442BD4
#define HIGH_BY_512_BITS 0x1C6E41596
#define LOW_BY_128_BITS 0x1751997D0
#define HIGH_BY_128_BITS 0x0CCAA009E

#define CARRY_LESS __attribute__((target("pclmul,sse4.1")))

CARRY_LESS static inline __m128i load(const uint8_t *bytes) { return _mm_loadu_si128((const __m128i *)bytes); }

CARRY_LESS static inline __m128i fold(__m128i remainder, __m128i factors, __m128i data)
{
    __m128i low = _mm_clmulepi64_si128(remainder, factors, 0x00);
    __m128i high = _mm_clmulepi64_si128(remainder, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), data);
}

/* Takes a multiple of 16 bytes, at least 64. */
CARRY_LESS static uint32_t folded(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    const uint8_t *end = bytes + count;
    __m128i first = _mm_xor_si128(load(bytes), _mm_cvtsi32_si128((int)inverted));
    __m128i second = load(bytes + 16), third = load(bytes + 32), fourth = load(bytes + 48);
    __m128i factors = _mm_set_epi64x(HIGH_BY_512_BITS, LOW_BY_512_BITS);
    for (bytes += 64; end - bytes >= 64; bytes += 64) {
        first = fold(first, factors, load(bytes));
        second = fold(second, factors, load(bytes + 16));
        third = fold(third, factors, load(bytes + 32));
        fourth = fold(fourth, factors, load(bytes + 48));
    }
    factors = _mm_set_epi64x(HIGH_BY_128_BITS, LOW_BY_128_BITS);
    first = fold(fold(fold(first, factors, second), factors, third), factors, fourth);
    for (; bytes < end; bytes += 16)
        first = fold(first, factors, load(bytes));
    /* These 16 bytes have the same remainder as all the bytes folded into them. */
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, first);
    return by_bytes(rest, 16, 0);
}

static uint32_t by_processor(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1"))
        return plainly(bytes, count, inverted);
    int64_t whole = count < 64 ? 0 : count & ~INT64_C(15);
    if (whole)
        inverted = folded(bytes, whole, inverted);
    return by_bytes(bytes + whole, count - whole, inverted);
}

#elif defined(__AARCH64EL__) && defined(__linux__)

/* As assembly, because the names of the attribute and of the intrinsics differ between compilers. */
static inline uint32_t eight_bytes(uint32_t inverted, uint64_t bytes)
{
    __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(inverted) : "r"(bytes));
    return inverted;
}

static uint32_t by_instructions(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    for (; count >= 8; bytes += 8, count -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        inverted = eight_bytes(inverted, word);
    }
    return by_bytes(bytes, count, inverted);
}

static uint32_t by_processor(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    bool has_crc32 = getauxval(AT_HWCAP) & HWCAP_CRC32;
    return has_crc32 ? by_instructions(bytes, count, inverted) : plainly(bytes, count, inverted);
}

#else

static uint32_t by_processor(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    return plainly(bytes, count, inverted);
}

#endif

uint32_t checksum(const uint8_t *bytes, int64_t count, uint32_t begin)
{
    bool only_plain = passes() == &plain_passes;
    return ~(only_plain ? plainly(bytes, count, ~begin) : by_processor(bytes, count, ~begin));
}
