// AVX-512 as in level_avx512.cpp: 32 vectors of 16 floats.
#define OCTAVO_LEVEL avx512
#define OCTAVO_HAS_AVX512
#define OCTAVO_ROWS_OF_WHOLE_PANEL 8
#define OCTAVO_ROWS_TOGETHER 8
#define OCTAVO_FLOAT16
#include "dense.inc.h"
