// Any processor: 16 vectors of 4 floats, all that many have.
#define OCTAVO_LEVEL portable
#define OCTAVO_ROWS_OF_WHOLE_PANEL 1
#define OCTAVO_ROWS_TOGETHER 2
#define OCTAVO_FLOAT32
#include "dense.inc.h"
