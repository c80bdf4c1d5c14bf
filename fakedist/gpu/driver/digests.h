/* The digest that a statically linked CUDA runtime compares with its own (export_tables.c). */
#ifndef FAKEDIST_DIGESTS_H
#define FAKEDIST_DIGESTS_H
#include "virtual_gpu.h"

struct digest {
    unsigned char digest[16], checksum[16], block[16];
    unsigned size, last; /* of the block so far; the checksum's last byte */
};
LOCAL void digest_begin(struct digest *h);
LOCAL void digest_add(struct digest *h, const void *data, size_t size);
LOCAL void digest_end(struct digest *h, unsigned char *out); /* 16 bytes */
#endif
