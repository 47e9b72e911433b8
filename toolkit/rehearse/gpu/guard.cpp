// What torch asks of a GPU before it differentiates a tensor on
// one: a device guard that guards nothing, and hooks that say that there is CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

namespace {

const Device GPU(DeviceType::CUDA, 0);
const Stream STREAM(Stream::DEFAULT, GPU);

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return STREAM; }
  Stream getDefaultStream(Device) const override { return STREAM; }
  Stream getNewStream(Device, int) const override { return STREAM; }
  Stream exchangeStream(Stream) const override { return STREAM; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

const impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());

struct Registration {
  Registration() {
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks",
        [](at::CUDAHooksArgs arguments) -> std::unique_ptr<at::CUDAHooksInterface> {
          return std::make_unique<Hooks>(arguments);
        },
        "", c10::REGISTRY_PREFERRED);
  }
} const registration;

}  // namespace

// A torch that was built with CUDA registers its own guard when it is imported: the last one
// is used.
extern "C" void dmt_take_over() {
  impl::registerDeviceGuard(DeviceType::CUDA, new Guard());
}
