// AVX2, FMA, F16C.
#define OCTAVO_LEVEL avx2
#define OCTAVO_ROWS_AT_ONCE 2
#define OCTAVO_HAS_AVX2
#include "level.inc.h"
