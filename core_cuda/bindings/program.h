// Ops that ran once, kept to run again on other tensors of the same forms: many ops, one call from Python.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "diptych/ops.h"
#include "diptych/warn.h"
#include "interrupt.h"
#include "operand.h"

namespace diptych::bind {

// Raises the Python exception of a status's code, warnings given as EmulationWarnings before.
void finish(const Status& status, const WarningCollector& warnings);

// Between `start` and `stop` every op of this thread is added; `seal` says what the tensors are that they met. A
// program that is deleted while it records stops recording. Called in another order, each of these raises ValueError.
class Program : public std::enable_shared_from_this<Program> {
 public:
  void start();
  void stop();
  // `inputs`: what `run` will be given; `outputs`: what it returns; `scratch`: what ops alone write and read; `views`:
  // (tensor, the one of these in whose memory it lies, bytes from there); `makers`: (callable, arguments) that
  // allocates each output; `make_workspace`: allocates that many bytes. False: these ops cannot run again, since one is
  // of another kind or met another tensor.
  bool seal(Operands inputs, Operands outputs, Operands scratch, Views views, Makers makers,
            MakeWorkspace make_workspace);
  // The outputs, or None where the inputs are of other forms.
  MaybeOperands run(Operands inputs);

  // That of this thread, or null
  static std::shared_ptr<Program> recording() { return recording_.expired() ? nullptr : recording_.lock(); }
  template <typename Args>
  void add(Status (*op)(const Args&, const Execution&), Args args, const Call& call);

 private:
  struct Form {  // of a dense input
    PyTypeObject* type;
    const dl::ExchangeApi* api;
    dl::DataType dtype;
    dl::Device device;
    std::vector<int64_t> shape;
  };
  struct Place {        // of a tensor that ops met
    py::object object;  // until sealed
    int index = -1;     // among inputs and outputs; -1: in the workspace
    int64_t offset = 0;
  };
  using Step = std::function<Status(void* const* data, const Execution& exec)>;

  void* place(const TensorView& view, const Call& call);  // its number among places_, from 1

  enum class Stage { fresh, started, stopped, sealing, sealed };
  void require(Stage stage, const char* method, const char* remedy) const;

  static thread_local std::weak_ptr<Program> recording_;
  Stage stage_ = Stage::fresh;
  bool whole_ = true;
  std::vector<Step> steps_;
  std::vector<Place> places_;
  std::vector<Form> forms_;
  std::vector<std::pair<py::object, py::tuple>> makers_;
  py::object make_workspace_;
  int64_t workspace_bytes_ = 0;
};

// Whether a Program records an op that takes these arguments, as ops.def says.
template <typename Args>
inline constexpr bool kRecordable = false;
#define OP(name, Args, formats, subject, recordable) \
  template <>                                        \
  inline constexpr bool kRecordable<Args> = recordable;
#include "diptych/ops.def"

template <typename Args>
void Program::add(Status (*op)(const Args&, const Execution&), Args args, const Call& call) {
  if constexpr (!kRecordable<Args>) {
    whole_ = false;
    return;
  }
  fields(args, [&](TensorView& v, Role = Role::input) {
    if (v.given()) v.data = place(v, call);
  });
  steps_.push_back([op, args](void* const* data, const Execution& exec) {
    Args filled = args;
    fields(filled, [&](TensorView& v, Role = Role::input) {
      if (v.given()) v.data = data[reinterpret_cast<uintptr_t>(v.data) - 1];
    });
    return op(filled, exec);
  });
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
