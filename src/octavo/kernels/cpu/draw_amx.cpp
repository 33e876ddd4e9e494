// AVX-512 F, as one level below.
#define OCTAVO_LEVEL amx
#include "draw.inc.h"
