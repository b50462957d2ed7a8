// Calls of operators that were recorded (native/replay.py), made again without Python and autograd.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ScalarOps.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace workhorse::bindings {
namespace {

using at::Tensor;
using c10::IValue, c10::TypeKind;
using Slots = std::vector<int64_t>;

constexpr int64_t kNoTensor = -1;  // in place of a slot

// Calls whose tensors lie in slots: first the inputs, and anywhere what is kept from one run to the next, such as
// weights. All other arguments are what they were when the calls were recorded.
class Recording : public torch::CustomClassHolder {
 public:
  Recording(int64_t inputs, Slots kept_in, std::vector<Tensor> kept)
      : inputs_(inputs), slots_(inputs), kept_in_(std::move(kept_in)), kept_(std::move(kept)) {
    TORCH_CHECK(kept_in_.size() == kept_.size(), "workhorse: what is kept needs a slot each");
    make_room(kept_in_);
  }

  // Adds the call of an operator.
  //   arguments  all; None for tensors, lists of tensors and empty lists
  //   tensors    the slots of the tensors of each argument
  //   results    the slots of what it returns
  //   last       the slots that nothing needs after it
  void call(const std::string& name, const std::string& overload, const std::vector<IValue>& arguments,
            const std::vector<Slots>& tensors, Slots results, Slots last) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const auto& expected = op.schema().arguments();
    TORCH_CHECK(arguments.size() == expected.size() && tensors.size() == expected.size(),
                "workhorse: ", name, " has another number of arguments");
    for (const Slots& some : tensors) make_room(some);
    make_room(results);
    make_room(last);
    std::vector<Argument> all;
    for (size_t i = 0; i < expected.size(); i++)
      all.push_back(argument(*expected[i].type(), arguments[i], tensors[i]));
    calls_.push_back({op, std::move(all), std::move(results), std::move(last)});
  }

  // Makes the calls; returns the tensors `wanted`.
  std::vector<std::optional<Tensor>> run(std::vector<Tensor> inputs, const Slots& wanted) const {
    TORCH_CHECK(int64_t(inputs.size()) == inputs_, "workhorse: a recording of ", inputs_, " inputs got ",
                inputs.size());
    const at::AutoDispatchBelowADInplaceOrView without_gradients;
    std::vector<Tensor> slots = std::move(inputs);
    slots.resize(slots_);
    for (size_t i = 0; i < kept_.size(); i++) slots[kept_in_[i]] = kept_[i];
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      for (const Argument& one : call.arguments) stack.push_back(one.among(slots));
      call.op.callBoxed(stack);
      auto slot = call.results.begin();
      for (IValue& made : stack)
        if (made.isTensor())
          slots[*slot++] = std::move(made).toTensor();
        else
          for (Tensor& one : made.toTensorVector()) slots[*slot++] = std::move(one);
      stack.clear();
      for (const int64_t over : call.last) slots[over].reset();
    }
    std::vector<std::optional<Tensor>> found;
    for (const int64_t slot : wanted) found.push_back(in(slots, slot));
    return found;
  }

 private:
  struct Argument {
    enum Kind { kConstant, kTensor, kTensors, kMaybeTensors } kind;
    IValue constant;
    Slots slots;

    IValue among(const std::vector<Tensor>& all) const {
      if (kind == kConstant) return constant;
      if (kind == kTensor) return all[slots[0]];
      if (kind == kTensors) {
        c10::List<Tensor> some;
        for (const int64_t slot : slots) some.push_back(all[slot]);
        return some;
      }
      c10::List<std::optional<Tensor>> some;
      for (const int64_t slot : slots) some.push_back(in(all, slot));
      return some;
    }
  };

  struct Call {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    Slots results, last;
  };

  static std::optional<Tensor> in(const std::vector<Tensor>& slots, int64_t slot) {
    return slot == kNoTensor ? std::nullopt : std::optional(slots[slot]);
  }

  static Argument argument(const c10::Type& type, const IValue& value, const Slots& slots) {
    const auto* maybe = type.castRaw<c10::OptionalType>();
    const c10::Type& given = maybe ? *maybe->getElementType() : type;
    if (const auto* list = given.castRaw<c10::ListType>()) {
      const c10::Type& one = *list->getElementType();
      const bool always = one.kind() == TypeKind::TensorType;
      const bool maybe_one = one.kind() == TypeKind::OptionalType && one.containedType(0)->kind() == TypeKind::TensorType;
      if (!slots.empty()) return {always ? Argument::kTensors : Argument::kMaybeTensors, {}, slots};
      if (value.isNone() && !maybe) {
        if (always) return {Argument::kTensors, {}, {}};
        if (maybe_one) return {Argument::kMaybeTensors, {}, {}};
        return {Argument::kConstant, c10::impl::GenericList(list->getElementType()), {}};
      }
    }
    if (!slots.empty()) return {Argument::kTensor, {}, slots};
    if (given.kind() != TypeKind::TensorType || !value.isScalar()) return {Argument::kConstant, value, {}};
    Tensor number = c10::scalar_to_tensor(value.toScalar());  // which does not decide the type of a result
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return {Argument::kConstant, number, {}};
  }

  void make_room(const Slots& slots) {
    for (const int64_t slot : slots) {
      TORCH_CHECK(slot >= kNoTensor, "workhorse: there is no slot ", slot);
      slots_ = std::max(slots_, slot + 1);
    }
  }

  int64_t inputs_, slots_;
  Slots kept_in_;
  std::vector<Tensor> kept_;
  std::vector<Call> calls_;
};

}  // namespace

TORCH_LIBRARY(workhorse_replay, library) {
  library.class_<Recording>("Recording")
      .def(torch::init<int64_t, Slots, std::vector<Tensor>>())
      .def("call", &Recording::call)
      .def("run", &Recording::run);
}

}  // namespace workhorse::bindings
