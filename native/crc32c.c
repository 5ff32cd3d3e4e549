/* SPDX-License-Identifier: Apache-2.0 */
#include "crc32c.h"
#include "kvio.h"
#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#define POLYNOMIAL 0x82F63B78u /* Castagnoli, reflected */
#define ROUND_LINES 8u         /* 64-byte lines in each third of a round */
#define ROUND_BYTES (ROUND_LINES * 192u)
#define PREFETCH_BYTES 4096u

enum how { CHECK, COPY, STREAM, STREAM_ALONE };

static uint32_t slices[8][256];                   /* slices[i][b]: byte b, then i zero bytes */
static uint64_t line_shifts[2 * ROUND_LINES + 1]; /* multipliers: n lines of zero bytes on */
static const struct crc_kernel *chosen;

static inline uint64_t load_u64(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* ---- any processor ---- */
static uint32_t portable_check(uint32_t crc, const uint8_t *from, size_t length,
                               const uint8_t *end) {
    (void)end;
    for (; length >= 8; length -= 8, from += 8) {
        uint64_t word = load_u64(from);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
#endif
        word ^= crc;
        crc = 0;
        for (unsigned i = 0; i < 8; i++)
            crc ^= slices[7 - i][(word >> (8 * i)) & 0xFF];
    }
    for (; length; length--, from++)
        crc = (crc >> 8) ^ slices[0][(crc ^ *from) & 0xFF];
    return crc;
}

static uint32_t portable_copy(uint32_t crc, uint8_t *to, const uint8_t *from, size_t length,
                              const uint8_t *end) {
    while (length) { /* the checksum reads from the cache what the copy brought there */
        size_t part = length < 8192 ? length : 8192;
        memcpy(to, from, part);
        crc = portable_check(crc, from, part, end);
        to += part, from += part, length -= part;
    }
    return crc;
}

static uint32_t portable_alone(uint32_t crc, uint8_t *to, const uint8_t *from, size_t length,
                               const uint8_t *end) {
    (void)end;
    memcpy(to, from, length);
    return crc;
}

static const struct crc_kernel portable_kernel = {portable_check, portable_copy, portable_copy,
                                                  portable_alone};

/* ---- x86-64: crc32 and carry-less multiplication, with 16 or 32 byte copies ---- */
#if defined(__x86_64__)
#define CRC_U64(crc, word) _mm_crc32_u64(crc, word)
#define CRC_U8(crc, byte) _mm_crc32_u8(crc, byte)
#define SHIFT(crc, lines)                                                                          \
    ((uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(_mm_clmulepi64_si128(                  \
                                    _mm_cvtsi32_si128((int)(crc)),                                 \
                                    _mm_cvtsi64_si128((int64_t)line_shifts[lines]), 0))))

#define TARGET __attribute__((target("sse4.2,pclmul")))
#define KERNEL(name) sse_##name
#define STREAM_ALIGN 16u
#define COPY_LINE(to, from, how) sse_copy_line(to, from, how)
TARGET static inline __attribute__((always_inline)) void
sse_copy_line(uint8_t *to, const uint8_t *from, enum how how) {
    for (unsigned i = 0; i < 64; i += 16) {
        __m128i part = _mm_loadu_si128((const __m128i *)(const void *)(from + i));
        if (how == STREAM)
            _mm_stream_si128((__m128i *)(void *)(to + i), part);
        else
            _mm_storeu_si128((__m128i *)(void *)(to + i), part);
    }
}
#include "crc32c_kernel.h"
#undef TARGET
#undef KERNEL
#undef STREAM_ALIGN
#undef COPY_LINE

#define TARGET __attribute__((target("avx2,sse4.2,pclmul")))
#define KERNEL(name) avx2_##name
#define STREAM_ALIGN 32u
#define COPY_LINE(to, from, how) avx2_copy_line(to, from, how)
TARGET static inline __attribute__((always_inline)) void
avx2_copy_line(uint8_t *to, const uint8_t *from, enum how how) {
    __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)from);
    __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));
    if (how == STREAM) {
        _mm256_stream_si256((__m256i *)(void *)to, low);
        _mm256_stream_si256((__m256i *)(void *)(to + 32), high);
    } else {
        _mm256_storeu_si256((__m256i *)(void *)to, low);
        _mm256_storeu_si256((__m256i *)(void *)(to + 32), high);
    }
}
#include "crc32c_kernel.h"

static const struct crc_kernel *best_kernel(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul"))
        return &portable_kernel;
    return __builtin_cpu_supports("avx2") ? &avx2_kernel : &sse_kernel;
}

void crc_fence(void) { _mm_sfence(); }

/* ---- aarch64: the CRC32 and PMULL extensions ---- */
#elif defined(__aarch64__)
#define TARGET __attribute__((target("+crc+crypto")))
#define KERNEL(name) arm_##name
#define STREAM_ALIGN 16u
#define CRC_U64(crc, word) __crc32cd((uint32_t)(crc), word)
#define CRC_U8(crc, byte) __crc32cb(crc, byte)
#define SHIFT(crc, lines)                                                                          \
    __crc32cd(0, vgetq_lane_u64(vreinterpretq_u64_p128(vmull_p64(crc, line_shifts[lines])), 0))
#define COPY_LINE(to, from, how) memcpy(to, from, 64)
#include "crc32c_kernel.h"

static const struct crc_kernel *best_kernel(void) {
    unsigned long needed = HWCAP_CRC32 | HWCAP_PMULL;
    return (getauxval(AT_HWCAP) & needed) == needed ? &arm_kernel : &portable_kernel;
}

void crc_fence(void) {}
#else
static const struct crc_kernel *best_kernel(void) { return &portable_kernel; }
void crc_fence(void) {}
#endif

static uint32_t zero_bytes(uint32_t crc, unsigned count) {
    while (count--)
        crc = (crc >> 8) ^ slices[0][crc & 0xFF];
    return crc;
}

__attribute__((constructor)) static void prepare(void) {
    for (unsigned byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (unsigned bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
        slices[0][byte] = crc;
    }
    for (unsigned byte = 0; byte < 256; byte++)
        for (unsigned i = 1; i < 8; i++)
            slices[i][byte] = zero_bytes(slices[0][byte], i);
    /* The multiplier for n bytes is x^(8n - 33) mod P: the product of two reflected 32-bit values
     * sits one bit low, and its reduction by the crc32 instruction brings x^32. */
    uint32_t power = zero_bytes(1, 56); /* x^(512 - 33); 1 is x^31 reflected */
    for (unsigned lines = 1; lines <= 2 * ROUND_LINES; lines++) {
        line_shifts[lines] = power;
        power = zero_bytes(power, 64);
    }
    chosen = best_kernel();
}

const struct crc_kernel *crc_kernel(void) { return chosen; }

uint32_t kvio_crc32c(uint32_t crc, const void *data, uint64_t length) {
    const uint8_t *from = data;
    return ~chosen->check(~crc, from, length, from + length);
}

uint32_t kvio_copy_crc32c(uint32_t crc, void *destination, const void *source, uint64_t length) {
    const uint8_t *from = source;
    if (length < STREAM_FROM_BYTES)
        return ~chosen->copy(~crc, destination, from, length, from + length);
    crc = ~chosen->stream(~crc, destination, from, length, from + length);
    crc_fence();
    return crc;
}
