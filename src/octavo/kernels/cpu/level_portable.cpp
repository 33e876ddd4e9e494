// Any processor: vectorization is left to the compiler.
#define OCTAVO_LEVEL portable
#define OCTAVO_ROWS_AT_ONCE 2
#include "level.inc.h"
