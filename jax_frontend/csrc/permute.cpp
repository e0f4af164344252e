// The XLA handlers of the ops that move rows between token order and expert order.
#include "diptych/permute.h"

#include <algorithm>

#include "handler.h"

namespace diptych::xla_ffi {

// routing -> row_id_map, tokens_per_expert, expert_offsets, row_source, [workspace: CUDA]
Status run(Call& call, const PermuteMapAttributes& d) {
  return call.each([&] {
    return permute_map({call.in(0), static_cast<RoutingMap>(d.kind), d.align, call.out(0), call.out(1), call.out(2),
                        call.out(3), call.out(4)},
                       call.exec());
  });
}

// split_sizes, order -> row_id_map, row_source
Status run(Call& call, const ChunkMapAttributes&) {
  return call.each([&] { return chunk_map({call.in(0), call.in(1), call.out(0), call.out(1)}, call.exec()); });
}

// row_id_map -> row_source, kept
Status run(Call& call, const InvertMapAttributes&) {
  return call.each([&] { return invert_map({call.in(0), call.out(0), call.out(1)}, call.exec()); });
}

// row_id_map, row_source, planes..., [probs] -> planes..., [permuted_probs]
Status run(Call& call, const PermuteAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    PermuteArgs a;
    a.row_id_map = t.in();
    a.row_source = t.in();
    a.plane_count = d.planes;
    const int32_t fills[kMaxPlanes] = {d.fill0, d.fill1, d.fill2, d.fill3};
    for (int i = 0; i < std::min(d.planes, kMaxPlanes); ++i) {
      const TensorView in = t.in();
      a.planes[i] = {in, t.out(), static_cast<uint32_t>(fills[i])};
    }
    a.probs = t.in(d.has_probs);
    a.permuted_probs = t.out(d.has_probs);
    a.zero_prob_is_padding = d.zero_prob_is_padding != 0;
    return permute(a, call.exec());
  });
}

// in, row_source -> out
Status run(Call& call, const PermuteColumnsAttributes& d) {
  return call.each([&] { return permute_columns({call.in(0), call.out(0), call.in(1), d.slots}, call.exec()); });
}

// x, row_id_map, [probs], [permuted_dprobs] -> y, [dprobs]
Status run(Call& call, const UnpermuteAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    UnpermuteArgs a;
    a.x = t.in();
    a.row_id_map = t.in();
    a.probs = t.in(d.has_probs);
    a.y = t.out();
    a.permuted_dprobs = t.in(d.has_permuted_dprobs);
    a.dprobs = t.out(d.has_permuted_dprobs);
    return unpermute(a, call.exec());
  });
}

// dy, row_id_map, row_source, probs, [x] -> dx, [dprobs]
Status run(Call& call, const UnpermuteGradAttributes& d) {
  return call.each([&] {
    Buffers t(call);
    UnpermuteGradArgs a;
    a.dy = t.in();
    a.row_id_map = t.in();
    a.row_source = t.in();
    a.probs = t.in();
    a.dx = t.out();
    a.x = t.in(d.has_dprobs);
    a.dprobs = t.out(d.has_dprobs);
    return unpermute_grad(a, call.exec());
  });
}

}  // namespace diptych::xla_ffi

DIPTYCH_HANDLERS(permute_map, PermuteMapAttributes);
DIPTYCH_HANDLERS(chunk_map, ChunkMapAttributes);
DIPTYCH_HANDLERS(invert_map, InvertMapAttributes);
DIPTYCH_HANDLERS(permute, PermuteAttributes);
DIPTYCH_HANDLERS(permute_columns, PermuteColumnsAttributes);
DIPTYCH_HANDLERS(unpermute, UnpermuteAttributes);
DIPTYCH_HANDLERS(unpermute_grad, UnpermuteGradAttributes);
