// AVX-512 as in level_avx512.cpp, and AMX: TILE, BF16, INT8.
#define OCTAVO_LEVEL amx
#define OCTAVO_ROWS_AT_ONCE 8
#define OCTAVO_HAS_AVX512
#define OCTAVO_HAS_BF16
#define OCTAVO_HAS_AMX
#include "level.inc.h"
