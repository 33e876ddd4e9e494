// AVX-512 F.
#define OCTAVO_LEVEL avx512
#include "draw.inc.h"
