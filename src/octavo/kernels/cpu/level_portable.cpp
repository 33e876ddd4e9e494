// Any processor: vectors as the compiler finds them.
#define OCTAVO_LEVEL portable
#define OCTAVO_ROWS_AT_ONCE 2
#include "level.inc.h"
