// AVX2, FMA: 16 vectors of 8 floats.
#define OCTAVO_LEVEL avx2
#define OCTAVO_HAS_AVX2
#define OCTAVO_ROWS_OF_WHOLE_PANEL 3
#define OCTAVO_ROWS_TOGETHER 6
#define OCTAVO_FLOAT32
#include "dense.inc.h"
