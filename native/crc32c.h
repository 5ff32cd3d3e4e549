/* SPDX-License-Identifier: Apache-2.0
 * CRC32C kernels, chosen once for the processor at hand. They work on the raw register (inverted
 * before and after by whoever starts and ends a checksum), so that a checksum runs on over pages.
 */
#ifndef KVIO_CRC32C_H
#define KVIO_CRC32C_H
#include <stddef.h>
#include <stdint.h>

/* From this many bytes on a copy by-passes the caches: nobody reads it back from there. */
#define STREAM_FROM_BYTES (256u << 10)

/* `end` is where reading ahead of `from + length` has to stop. */
struct crc_kernel {
    uint32_t (*check)(uint32_t crc, const uint8_t *from, size_t length, const uint8_t *end);
    uint32_t (*copy)(uint32_t crc, uint8_t *to, const uint8_t *from, size_t length,
                     const uint8_t *end);
    uint32_t (*stream)(uint32_t crc, uint8_t *to, const uint8_t *from, size_t length,
                       const uint8_t *end); /* copy by-passing the caches; ends with crc_fence */
    /* The same without a checksum: what it costs is measured beside this. */
    uint32_t (*stream_alone)(uint32_t crc, uint8_t *to, const uint8_t *from, size_t length,
                             const uint8_t *end);
};

const struct crc_kernel *crc_kernel(void);
void crc_fence(void); /* streamed bytes are seen by other threads and devices after this */

#endif
