// The formats of elements, for the runtime: those of the kernels.
#pragma once
#include <stdint.h>
#include <string.h>

#define DEVICE inline
#include "platform/common.cuh"
#include "platform/numbers.cuh"
