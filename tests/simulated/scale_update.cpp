// scale_update_many for test_scale_update_many_simulated.py.
#include <cstdio>

#include "diptych/many.h"
#include "simulated.h"
#include "tensor.h"

static int driver = 0;

extern "C" cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver;
  return cudaSuccess;
}

namespace diptych::cuda {
Status cuda_status(cudaError_t, const char*) { return {}; }
}  // namespace diptych::cuda

using namespace diptych;

struct UpdateCall {
  simulated::Tensor history, scale, reduced, amax, seen, step, pending, log, written, taken, scale_out;
  float fp8_max;
  int32_t margin, most_recent;
};

// `version`: of the driver. Returns the number of launches, or -1 and a message.
extern "C" int scale_update_many(const UpdateCall* calls, int count, int version, char* message, int size) {
  using simulated::view;
  ScaleUpdateManyArgs many;
  for (const UpdateCall* c = calls; c < calls + count; ++c) {
    ScaleUpdateArgs a;
    a.history = a.new_history = view(c->history), a.scale = a.new_scale = view(c->scale);
    a.reduced = view(c->reduced), a.amax = view(c->amax), a.seen = view(c->seen), a.step = view(c->step);
    a.pending = view(c->pending), a.log = {view(c->log), view(c->written)}, a.taken = view(c->taken);
    a.scale_out = view(c->scale_out);
    a.fp8_max = c->fp8_max, a.margin = c->margin, a.most_recent = c->most_recent != 0;
    many.each.push_back(a);
  }
  driver = version;
  const int before = simulated::runs;
  const Status status = cuda::scale_update_many(many, {{Backend::cuda, 0}, nullptr});
  std::snprintf(message, static_cast<size_t>(size), "%s", status.message().c_str());
  return status.ok() ? simulated::runs - before : -1;
}
