// What torch asks of a CUDA device while it traces, answered without one.
//
// A CPU build of torch makes fake tensors on "cuda". Autograd asks for the guard of their device
// and for the hooks of CUDA. Both are registered here, as the CUDA library would. No answer touches
// a device: whoever runs a kernel gets torch's own error.
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream other) const override { return other; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}

 private:
  static c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }
};

const c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard());

}  // namespace

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
