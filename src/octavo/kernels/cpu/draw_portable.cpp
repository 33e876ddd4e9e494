// Any processor.
#define OCTAVO_LEVEL portable
#include "draw.inc.h"
