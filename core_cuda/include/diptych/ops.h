// The ops. Each takes a struct of arguments, checks it before any kernel runs, and fills outputs that the caller
// allocated. No op allocates device memory, synchronizes, or keeps state between calls.
#pragma once

#include "diptych/activation.h"
#include "diptych/gemm.h"
#include "diptych/grouped.h"
#include "diptych/hash.h"
#include "diptych/many.h"
#include "diptych/norm.h"
#include "diptych/permute.h"
#include "diptych/quantize.h"
#include "diptych/scale_update.h"
#include "diptych/source.h"
#include "diptych/stack.h"
#include "diptych/statistics.h"
#include "diptych/transpose.h"
