/* HMAC-MD2: RFC 2104 with the hash of RFC 1319. The key is the one that vosen/ZLUDA documents (dark_api/src/lib.rs). */
#include "digests.h"

#include <string.h>

enum { BLOCK = 16, ROUNDS = 18, INNER = 0x36, OUTER = 0x5c };

static const unsigned char key[BLOCK] = {0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52,
                                         0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f};

/* RFC 1319, section 3.2: a permutation made of the digits of pi. */
static const unsigned char pi[256] = {
    41,  46,  67,  201, 162, 216, 124, 1,   61,  54,  84,  161, 236, 240, 6,   19,  98,  167, 5,   243, 192, 199,
    115, 140, 152, 147, 43,  217, 188, 76,  130, 202, 30,  155, 87,  60,  253, 212, 224, 22,  103, 66,  111, 24,
    138, 23,  229, 18,  190, 78,  196, 214, 218, 158, 222, 73,  160, 251, 245, 142, 187, 47,  238, 122, 169, 104,
    121, 145, 21,  178, 7,   63,  148, 194, 16,  137, 11,  34,  95,  33,  128, 127, 93,  154, 90,  144, 50,  39,
    53,  62,  204, 231, 191, 247, 151, 3,   255, 25,  48,  179, 72,  165, 181, 209, 215, 94,  146, 42,  172, 86,
    170, 198, 79,  184, 56,  210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4,   241, 69,  157, 112, 89,
    100, 113, 135, 32,  134, 91,  207, 101, 230, 45,  168, 2,   27,  96,  37,  173, 174, 176, 185, 246, 28,  70,
    97,  105, 52,  64,  126, 15,  85,  71,  163, 35,  221, 81,  175, 58,  195, 92,  249, 206, 186, 197, 234, 38,
    44,  83,  13,  110, 133, 40,  132, 9,   211, 223, 205, 244, 65,  129, 77,  82,  106, 220, 55,  200, 108, 193,
    171, 250, 36,  225, 123, 8,   12,  189, 177, 74,  120, 136, 149, 139, 227, 99,  232, 109, 233, 203, 213, 254,
    59,  0,   29,  57,  242, 239, 183, 14,  102, 88,  208, 228, 166, 119, 114, 248, 235, 117, 75,  10,  49,  68,
    80,  180, 143, 237, 31,  26,  219, 153, 141, 51,  159, 17,  131, 20,
};

static void mix(struct digest *h) {
    unsigned char x[3 * BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        x[i] = h->digest[i];
        x[BLOCK + i] = h->block[i];
        x[2 * BLOCK + i] = h->digest[i] ^ h->block[i];
    }
    unsigned t = 0;
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < 3 * BLOCK; i++) t = x[i] ^= pi[t];
        t = (t + round) % 256;
    }
    memcpy(h->digest, x, BLOCK);
    h->size = 0;
}

void digest_add(struct digest *h, const void *data, size_t size) {
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size; i++) {
        h->last = h->checksum[h->size] ^= pi[bytes[i] ^ h->last];
        h->block[h->size++] = bytes[i];
        if (h->size == BLOCK) mix(h);
    }
}

static void begin(struct digest *h, unsigned char pad) {
    unsigned char padded[BLOCK];
    *h = (struct digest){.size = 0};
    for (int i = 0; i < BLOCK; i++) padded[i] = key[i] ^ pad;
    digest_add(h, padded, BLOCK);
}
static void end(struct digest *h, unsigned char *out) {
    unsigned char padding[BLOCK], checksum[BLOCK];
    unsigned left = BLOCK - h->size;
    memset(padding, (int)left, left);
    digest_add(h, padding, left);
    memcpy(checksum, h->checksum, BLOCK);
    digest_add(h, checksum, BLOCK);
    memcpy(out, h->digest, BLOCK);
}

void digest_begin(struct digest *h) { begin(h, INNER); }
void digest_end(struct digest *h, unsigned char *out) {
    unsigned char inner[BLOCK];
    end(h, inner);
    begin(h, OUTER);
    digest_add(h, inner, BLOCK);
    end(h, out);
}
