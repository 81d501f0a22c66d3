/* zlib's CRC-32: by carry-less multiplication, by the instructions of aarch64, or by a table. */

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

static uint32_t by_table(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    uint32_t table[256];
    for (uint32_t byte = 0; byte < 256; byte++)
        table[byte] = one_byte(byte);
    for (int64_t k = 0; k < count; k++)
        inverted = (inverted >> 8) ^ table[(inverted ^ bytes[k]) & 255];
    return inverted;
}

/* ---- by the instructions of the processor ---- */

/* Fewer bytes than a table would take. */
static inline uint32_t by_bits(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    for (int64_t k = 0; k < count; k++)
        inverted = one_byte(inverted ^ bytes[k]);
    return inverted;
}

#if defined(__x86_64__)

/* Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009: 128 bits are
 * multiplied by x^n modulo the polynomial, and added to the 128 bits that follow n bits later. The low half comes first,
 * so it moves 64 bits farther. A product of reflected numbers is one bit off, and 32 more bits of a factor are in use:
 * hence n + 32 for the low half and n - 32 for the high one, each reflected in 32 bits and shifted left by one.
 * These are the paper's k1 to k4. */
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
    __m128i remainders[4] = {load(bytes), load(bytes + 16), load(bytes + 32), load(bytes + 48)};
    remainders[0] = _mm_xor_si128(remainders[0], _mm_cvtsi32_si128((int)inverted));
    __m128i factors = _mm_set_epi64x(HIGH_BY_512_BITS, LOW_BY_512_BITS);
    for (bytes += 64; end - bytes >= 64; bytes += 64)
        for (int k = 0; k < 4; k++)
            remainders[k] = fold(remainders[k], factors, load(bytes + 16 * k));
    factors = _mm_set_epi64x(HIGH_BY_128_BITS, LOW_BY_128_BITS);
    __m128i remainder = remainders[0];
    for (int k = 1; k < 4; k++)
        remainder = fold(remainder, factors, remainders[k]);
    for (; bytes < end; bytes += 16)
        remainder = fold(remainder, factors, load(bytes));
    /* These 16 bytes have the same remainder as all the bytes folded into them. */
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, remainder);
    return by_bits(rest, 16, 0);
}

static uint32_t by_instructions(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    int64_t whole = count < 64 ? 0 : count & ~INT64_C(15);
    if (whole)
        inverted = folded(bytes, whole, inverted);
    return by_bits(bytes + whole, count - whole, inverted);
}

#elif defined(__AARCH64EL__) && defined(__linux__)

/* As assembly, because the names of the attribute and of the intrinsics differ between compilers. */
static uint32_t by_instructions(const uint8_t *bytes, int64_t count, uint32_t inverted)
{
    if (!(getauxval(AT_HWCAP) & HWCAP_CRC32))
        return by_table(bytes, count, inverted);
    for (; count >= 8; bytes += 8, count -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(inverted) : "r"(word));
    }
    return by_bits(bytes, count, inverted);
}

#else

static uint32_t (*const by_instructions)(const uint8_t *bytes, int64_t count, uint32_t inverted) = by_table;

#endif

uint32_t checksum(const uint8_t *bytes, int64_t count)
{
    bool is_plain = passes() == &plain_passes;
    return ~(is_plain ? by_table : by_instructions)(bytes, count, UINT32_MAX);
}
