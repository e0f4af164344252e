// The XLA handler of statistics, and its attributes: those of attributes.h belong to the ops of ops.def.
#include "diptych/statistics.h"

#include "handler.h"

namespace diptych::xla_ffi {

#define DIPTYCH_STATISTICS_FIELDS(F) F(int32_t, number) F(int32_t, rounded) F(float, beyond)
// kBytes: as for hash. `number`: Number. `rounded`: there are results and largest magnitudes.
struct StatisticsAttributes {
  static constexpr bool kBytes = true;
  DIPTYCH_COMMON_FIELDS(DIPTYCH_FIELD)
  DIPTYCH_STATISTICS_FIELDS(DIPTYCH_FIELD)
  int batched_results() const { return 1; }
};

// Returns bytes as what they are.
inline TensorView floats(TensorView bytes) {
  bytes.dtype = DType::f32;
  bytes.shape[0] /= sizeof(float);
  return bytes;
}

// x, [result, largest] -> out, [workspace: CUDA]
Status run(Call& call, const StatisticsAttributes& d) {
  return call.each([&] {
    StatisticsArgs a{call.in(0)};
    if (d.rounded != 0) a.result = floats(call.in(1)), a.largest = floats(call.in(2));
    a.out = call.out(0), a.workspace = call.out(1);
    a.number = static_cast<Number>(d.number), a.beyond = d.beyond;
    return statistics(a, call.exec());
  });
}

}  // namespace diptych::xla_ffi

DIPTYCH_DECODED(StatisticsAttributes, DIPTYCH_STATISTICS_FIELDS);
DIPTYCH_HANDLERS(statistics, StatisticsAttributes);
