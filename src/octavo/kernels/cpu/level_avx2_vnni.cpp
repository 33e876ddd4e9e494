// AVX2 as in level_avx2.cpp, and VNNI with 32-byte vectors: AVX-VNNI or AVX-512 VNNI.
#define OCTAVO_LEVEL avx2_vnni
#define OCTAVO_ROWS_AT_ONCE 2
#define OCTAVO_HAS_AVX2
#define OCTAVO_HAS_VNNI
#include "level.inc.h"
