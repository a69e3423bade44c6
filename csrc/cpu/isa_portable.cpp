// The CPU kernels for portable.
// Standard headers come before the target pragma, so that no shared inline function is compiled for instructions that another processor may lack.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels.h"
#define EK_PORTABLE
#define EK_ISA portable
#include "kernels_of_isa.inc"
