// AVX-512 F, BW, VL, DQ, VNNI: level_avx512.cpp without the bf16 instructions; bf16 is multiplied as float32.
#define OCTAVO_LEVEL avx512_vnni
#define OCTAVO_ROWS_AT_ONCE 8
#define OCTAVO_HAS_AVX512
#include "level.inc.h"
