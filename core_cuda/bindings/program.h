// Programs: ops that ran once are recorded and run again on other tensors of the same forms, in one call from Python.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "diptych/ops.h"
#include "errors.h"
#include "interrupt.h"
#include "operand.h"

namespace diptych::bind {

// Between `start` and `stop` every op of this thread is added. `seal` then assigns the tensors that the ops used to
// inputs, outputs and scratch, and `run` runs the ops. A program that is deleted while it records stops recording. Each
// method raises ValueError if it is called out of order.
class Program : public std::enable_shared_from_this<Program> {
 public:
  void start();
  void stop();
  // `inputs`: the tensors that `run` will be given; `outputs`: those that it returns; `scratch`: those that only the
  // ops write and read; `views`: (tensor, one of these in whose memory it lies, byte offset there); `makers`:
  // (callable, arguments) that allocates each output; `make_workspace`: a callable that allocates a number of bytes.
  // Returns false if the ops cannot run again, because one used another tensor.
  bool seal(Operands inputs, Operands outputs, Operands scratch, Views views, Makers makers,
            MakeWorkspace make_workspace);
  // Returns the outputs, or None if an input has another form (type, dtype, device or shape) than when recorded.
  MaybeOperands run(Operands inputs);

  // Returns the program that records on this thread, or null.
  static std::shared_ptr<Program> recording() { return recording_.expired() ? nullptr : recording_.lock(); }
  template <typename Args>
  void add(Status (*op)(const Args&, const Execution&), const Args& args, const Call& call);

 private:
  struct Form {  // the form of an input; inputs are dense
    PyTypeObject* type;
    const dl::ExchangeApi* api;
    dl::DataType dtype;
    dl::Device device;
    std::vector<int64_t> shape;
  };
  struct Place {        // where a view that an op uses lies
    py::object object;  // the tensor that the view belongs to, until the program is sealed
    int index = -1;     // index of that tensor among inputs and outputs; -1: in the workspace
    int64_t offset = 0;
  };
  using Step = std::function<Status(void* const* data, const Execution& exec)>;

  void* place(const TensorView& view, const Call& call);  // returns its number in places_, from 1
  // Adds a call of quantize, to the step before if that is one too and both can run together. `placed`: the arguments
  // with numbers in places_ for addresses.
  void add_quantize(const QuantizeArgs& args, const QuantizeArgs& placed);
  template <typename Args>
  static Step step(Status (*op)(const Args&, const Execution&), Args placed);

  enum class Stage { fresh, started, stopped, sealing, sealed };
  void require(Stage stage, const char* method, const char* remedy) const;

  static thread_local std::weak_ptr<Program> recording_;
  Stage stage_ = Stage::fresh;
  bool whole_ = true;
  std::vector<Step> steps_;
  QuantizeManyArgs last_, last_placed_;  // of the last step, if it quantizes
  std::vector<Place> places_;
  std::vector<Form> forms_;
  std::vector<std::pair<py::object, py::tuple>> makers_;
  py::object make_workspace_;
  int64_t workspace_bytes_ = 0;
};

template <typename Args>
void Program::add(Status (*op)(const Args&, const Execution&), const Args& args, const Call& call) {
  Args placed = args;
  fields(placed, [&](TensorView& v, Role = Role::input) {
    if (v.given()) v.data = place(v, call);
  });
  if constexpr (std::is_same_v<Args, QuantizeArgs>) {
    add_quantize(args, placed);
  } else {
    last_.each.clear();
    steps_.push_back(step(op, std::move(placed)));
  }
}

template <typename Args>
Program::Step Program::step(Status (*op)(const Args&, const Execution&), Args placed) {
  return [op, placed = std::move(placed)](void* const* data, const Execution& exec) {
    Args filled = placed;
    fields(filled, [&](TensorView& v, Role = Role::input) {
      if (v.given()) v.data = data[reinterpret_cast<uintptr_t>(v.data) - 1];
    });
    return op(filled, exec);
  };
}

// Runs one op without the GIL.
template <typename Args>
void run(Status (*op)(const Args&, const Execution&), const Args& args, Call& call) {
  const Execution exec = call.execution();
  Status status;
  const WarningCollector warnings;
  {
    const cpu::Interruptible asking(signals_of_this_thread());
    py::gil_scoped_release release;
    status = op(args, exec);
  }
  finish(status, warnings);
  if (const std::shared_ptr<Program> program = Program::recording()) program->add(op, args, call);
}

}  // namespace diptych::bind
