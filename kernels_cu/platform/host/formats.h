// The kernels' element formats, for the runtime.
#pragma once
#include <stdint.h>
#include <string.h>

#define DEVICE inline
#include "platform/common.cuh"
#include "platform/numbers.cuh"
