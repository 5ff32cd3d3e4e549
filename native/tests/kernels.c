/* SPDX-License-Identifier: Apache-2.0
 * Every CRC32C kernel that this processor can run, not only the chosen one, against a bit by bit
 * reference: random lengths, alignments and starting values, and no byte written beside the copy.
 *
 *   kernels [seed]
 */
#include "crc32c.c"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define ROUNDS 4000
#define LENGTH_MAX 12000u
#define SKEW_MAX 200u

static uint64_t seed, state;
static uint8_t source[LENGTH_MAX + SKEW_MAX], target[LENGTH_MAX + 2 * SKEW_MAX];

static uint32_t random_u32(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static uint32_t reference(uint32_t crc, const uint8_t *from, size_t length) {
    for (; length; length--) {
        crc ^= *from++;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
    }
    return crc;
}

static void check(bool condition, const char *kernel, const char *what, uint32_t length) {
    if (condition)
        return;
    fprintf(stderr, "%s: %s of %u bytes; seed %" PRIu64 "\n", kernel, what, length, seed);
    exit(1);
}

/* Nothing but the `length` bytes at `skew` has changed. */
static bool only_copied(uint32_t skew, const uint8_t *from, uint32_t length) {
    for (uint32_t i = 0; i < sizeof target; i++) {
        bool inside = i >= skew && i < skew + length;
        if (target[i] != (inside ? from[i - skew] : 0xA5))
            return false;
    }
    return true;
}

static void check_kernel(const char *name, const struct crc_kernel *kernel) {
    for (uint32_t i = 0; i < ROUNDS; i++) {
        uint32_t length = random_u32() % (i % 4 ? 2000 : LENGTH_MAX), crc = random_u32();
        uint32_t skew = random_u32() % SKEW_MAX;
        const uint8_t *from = source + random_u32() % SKEW_MAX, *end = source + sizeof source;
        uint32_t expected = reference(crc, from, length);
        check(kernel->check(crc, from, length, end) == expected, name, "check", length);
        memset(target, 0xA5, sizeof target);
        bool right = kernel->copy(crc, target + skew, from, length, end) == expected;
        check(right && only_copied(skew, from, length), name, "copy", length);
        memset(target, 0xA5, sizeof target);
        right = kernel->stream(crc, target + skew, from, length, end) == expected;
        check(right && only_copied(skew, from, length), name, "stream", length);
    }
    printf("%s\n", name);
}

int main(int argc, char **argv) {
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    state = seed * UINT64_C(0x9E3779B97F4A7C15) | 1;
    for (size_t i = 0; i < sizeof source; i++)
        source[i] = (uint8_t)random_u32();
    check_kernel("portable", &portable_kernel);
#if defined(__x86_64__)
    if (best_kernel() != &portable_kernel)
        check_kernel("sse", &sse_kernel);
    if (best_kernel() == &avx2_kernel)
        check_kernel("avx2", &avx2_kernel);
#elif defined(__aarch64__)
    if (best_kernel() != &portable_kernel)
        check_kernel("arm", &arm_kernel);
#endif
    return 0;
}
