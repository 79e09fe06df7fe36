/* Tables of embeddings [V, size]: numbers, or the blocks of a file, of which a row becomes numbers when it is looked
   up. */

#pragma once

#include <stdint.h>

/* In blocks, `size` is a multiple of 32, and a row is rounded to bfloat16. */
typedef struct {
    const void *numbers; /* T [V, size], or NULL */
    int64_t type, row_bytes, size; /* as in packing.c */
    const uint8_t *data;
    const int8_t *levels; /* what those of the type stand for, if it has such a list */
} Table;

/* The numbers of one row in blocks. */
void read_row(const Table *from, int64_t row, float *to);
