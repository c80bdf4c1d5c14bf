/* Bits in levels: a bit of one level says whether a word of the level below has any. What a search, a count or a change
 * costs depends on the bits that are set, not on how many there are. The caller locks. */
#ifndef FAKEDIST_BITS_H
#define FAKEDIST_BITS_H
#include "virtual_gpu.h"

enum { MOST_LEVELS = 7 }; /* 64^7 bits are 4 TiB of bytes */
struct bits { /* zeros: none is set, and nothing is mapped */
    uint64_t set; /* how many are */
    uint64_t mapped; /* bytes */
    int levels;
    uint64_t *words[MOST_LEVELS]; /* the bits themselves first */
};

/* Bits from `first` on that are below `end`. `size` is how many there are in all. Where the machine has no addresses for
 * them, the run ends (gpu_machine_lacks). */
LOCAL void bits_set(struct bits *bits, uint64_t size, uint64_t first, uint64_t end);
LOCAL void bits_clear(struct bits *bits, uint64_t first, uint64_t end);
LOCAL void bits_move(struct bits *from, struct bits *to, uint64_t size, uint64_t first, uint64_t end);
LOCAL uint64_t bits_next(const struct bits *bits, uint64_t first, uint64_t end); /* the first that is set; else end */
LOCAL uint64_t bits_last(const struct bits *bits, uint64_t end); /* the last that is set below; else end */
LOCAL uint64_t bits_run(const struct bits *bits, uint64_t first, uint64_t end); /* how many in a row are set there */
LOCAL uint64_t bits_count(const struct bits *bits, uint64_t first, uint64_t end);
LOCAL void bits_drop(struct bits *bits); /* none is set any more, and nothing is mapped */
#endif
