/* SPDX-License-Identifier: Apache-2.0
 * Template of the CRC32C kernels, included once for each instruction set by crc32c.c, which defines
 *   KERNEL(name)               name of this instance's functions
 *   TARGET                     function attribute that switches the instructions on
 *   CRC_U64(crc, word)         8 bytes on
 *   CRC_U8(crc, byte)          1 byte on
 *   SHIFT(crc, lines)          64 * lines zero bytes on
 *   COPY_LINE(to, from, how)   64 bytes; `to` is aligned to STREAM_ALIGN where how is STREAM
 *   STREAM_ALIGN
 *
 * The crc32 instruction takes three cycles but starts every cycle, so a round runs three checksums
 * over the thirds of 1.5 KiB and joins them. The copy of the round goes straight on from line to
 * line all the same: streaming stores to three places at once are ten times slower than to one.
 */

TARGET static inline __attribute__((always_inline)) uint32_t
KERNEL(round)(uint32_t crc, uint8_t *to, const uint8_t *from, const uint8_t *end, unsigned lines,
              enum how how) {
    if (how == STREAM_ALONE) {
        for (unsigned i = 0; i < 192 * lines; i += 64) {
            if (from + i + PREFETCH_BYTES + 64 <= end)
                __builtin_prefetch(from + i + PREFETCH_BYTES);
            COPY_LINE(to + i, from + i, STREAM);
        }
        return 0;
    }
    const uint8_t *second = from + 64 * lines, *third = second + 64 * lines;
    uint64_t a = crc, b = 0, c = 0;
    for (unsigned i = 0; i < 64 * lines; i += 64) {
        const uint8_t *line = from + 3 * i;
        if (line + PREFETCH_BYTES + 192 <= end) {
            __builtin_prefetch(line + PREFETCH_BYTES);
            __builtin_prefetch(line + PREFETCH_BYTES + 64);
            __builtin_prefetch(line + PREFETCH_BYTES + 128);
        }
        if (how != CHECK) {
            COPY_LINE(to + 3 * i, line, how);
            COPY_LINE(to + 3 * i + 64, line + 64, how);
            COPY_LINE(to + 3 * i + 128, line + 128, how);
        }
        for (unsigned j = 0; j < 64; j += 8) {
            a = CRC_U64(a, load_u64(from + i + j));
            b = CRC_U64(b, load_u64(second + i + j));
            c = CRC_U64(c, load_u64(third + i + j));
        }
    }
    return SHIFT((uint32_t)a, 2 * lines) ^ SHIFT((uint32_t)b, lines) ^ (uint32_t)c;
}

TARGET static inline uint32_t KERNEL(rest)(uint32_t crc, uint8_t *to, const uint8_t *from,
                                           size_t length, enum how how) {
    for (; length >= 8; length -= 8, from += 8) {
        uint64_t word = load_u64(from);
        crc = (uint32_t)CRC_U64(crc, word);
        if (how != CHECK) {
            memcpy(to, &word, 8);
            to += 8;
        }
    }
    for (; length; length--, from++) {
        crc = CRC_U8(crc, *from);
        if (how != CHECK)
            *to++ = *from;
    }
    return crc;
}

TARGET static inline __attribute__((always_inline)) uint32_t
KERNEL(run)(uint32_t crc, uint8_t *to, const uint8_t *from, size_t length, const uint8_t *end,
            enum how how) {
    if (how == STREAM || how == STREAM_ALONE) {
        size_t head = -(uintptr_t)to & (STREAM_ALIGN - 1);
        head = head < length ? head : length;
        crc = KERNEL(rest)(crc, to, from, head, how);
        to += head, from += head, length -= head;
    }
    for (; length >= ROUND_BYTES; length -= ROUND_BYTES, from += ROUND_BYTES) {
        crc = KERNEL(round)(crc, to, from, end, ROUND_LINES, how);
        if (how != CHECK)
            to += ROUND_BYTES;
    }
    unsigned lines = (unsigned)(length / 192);
    if (lines)
        crc = KERNEL(round)(crc, to, from, end, lines, how);
    if (how != CHECK)
        to += 192 * lines;
    return KERNEL(rest)(crc, to, from + 192 * lines, length - 192 * lines, how);
}

TARGET static uint32_t KERNEL(check)(uint32_t crc, const uint8_t *from, size_t length,
                                     const uint8_t *end) {
    return KERNEL(run)(crc, NULL, from, length, end, CHECK);
}

TARGET static uint32_t KERNEL(copy)(uint32_t crc, uint8_t *to, const uint8_t *from, size_t length,
                                    const uint8_t *end) {
    return KERNEL(run)(crc, to, from, length, end, COPY);
}

TARGET static uint32_t KERNEL(stream)(uint32_t crc, uint8_t *to, const uint8_t *from, size_t length,
                                      const uint8_t *end) {
    return KERNEL(run)(crc, to, from, length, end, STREAM);
}

TARGET static uint32_t KERNEL(stream_alone)(uint32_t crc, uint8_t *to, const uint8_t *from,
                                            size_t length, const uint8_t *end) {
    return KERNEL(run)(crc, to, from, length, end, STREAM_ALONE);
}

static const struct crc_kernel KERNEL(kernel) = {KERNEL(check), KERNEL(copy), KERNEL(stream),
                                                 KERNEL(stream_alone)};
