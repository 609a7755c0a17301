// A CUDA device for a CPU build of torch: memory that torch takes for a device's, and the kernels
// of the CPU.
//
// Every tensor on "cuda" has its elements in ordinary memory. An operator on such tensors runs the
// CPU's kernel on the same memory. What a real device would refuse is refused: a tensor of the CPU
// beside one of the device, and two dtypes where CUDA's kernel takes one. Kernels, and waits of the
// host for the device, are reported to Python one by one.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;

void (*on_kernel)(const char*) = nullptr;
void (*on_wait)() = nullptr;

void kernel(const std::string& name) {
  if (on_kernel) on_kernel(name.c_str());
}

void wait() {
  if (on_wait) on_wait();
}

// --- memory -------------------------------------------------------------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* place = size ? std::malloc(size) : nullptr;
    return {place, place, &std::free, c10::Device(c10::kCUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }
};

Memory memory;
REGISTER_ALLOCATOR(c10::kCUDA, &memory)

const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, keys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), &memory, keys,
                                           c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x;
  const auto& storage = x.storage();
  c10::DataPtr place(storage.mutable_data(), nullptr, [](void*) {}, c10::Device(c10::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(place),
                    c10::GetAllocator(c10::kCPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  if (x.is_conj()) made._set_conj(true);
  if (x.is_neg()) made._set_neg(true);
  return made;
}

const Tensor& resize(const Tensor& x, c10::SymIntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = x.unsafeGetTensorImpl();
  size_t needed = (c10::multiply_integers(sizes) + x.storage_offset()) * x.itemsize();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    auto place = memory.allocate(needed);
    if (storage->nbytes()) std::memcpy(place.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(place));
    storage->set_nbytes(needed);
  }
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return x;
}

Tensor& copy(Tensor& to, const Tensor& from, bool) {
  if (!to.is_cuda())
    wait();
  else if (from.is_cuda())
    kernel("aten::copy_");
  on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar number(const Tensor& x) {
  wait();
  return at::_local_scalar_dense(on_host(x));
}

// --- operators ----------------------------------------------------------------------------------

// CUDA's kernels of these read the weight in the dtype of the data.
const std::set<std::string> one_dtype = {
    "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::native_group_norm",
    "aten::native_group_norm_backward", "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"};

void check(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given) {
  const auto& name = schema.name();
  TORCH_CHECK_NOT_IMPLEMENTED(
      name.find("_for_cpu") == std::string::npos && name.find("mkldnn") == std::string::npos,
      "Could not run '", name, "' with arguments from the 'CUDA' backend.");
  std::optional<at::ScalarType> dtype;
  for (size_t i = 0; i < given.size(); ++i) {
    std::vector<Tensor> tensors;
    if (given[i].isTensor()) tensors.push_back(given[i].toTensor());
    if (given[i].isTensorList()) tensors = given[i].toTensorVector();
    for (const auto& x : tensors) {
      if (!x.defined()) continue;
      TORCH_CHECK(x.is_cuda() || (x.dim() == 0 && given[i].isTensor()),
                  "Expected all tensors to be on the same device, but a tensor of shape ",
                  x.sizes(), " is on ", x.device(), " and others are on cuda:0 (in ", name, ")");
      const auto& argument = schema.arguments()[i].name();
      if (!one_dtype.count(name) || argument == "mean" || argument == "rstd") continue;
      if (!dtype) dtype = x.scalar_type();
      TORCH_CHECK(*dtype == x.scalar_type(), "expected scalar type ", *dtype, " but found ",
                  x.scalar_type(), " (in ", name, ")");
    }
  }
}

struct Results {
  const c10::FunctionSchema& schema;
  const std::vector<c10::IValue>& given;
  const std::vector<c10::IValue>& taken;

  // A result as a tensor of the device: the argument itself, a view of an argument, or new memory.
  Tensor on_device(const Tensor& x) const {
    if (!x.defined()) return x;
    for (size_t i = 0; i < taken.size(); ++i)
      if (taken[i].isTensor() && taken[i].toTensor().is_same(x)) return given[i].toTensor();
    for (size_t i = 0; i < taken.size(); ++i) {
      if (!taken[i].isTensor() || !taken[i].toTensor().defined() || !x.has_storage()) continue;
      auto own = given[i].toTensor();
      if (!own.is_cuda() || !x.storage().data() || own.storage().data() != x.storage().data())
        continue;
      auto made =
          at::detail::make_tensor<c10::TensorImpl>(c10::Storage(own.storage()), keys, x.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(),
                                                        x.storage_offset());
      return made;
    }
    Tensor made =
        at::detail::empty_strided_generic(x.sizes(), x.strides(), &memory, keys, x.scalar_type());
    on_host(made).copy_(x);
    return made;
  }

  // The arguments that the kernel wrote to, and may have resized.
  void write_back() const {
    for (size_t i = 0; i < given.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (!alias || !alias->isWrite() || !given[i].isTensor()) continue;
      auto own = given[i].toTensor(), now = taken[i].toTensor();
      if (!own.defined() || own.sizes() == now.sizes()) continue;
      resize(own, c10::fromIntArrayRefSlow(now.sizes()), std::nullopt);
      on_host(own).copy_(now);
    }
  }
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  kernel(schema.name());
  const auto count = schema.arguments().size();
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  check(schema, given);
  for (auto value = stack->end() - count; value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = on_host(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<Tensor> held;
      for (const Tensor& x : value->toTensorVector()) held.push_back(on_host(x));
      *value = held;
    } else if (value->isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> held;
      for (std::optional<Tensor> x : value->toOptionalTensorList())
        held.push_back(x ? std::optional<Tensor>(on_host(*x)) : x);
      *value = held;
    } else if (value->isDevice()) {
      *value = c10::IValue(c10::Device(c10::kCPU));
    }
  }
  const std::vector<c10::IValue> taken(stack->end() - count, stack->end());
  op.callBoxed(stack);
  const Results results{schema, given, taken};
  results.write_back();
  for (auto value = stack->end() - schema.returns().size(); value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = results.on_device(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& x : value->toTensorVector()) made.push_back(results.on_device(x));
      *value = made;
    }
  }
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &number);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", [](const Tensor& x, at::IntArrayRef size) { return at::native::view(x, size); });
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", [](const Tensor& x, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(x, size, stride);
  });
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

std::unique_ptr<torch::Library> kernels;

}  // namespace

extern "C" {

// Register the operators that would otherwise be composed of others.
void take(const char** names, int count) {
  kernels = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                             __FILE__, __LINE__);
  for (int i = 0; i < count; ++i)
    kernels->impl(names[i], torch::CppFunction::makeFromBoxedFunction<&run>());
}

void listen(void (*to_kernels)(const char*), void (*to_waits)()) {
  on_kernel = to_kernels;
  on_wait = to_waits;
}
}
