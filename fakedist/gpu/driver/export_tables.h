/* Tables of the driver's undocumented functions, by their 16 bytes of identity. */
#ifndef FAKEDIST_EXPORT_TABLES_H
#define FAKEDIST_EXPORT_TABLES_H
#include "virtual_gpu.h"

LOCAL int export_table_find(const unsigned char *id,
                            const void **table); /* 0: not known; NULL: known not to be there */
#endif
