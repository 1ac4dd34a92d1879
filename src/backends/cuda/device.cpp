// The device of a cuda context: its memory, its side stream, recordings as CUDA graphs.
#include "plan/device.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/cupti.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/page_spread.h"
#include "backends/cuda/requirements.h"
#include "backends/cuda/tracer.h"
#include "dsacore/status.h"
#include "plan/pool.h"
#include "plan/registry.h"

namespace dsacore {
namespace cuda {
namespace {

cudaStream_t stream_of(Queue queue) { return static_cast<cudaStream_t>(queue.stream); }

/// Makes a device current and returns which one was.
int make_current(int ordinal) {
  int previous = ordinal;
  check(cudaGetDevice(&previous), "cudaGetDevice");
  if (previous != ordinal) check(cudaSetDevice(ordinal), "cudaSetDevice");
  return previous;
}

/// Makes a device current as long as it lives.
class Current {
 public:
  explicit Current(int ordinal) : ordinal_(ordinal), previous_(make_current(ordinal)) {}
  ~Current() {
    if (previous_ != ordinal_) cudaSetDevice(previous_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int ordinal_, previous_;
};

/// Owns a stream, an event or a graph of the device that was current when it was made.
template <class Handle, cudaError_t (*destroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (handle_ != nullptr) destroy(handle_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Handle get() const { return handle_; }
  Handle* out() { return &handle_; }

 private:
  Handle handle_ = nullptr;
};
using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;
using Graph = Owned<cudaGraph_t, cudaGraphDestroy>;
using GraphExec = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;

void make_stream(Stream& stream) {
  check(cudaStreamCreateWithFlags(stream.out(), cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

/// The side streams of a device: one, unless contexts live at once. A stream belongs to a capture from its fork on
/// until that capture ends, so that contexts that may capture at once, or while another runs, cannot have one together;
/// and contexts are for work that runs at once, which one side stream would put in a row. They live with the device's
/// last context.
std::shared_ptr<Pool<Stream>> side_streams_of(int ordinal) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Pool<Stream>>> devices;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Pool<Stream>> streams = devices[ordinal].lock();
  if (streams == nullptr) devices[ordinal] = streams = std::make_shared<Pool<Stream>>();
  return streams;
}

/// Whether no capture holds it, such as one that outlived its context.
bool is_free(const Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream.get(), &status), "cudaStreamIsCapturing");
  return status == cudaStreamCaptureStatusNone;
}

class DeviceMemory final : public Memory {
 public:
  explicit DeviceMemory(int ordinal) : ordinal_(ordinal) {}

  std::byte* allocate(int64_t bytes, std::string_view what) override {
    const Current current(ordinal_);
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, size_t(bytes));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw Exception({ErrorCode::kNoMemory, std::string(what), std::to_string(bytes) + " bytes",
                       "device " + std::to_string(ordinal_) + " has " + std::to_string(free_bytes()) + " bytes free"});
    }
    check(error, "cudaMalloc");
    check(cudaMemset(data, 0, size_t(bytes)), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return static_cast<std::byte*>(data);
  }
  void free(std::byte* data, int64_t) noexcept override { cudaFree(data); }
  void fill(std::byte* data, std::byte value, int64_t bytes) override {
    const Current current(ordinal_);
    check(cudaMemset(data, int(value), size_t(bytes)), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void spread_pages(const PageSpread& spread) override {
    const Current current(ordinal_);
    enqueue_page_spread(spread);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void copy_in(std::byte* to, const void* from_host, int64_t bytes) override {
    const Current current(ordinal_);
    check(cudaMemcpy(to, from_host, size_t(bytes), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void copy_out(void* to_host, const std::byte* from, int64_t bytes) const override {
    const Current current(ordinal_);
    check(cudaMemcpy(to_host, from, size_t(bytes), cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  int64_t free_bytes() const override {
    const Current current(ordinal_);
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return int64_t(free);
  }
  void require_own(const void* data, std::string_view argument) const override {
    const Current current(ordinal_);
    cudaPointerAttributes attributes = {};
    check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
    if (attributes.type == cudaMemoryTypeUnregistered) refuse(argument, "a host pointer");
    if (attributes.type == cudaMemoryTypeDevice && attributes.device != ordinal_) {
      refuse(argument, "a pointer to memory of device " + std::to_string(attributes.device));
    }
  }

 private:
  [[noreturn]] void refuse(std::string_view argument, std::string value) const {
    throw Exception({ErrorCode::kRefused, std::string(argument), std::move(value),
                     "must point to memory of device " + std::to_string(ordinal_)});
  }

  int ordinal_;
};

class GraphRecording final : public Recording {
 public:
  GraphRecording(int ordinal, cudaStream_t stream) : ordinal_(ordinal), stream_(stream) {}

  void record(FunctionRef<void(Queue)> enqueue) {
    Graph graph;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      enqueue({stream_});
    } catch (...) {
      cudaStreamEndCapture(stream_, graph.out());
      throw;
    }
    check(cudaStreamEndCapture(stream_, graph.out()), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(exec_.out(), graph.get(), 0), "cudaGraphInstantiate");
    check(cudaGraphUpload(exec_.get(), stream_), "cudaGraphUpload");
  }

  void replay() override {
    const Current current(ordinal_);
    check(cudaGraphLaunch(exec_.get(), stream_), "cudaGraphLaunch");
  }

  std::vector<double> time(int count) override {
    const Current current(ordinal_);
    std::vector<Event> marks(size_t(count) + 1);
    for (Event& mark : marks) check(cudaEventCreate(mark.out()), "cudaEventCreate");
    check(cudaEventRecord(marks[0].get(), stream_), "cudaEventRecord");
    for (int i = 0; i < count; ++i) {
      replay();
      check(cudaEventRecord(marks[size_t(i) + 1].get(), stream_), "cudaEventRecord");
    }
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    std::vector<double> seconds;
    for (int i = 0; i < count; ++i) {
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, marks[size_t(i)].get(), marks[size_t(i) + 1].get()),
            "cudaEventElapsedTime");
      seconds.push_back(double(milliseconds) * 1e-3);
    }
    return seconds;
  }

 private:
  int ordinal_;
  cudaStream_t stream_;
  GraphExec exec_;
};

/// As the kernel module tells it, else the CUDA version that the driver supports: the runtime knows no more.
std::string driver_version() {
  std::ifstream in("/proc/driver/nvidia/version");
  std::string word;
  for (bool ahead = false; in >> word; ahead = ahead || word == "Module") {
    if (ahead && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  }
  int version = 0;
  check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  return "of CUDA " + version_text(version);
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int ordinal) : ordinal_(ordinal), memory_(ordinal), side_streams_(side_streams_of(ordinal)) {
    const Current current(ordinal_);
    check(cudaEventCreateWithFlags(order_.out(), cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }

  std::string description() const override {
    cudaDeviceProp properties = {};
    check(cudaGetDeviceProperties(&properties, ordinal_), "cudaGetDeviceProperties");
    return std::string(properties.name) + ", driver " + driver_version();
  }
  Memory& memory() override { return memory_; }

  int enter() override { return make_current(ordinal_); }
  void leave(int previous) noexcept override {
    if (previous != ordinal_) cudaSetDevice(previous);
  }

  void open_side() override {
    if (side_ != nullptr) return;
    const Current current(ordinal_);
    side_ = side_streams_->take(is_free, [] {
      auto stream = std::make_unique<Stream>();
      make_stream(*stream);
      return stream;
    });
  }
  Queue side() const override { return {side_ != nullptr ? side_->get() : nullptr}; }
  void order(Queue earlier, Queue later) override {
    check(cudaEventRecord(order_.get(), stream_of(earlier)), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream_of(later), order_.get(), 0), "cudaStreamWaitEvent");
  }

  Queue own_queue() override {
    open_own();
    return {own_.get()};
  }
  void wait(Queue queue) override {
    const Current current(ordinal_);
    check(cudaStreamSynchronize(stream_of(queue)), "cudaStreamSynchronize");
  }
  std::unique_ptr<Recording> record(FunctionRef<void(Queue)> enqueue) override {
    open_own();
    const Current current(ordinal_);
    auto recording = std::make_unique<GraphRecording>(ordinal_, own_.get());
    recording->record(enqueue);
    return recording;
  }

  void announce(Queue queue, std::string_view stage) noexcept override {
    *announced_ = {stage, queue.stream != nullptr && queue.stream == side().stream};
  }
  std::unique_ptr<Tracer> make_tracer(const std::string& library) override {
    return std::make_unique<CuptiTracer>(load_cupti(cupti_places(library, std::getenv("CUDA_HOME"))), announced_);
  }

 private:
  void open_own() {
    if (own_.get() != nullptr) return;
    const Current current(ordinal_);
    make_stream(own_);
  }

  int ordinal_;
  DeviceMemory memory_;
  Event order_;
  std::shared_ptr<Announcement> announced_ = std::make_shared<Announcement>();
  Stream own_;
  std::shared_ptr<Pool<Stream>> side_streams_;
  std::shared_ptr<Stream> side_;
};

Found find(int ordinal) {
  Found found;
  found.ordinal = ordinal;
  found.toolkit = CUDART_VERSION;
  // Without a driver the version is 0 and the count an error: both are findings, not failures.
  if (cudaDriverGetVersion(&found.driver) != cudaSuccess) found.driver = 0;
  if (found.driver > 0 && cudaGetDeviceCount(&found.devices) != cudaSuccess) found.devices = 0;
  cudaGetLastError();
  if (ordinal < 0 || ordinal >= found.devices) return found;
  cudaDeviceProp properties = {};
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  found.name = properties.name;
  found.major = properties.major;
  found.minor = properties.minor;
  return found;
}

}  // namespace
}  // namespace cuda

std::unique_ptr<Device> make_cuda_device(int ordinal) {
  cuda::require(cuda::find(ordinal));
  return std::make_unique<cuda::CudaDevice>(ordinal);
}

const char* cuda_toolkit_version() {
  static const std::string text = cuda::version_text(CUDART_VERSION);
  return text.c_str();
}

}  // namespace dsacore
