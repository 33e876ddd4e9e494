// AVX2 and FMA.
#define OCTAVO_LEVEL avx2
#include "draw.inc.h"
