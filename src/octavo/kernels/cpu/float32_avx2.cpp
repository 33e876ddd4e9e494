// AVX2, FMA: 16 vectors of 8 floats.
#define OCTAVO_LEVEL avx2
#define OCTAVO_ROWS_OF_WHOLE_PANEL 3
#define OCTAVO_ROWS_TOGETHER 6
#include "float32.inc.h"
