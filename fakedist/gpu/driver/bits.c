#include "bits.h"

#include <string.h>
#include <sys/mman.h>

static uint64_t words_looked_at;
/* Tests read it: the work of a launch does not grow with the size of memory. */
API uint64_t fakedist_words_looked_at(void) { return words_looked_at; }

static uint64_t *word_at(const struct bits *bits, int level, uint64_t at) {
    words_looked_at++;
    return &bits->words[level][at / 64];
}
/* The bits of the word of `at` from it on, below `end`. */
static uint64_t mask_of(uint64_t at, uint64_t end) {
    uint64_t from = UINT64_MAX << at % 64, left = end - at / 64 * 64;
    return left < 64 ? from & ((1ull << left) - 1) : from;
}
static uint64_t next_word(uint64_t at) { return (at / 64 + 1) * 64; }

/* The upper levels come first: a few bits then take a page or two. */
static int is_open(struct bits *bits, uint64_t size) {
    if (bits->mapped) return 1;
    uint64_t counts[MOST_LEVELS], words = 0;
    int levels = 0;
    for (uint64_t left = size; levels < MOST_LEVELS && (!levels || left > 1); words += left)
        counts[levels++] = left = (left + 63) / 64;
    if (counts[levels - 1] > 1) return 0;
    void *got = mmap(NULL, words * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return gpu_machine_lacks(words * sizeof(uint64_t)), 0;
    madvise(got, words * sizeof(uint64_t), MADV_NOHUGEPAGE); /* one bit must not cost 2 MiB of host memory */
    bits->mapped = words * sizeof(uint64_t);
    bits->levels = levels;
    uint64_t *start = got;
    for (int level = levels - 1; level >= 0; start += counts[level--]) bits->words[level] = start;
    return 1;
}
void bits_drop(struct bits *bits) {
    if (bits->mapped) munmap(bits->words[bits->levels - 1], bits->mapped);
    *bits = (struct bits){0};
}

static void set_in_word(struct bits *bits, uint64_t at, uint64_t mask) {
    uint64_t *word = word_at(bits, 0, at), before = *word;
    bits->set += (uint64_t)__builtin_popcountll(mask & ~before);
    *word |= mask;
    for (int level = 1; !before && level < bits->levels; level++) {
        uint64_t *above = word_at(bits, level, at /= 64);
        before = *above;
        *above |= 1ull << at % 64;
    }
}
static void clear_in_word(struct bits *bits, uint64_t at, uint64_t mask) {
    uint64_t *word = word_at(bits, 0, at);
    bits->set -= (uint64_t)__builtin_popcountll(mask & *word);
    *word &= ~mask;
    for (int level = 1; !*word && level < bits->levels; level++) {
        word = word_at(bits, level, at /= 64);
        *word &= ~(1ull << at % 64);
    }
}

void bits_set(struct bits *bits, uint64_t size, uint64_t first, uint64_t end) {
    assert(end <= size);
    if (!is_open(bits, size)) return;
    for (uint64_t at = first; at < end; at = next_word(at)) set_in_word(bits, at, mask_of(at, end));
}
void bits_clear(struct bits *bits, uint64_t first, uint64_t end) {
    for (uint64_t at = first; (at = bits_next(bits, at, end)) < end; at = next_word(at))
        clear_in_word(bits, at, mask_of(at, end));
}
void bits_move(struct bits *from, struct bits *to, uint64_t size, uint64_t first, uint64_t end) {
    if (bits_next(from, first, end) == end || !is_open(to, size)) return;
    for (uint64_t at = first; (at = bits_next(from, at, end)) < end; at = next_word(at))
        set_in_word(to, at, *word_at(from, 0, at) & mask_of(at, end));
    bits_clear(from, first, end);
}

/* Up until a word has one from here on, and down again to the first bit that it stands for. */
uint64_t bits_next(const struct bits *bits, uint64_t first, uint64_t end) {
    if (!bits->set || first >= end) return end;
    int level = 0;
    uint64_t at = first, word = *word_at(bits, 0, at) >> at % 64;
    while (!word) {
        at = at / 64 + 1;
        if (at << 6 * ++level >= end) return end;
        word = *word_at(bits, level, at) >> at % 64;
    }
    at += (uint64_t)__builtin_ctzll(word);
    while (level--) at = 64 * at + (uint64_t)__builtin_ctzll(*word_at(bits, level, 64 * at));
    return at < end ? at : end;
}
uint64_t bits_last(const struct bits *bits, uint64_t end) {
    if (!bits->set || !end) return end;
    int level = 0;
    uint64_t at = end - 1, word = *word_at(bits, 0, at) << (63 - at % 64);
    while (!word) {
        if (!(at /= 64)) return end;
        at--;
        word = *word_at(bits, ++level, at) << (63 - at % 64);
    }
    at -= (uint64_t)__builtin_clzll(word);
    while (level--) at = 64 * at + 63 - (uint64_t)__builtin_clzll(*word_at(bits, level, 64 * at));
    return at;
}
uint64_t bits_run(const struct bits *bits, uint64_t first, uint64_t end) {
    uint64_t at = first;
    while (bits->set && at < end) {
        uint64_t unset = ~*word_at(bits, 0, at) & mask_of(at, end);
        if (unset) return at / 64 * 64 + (uint64_t)__builtin_ctzll(unset) - first;
        at = next_word(at);
    }
    return (at < end ? at : end) - first;
}
uint64_t bits_count(const struct bits *bits, uint64_t first, uint64_t end) {
    uint64_t count = 0;
    for (uint64_t at = first; (at = bits_next(bits, at, end)) < end; at = next_word(at))
        count += (uint64_t)__builtin_popcountll(*word_at(bits, 0, at) & mask_of(at, end));
    return count;
}
