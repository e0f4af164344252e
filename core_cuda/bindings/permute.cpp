// The Python module's ops that move rows between token order and expert order.
#include "diptych/permute.h"

#include "families.h"
#include "program.h"

namespace diptych::bind {

struct MoeTable {};  // the numbers that these ops take, and their limits

template <>
struct Record<MoeTable> {
  static constexpr auto name = py::detail::const_name("MoeTable");
  template <typename F>
  static void entries(const MoeTable&, F&& f) {
    Numbers maps;
    maps["mask"] = static_cast<int>(RoutingMap::mask);
    maps["index"] = static_cast<int>(RoutingMap::index);
    f("routing_map", maps), f("max_slots", kMaxSlots), f("max_planes", kMaxPlanes);
  }
};

namespace {

void py_permute_map(Operand routing, int kind, int align, Operand row_id_map, Operand tokens_per_expert,
                    Operand expert_offsets, Operand row_source, MaybeOperand workspace) {
  Call call;
  PermuteMapArgs a;
  a.routing = call.in(routing, "routing");
  a.kind = static_cast<RoutingMap>(kind);
  a.align = align;
  a.row_id_map = call.out(row_id_map, "row_id_map");
  a.tokens_per_expert = call.out(tokens_per_expert, "tokens_per_expert");
  a.expert_offsets = call.out(expert_offsets, "expert_offsets");
  a.row_source = call.out(row_source, "row_source");
  a.workspace = call.out(workspace, "workspace");
  run(permute_map, a, call);
}

void py_chunk_map(Operand split_sizes, Operand order, Operand row_id_map, Operand row_source) {
  Call call;
  ChunkMapArgs a;
  a.split_sizes = call.in(split_sizes, "split_sizes");
  a.order = call.in(order, "order");
  a.row_id_map = call.out(row_id_map, "row_id_map");
  a.row_source = call.out(row_source, "row_source");
  run(chunk_map, a, call);
}

void py_invert_map(Operand row_id_map, Operand row_source, MaybeOperand kept) {
  Call call;
  run(invert_map,
      InvertMapArgs{call.in(row_id_map, "row_id_map"), call.out(row_source, "row_source"), call.out(kept, "kept")},
      call);
}

void py_permute(Planes planes, Operand row_id_map, Operand row_source, MaybeOperand probs, MaybeOperand permuted_probs,
                bool zero_prob_is_padding) {
  Call call;
  PermuteArgs a;
  a.plane_count = static_cast<int32_t>(planes.size());
  for (int i = 0; i < std::min(a.plane_count, kMaxPlanes); ++i) {
    const py::object plane = planes[i];
    if (!PyTuple_CheckExact(plane.ptr()) || PyTuple_GET_SIZE(plane.ptr()) != 3)
      throw py::type_error("argument 'planes' must hold tuples (input, output, fill)");
    const auto t = py::reinterpret_borrow<py::tuple>(plane);
    a.planes[i] = {call.in(t[0], "input"), call.out(t[1], "output"), scalar<uint32_t>(t[2], "planes")};
  }
  a.row_id_map = call.in(row_id_map, "row_id_map");
  a.row_source = call.in(row_source, "row_source");
  a.probs = call.in(probs, "probs");
  a.permuted_probs = call.out(permuted_probs, "permuted_probs");
  a.zero_prob_is_padding = zero_prob_is_padding;
  run(permute, a, call);
}

void py_permute_columns(Operand x, Operand out, Operand row_source, int64_t slots) {
  Call call;
  run(permute_columns,
      PermuteColumnsArgs{call.in(x, "x"), call.out(out, "out"), call.in(row_source, "row_source"), slots}, call);
}

void py_unpermute(Operand x, Operand row_id_map, MaybeOperand probs, Operand y, MaybeOperand permuted_dprobs,
                  MaybeOperand dprobs) {
  Call call;
  UnpermuteArgs a;
  a.x = call.in(x, "x");
  a.row_id_map = call.in(row_id_map, "row_id_map");
  a.probs = call.in(probs, "probs");
  a.y = call.out(y, "y");
  a.permuted_dprobs = call.in(permuted_dprobs, "permuted_dprobs");
  a.dprobs = call.out(dprobs, "dprobs");
  run(unpermute, a, call);
}

void py_unpermute_grad(Operand dy, Operand row_id_map, Operand row_source, Operand probs, Operand dx, MaybeOperand x,
                       MaybeOperand dprobs) {
  Call call;
  UnpermuteGradArgs a;
  a.dy = call.in(dy, "dy");
  a.row_id_map = call.in(row_id_map, "row_id_map");
  a.row_source = call.in(row_source, "row_source");
  a.probs = call.in(probs, "probs");
  a.dx = call.out(dx, "dx");
  a.x = call.in(x, "x");
  a.dprobs = call.out(dprobs, "dprobs");
  run(unpermute_grad, a, call);
}

int64_t py_permute_map_workspace_bytes(int32_t kind, int64_t items, int64_t experts) {
  if (kind < 0 || kind >= static_cast<int32_t>(RoutingMap::count_)) throw py::value_error("unknown kind of map");
  return permute_map_workspace_bytes(static_cast<RoutingMap>(kind), items, experts);
}

}  // namespace

void add_permute(py::module_& m) {
  m.def("permute_map", py_permute_map, py::arg("routing"), py::arg("kind"), py::arg("align"), py::arg("row_id_map"),
        py::arg("tokens_per_expert"), py::arg("expert_offsets"), py::arg("row_source"), py::arg("workspace"),
        "kind is a number from moe_table()['routing_map'].");
  m.def("chunk_map", py_chunk_map, py::arg("split_sizes"), py::arg("order"), py::arg("row_id_map"),
        py::arg("row_source"));
  m.def("invert_map", py_invert_map, py::arg("row_id_map"), py::arg("row_source"), py::arg("kept") = py::none());
  m.def("permute", py_permute, py::arg("planes"), py::arg("row_id_map"), py::arg("row_source"),
        py::arg("probs") = py::none(), py::arg("permuted_probs") = py::none(), py::arg("zero_prob_is_padding") = false,
        "planes holds (input, output, fill) for each tensor; absent rows repeat the four bytes of fill.");
  m.def("permute_columns", py_permute_columns, py::arg("x"), py::arg("out"), py::arg("row_source"), py::arg("slots"));
  m.def("unpermute", py_unpermute, py::arg("x"), py::arg("row_id_map"), py::arg("probs"), py::arg("y"),
        py::arg("permuted_dprobs") = py::none(), py::arg("dprobs") = py::none());
  m.def("unpermute_grad", py_unpermute_grad, py::arg("dy"), py::arg("row_id_map"), py::arg("row_source"),
        py::arg("probs"), py::arg("dx"), py::arg("x") = py::none(), py::arg("dprobs") = py::none());
  m.def("permute_map_workspace_bytes", py_permute_map_workspace_bytes, py::arg("kind"), py::arg("items"),
        py::arg("experts"));
  add_record<MoeTable>(m);
  m.def("moe_table", [] { return MoeTable(); });
}

}  // namespace diptych::bind
