// AVX2, FMA, F16C.
#define OCTAVO_LEVEL avx2
#define OCTAVO_ROWS_AT_ONCE 2
#include "level.inc.h"
