#include "program.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace diptych::bind {
namespace {

constexpr int64_t kAlign = 256;  // bytes: alignment of each tensor in the workspace

int find(const py::list& tensors, py::handle object) {
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].ptr() == object.ptr()) return static_cast<int>(i);
  return -1;
}

dl::Tensor borrow(const dl::ExchangeApi* api, py::handle object) {
  if (api == nullptr)
    throw py::type_error(std::string("a program's tensor of type ") + Py_TYPE(object.ptr())->tp_name +
                         " has no DLPack exchange table");
  dl::Tensor t;
  if (api->tensor_from_object(object.ptr(), &t) != 0) throw py::error_already_set();
  return t;
}

char* data_of(const dl::Tensor& t) { return static_cast<char*>(t.data) + t.byte_offset; }

int64_t bytes_of(const dl::Tensor& t) {
  int64_t bits = int64_t{t.dtype.bits} * t.dtype.lanes;
  for (int i = 0; i < t.ndim; ++i) bits *= t.shape[i];
  return bits / 8;
}

}  // namespace

thread_local std::weak_ptr<Program> Program::recording_;

void Program::require(Stage stage, const char* method, const char* remedy) const {
  if (stage_ != stage) throw py::value_error(std::string("Program.") + method + ": " + remedy);
}

void Program::start() {
  require(Stage::fresh, "start", "it has recorded already; make another one");
  if (recording()) throw py::value_error("Program.start: another program of this thread records; stop() it first");
  recording_ = weak_from_this();
  stage_ = Stage::started;
}

void Program::stop() {
  if (recording().get() != this)
    throw py::value_error("Program.stop: it does not record on this thread; start() it first");
  recording_.reset();
  stage_ = Stage::stopped;
}

void* Program::place(const TensorView& view, const Call& call) {
  const py::handle object = call.object_at(view.data);
  size_t i = 0;
  while (i < places_.size() && places_[i].object.ptr() != object.ptr()) ++i;
  // A view that belongs to no tensor or to two, or is empty, cannot be found again in another call.
  if (object.ptr() == nullptr || view.numel() == 0) whole_ = false;
  if (i == places_.size()) places_.push_back({py::reinterpret_borrow<py::object>(object)});
  return reinterpret_cast<void*>(i + 1);
}

void Program::add_quantize(const QuantizeArgs& args, const QuantizeArgs& placed) {
  last_.each.push_back(args);
  if (last_.each.size() > 1 && together(last_, args.x.device)) {
    last_placed_.each.push_back(placed);
    steps_.back() = step(quantize_many, last_placed_);
    return;
  }
  last_.each = {args}, last_placed_.each = {placed};
  steps_.push_back(step(quantize, placed));
}

bool Program::seal(Operands inputs, Operands outputs, Operands scratch, Views views, Makers makers,
                   MakeWorkspace make_workspace) {
  require(Stage::stopped, "seal", "start() and stop() it first, and seal it once");
  stage_ = Stage::sealing;  // stays so if sealing fails
  if (outputs.size() != makers.size()) throw py::value_error("Program.seal: give one maker for each output");
  for (const py::handle view : views)
    if (!PyTuple_CheckExact(view.ptr()) || PyTuple_GET_SIZE(view.ptr()) != 3)
      throw py::type_error("Program.seal: views must hold tuples (tensor, the tensor that it lies in, byte offset)");
  std::vector<int64_t> in_workspace(scratch.size(), -1);
  for (Place& place : places_) {
    for (const py::handle view : views)
      if (PyTuple_GET_ITEM(view.ptr(), 0) == place.object.ptr()) {
        const auto [_, origin, offset] = view.cast<std::tuple<py::object, py::object, int64_t>>();
        place.object = origin;
        place.offset = offset;
        break;
      }
    const int in = find(inputs, place.object), out = find(outputs, place.object);
    if (in >= 0 || out >= 0) {
      place.index = in >= 0 ? in : static_cast<int>(inputs.size()) + out;
    } else {
      const int at = find(scratch, place.object);
      if (at < 0) return false;
      int64_t& start = in_workspace[static_cast<size_t>(at)];
      if (start < 0) {
        start = workspace_bytes_;
        workspace_bytes_ +=
            (bytes_of(borrow(exchange_api(Py_TYPE(place.object.ptr())), place.object)) + kAlign - 1) / kAlign * kAlign;
      }
      place.offset += start;
    }
    place.object = py::object();
  }
  for (const py::handle object : inputs) {
    const dl::ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()));
    if (api == nullptr) return false;
    const dl::Tensor t = borrow(api, object);
    if (!dense(t)) return false;
    forms_.push_back({Py_TYPE(object.ptr()), api, t.dtype, t.device, {t.shape, t.shape + t.ndim}});
  }
  for (const py::handle maker : makers) {
    const auto pair = py::reinterpret_borrow<py::tuple>(maker);
    makers_.emplace_back(pair[0], pair[1].cast<py::tuple>());
  }
  make_workspace_ = std::move(make_workspace);
  last_.each.clear(), last_placed_.each.clear();
  if (!whole_ || steps_.empty() || forms_.empty()) return false;
  stage_ = Stage::sealed;
  return true;
}

MaybeOperands Program::run(Operands inputs) {
  require(Stage::sealed, "run", "seal() it first; one that seal() refused cannot run");
  if (inputs.size() != forms_.size()) return py::none();
  std::vector<char*> tensors;
  tensors.reserve(forms_.size() + makers_.size());
  for (size_t i = 0; i < forms_.size(); ++i) {
    const Form& form = forms_[i];
    const py::handle object = PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i));
    if (Py_TYPE(object.ptr()) != form.type) return py::none();
    const dl::Tensor t = borrow(form.api, object);
    const bool same = t.dtype.code == form.dtype.code && t.dtype.bits == form.dtype.bits &&
                      t.dtype.lanes == form.dtype.lanes && t.device.type == form.device.type &&
                      t.device.id == form.device.id &&
                      std::equal(t.shape, t.shape + t.ndim, form.shape.begin(), form.shape.end()) && dense(t);
    if (!same) return py::none();
    tensors.push_back(data_of(t));
  }
  const Form& first = forms_.front();
  const auto make = [&](const py::object& maker, py::handle arguments) {
    py::object made = py::reinterpret_steal<py::object>(PyObject_Call(maker.ptr(), arguments.ptr(), nullptr));
    if (!made) throw py::error_already_set();
    return made;
  };
  py::list outputs(makers_.size());
  for (size_t i = 0; i < makers_.size(); ++i) {
    py::object made = make(makers_[i].first, makers_[i].second);
    tensors.push_back(data_of(borrow(exchange_api(Py_TYPE(made.ptr())), made)));
    outputs[i] = std::move(made);
  }
  py::object workspace;
  char* base = nullptr;  // start of the workspace
  if (workspace_bytes_ > 0) {
    workspace = make_workspace_(workspace_bytes_);
    base = data_of(borrow(exchange_api(Py_TYPE(workspace.ptr())), workspace));
  }
  std::vector<void*> data;
  data.reserve(places_.size());
  for (const Place& place : places_)
    data.push_back((place.index >= 0 ? tensors[static_cast<size_t>(place.index)] : base) + place.offset);
  const Execution exec = execution_on(first.api, first.device);
  Status status;
  const WarningCollector warnings;
  {
    const cpu::Interruptible asking(signals_of_this_thread());
    py::gil_scoped_release release;
    for (const Step& step : steps_)
      if (status = step(data.data(), exec); status.code() != Code::ok) break;
  }
  finish(status, warnings);
  return outputs;
}

}  // namespace diptych::bind
