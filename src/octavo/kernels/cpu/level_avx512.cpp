// AVX-512 F, BW, VL, DQ, VNNI, BF16.
#define OCTAVO_LEVEL avx512
#define OCTAVO_ROWS_AT_ONCE 8
#define OCTAVO_HAS_AVX512
#define OCTAVO_HAS_BF16
#include "level.inc.h"
