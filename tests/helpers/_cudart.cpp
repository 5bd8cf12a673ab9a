// CUDA's runtime without a GPU, for a process of torch that was built for CUDA: preloaded, so that
// torch's own allocator, streams and events run, and our code unchanged.
//
// What a stream is given is done when somebody waits for it, as late as CUDA allows; after an event
// was looked at in vain often enough, what it stands for is done. "Device" memory is the host's. A copy
// from memory whose pages are not locked is taken at once, as CUDA does; one from memory that was
// unlocked before the copy ran brings wrong bytes. Kernels cannot be launched: only memory is copied
// and set.
//
// What machines differ in, and what goes wrong on them, are switches (`standin_set(name, value)`):
//   looks      looks in vain at an event until it is done; many: the model is far behind
//   memory     bytes that each device has
//   registers  0: the system locks no pages of memory that somebody else made
// There are two devices; `standin_calls(device)` counts what was asked of one while it was current,
// and `standin_locks()` how often pages were locked.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "driver_types.h"

#define API extern "C" __attribute__((visibility("default"))) cudaError_t
#define LOCKED std::lock_guard<std::recursive_mutex> guard(mutex)

namespace {

struct Stream;

struct Mark {  // a point in a stream's work
    Stream* stream;
    bool is_done = false;
    long num_looks = 0;
};

struct Work {
    std::function<void()> run;  // or, if there is none:
    Mark* mark;
    bool is_wait;  // for the mark, of another stream
};

struct Stream {
    std::deque<Work> work;
    int priority = 0;
};

struct Event {
    Mark* mark = nullptr;
};

constexpr size_t kDeviceAlignment = 2 << 20, kPage = 4096;
constexpr int kPoison = 0xDD, kNumDevices = 2;

std::recursive_mutex mutex;
std::map<std::string, long> switches{{"looks", 1}, {"memory", 8L << 30}, {"registers", 1}};
long num_calls[kNumDevices], num_locks = 0;
Stream default_streams[kNumDevices];
std::vector<Stream*> streams{&default_streams[0], &default_streams[1]};  // by age
std::map<uintptr_t, size_t> locked_pages;
struct Block {
    size_t size;
    int device;
};
std::map<void*, Block> device_memory;
thread_local int current_device = 0;

Stream* stream_of(cudaStream_t handle) {
    auto number = reinterpret_cast<uintptr_t>(handle);
    return number <= 2 ? &default_streams[current_device] : reinterpret_cast<Stream*>(handle);
}

void count_call() { ++num_calls[current_device]; }

long used_memory() {
    long total = 0;
    for (auto& [memory, block] : device_memory)
        if (block.device == current_device) total += block.size;
    return total;
}

Mark* mark_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event)->mark; }

void do_until(Mark* mark);

void do_one(Stream* stream) {
    Work work = stream->work.front();
    if (work.is_wait) do_until(work.mark);
    stream->work.pop_front();
    if (work.run) work.run();
    if (work.mark && !work.is_wait) work.mark->is_done = true;
}

void do_until(Mark* mark) {
    while (!mark->is_done) do_one(mark->stream);
}

void drain(Stream* stream) {
    while (!stream->work.empty()) do_one(stream);
}

void drain_all() {  // the model's first, and the loader's last: who does not wait for these is wrong
    drain(&default_streams[0]);
    drain(&default_streams[1]);
    for (auto stream = streams.rbegin(); stream != streams.rend(); ++stream) drain(*stream);
}

bool is_locked(const void* memory) {
    auto address = reinterpret_cast<uintptr_t>(memory);
    auto next = locked_pages.upper_bound(address);
    if (next == locked_pages.begin()) return false;
    --next;
    return address < next->first + next->second;
}

void* rounded(size_t size, size_t alignment) {
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void standin_set(const char* name, long value) {
    LOCKED;
    switches.at(name) = value;
}

extern "C" __attribute__((visibility("default"))) long standin_calls(int device) {
    return num_calls[device];
}

extern "C" __attribute__((visibility("default"))) long standin_locks() { return num_locks; }

// -- devices --------------------------------------------------------------------------------------

API cudaGetDeviceCount(int* count) { return *count = kNumDevices, cudaSuccess; }
API cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
API cudaSetDevice(int device) { return current_device = device, cudaSuccess; }
API cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }
API cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
API cudaGetLastError() { return cudaSuccess; }
API cudaPeekAtLastError() { return cudaSuccess; }
extern "C" const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in"; }
extern "C" const char* cudaGetErrorName(cudaError_t) { return "an error of the stand-in"; }

API cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    std::memset(properties, 0, sizeof *properties);
    std::strcpy(properties->name, "stand-in");
    properties->major = 9;
    properties->totalGlobalMem = switches.at("memory");
    properties->multiProcessorCount = 1;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}

API cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                     cudaDriverEntryPointQueryResult* result) {
    *function = nullptr;
    if (result) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// -- memory ---------------------------------------------------------------------------------------

API cudaMemGetInfo(size_t* free, size_t* total) {
    LOCKED;
    *total = switches.at("memory");
    *free = *total - used_memory();
    return cudaSuccess;
}

API cudaMalloc(void** memory, size_t size) {
    LOCKED;
    count_call();
    if (used_memory() + long(size) > switches.at("memory")) return cudaErrorMemoryAllocation;
    *memory = rounded(size, kDeviceAlignment);
    device_memory[*memory] = {size, current_device};
    return cudaSuccess;
}

API cudaFree(void* memory) {
    LOCKED;
    drain_all();
    device_memory.erase(memory);
    std::free(memory);
    return cudaSuccess;
}

API cudaHostRegister(void* memory, size_t size, unsigned) {
    LOCKED;
    count_call();
    if (!switches.at("registers")) return cudaErrorNotSupported;
    ++num_locks;
    locked_pages[reinterpret_cast<uintptr_t>(memory)] = size;
    return cudaSuccess;
}

API cudaHostUnregister(void* memory) {
    LOCKED;
    count_call();
    locked_pages.erase(reinterpret_cast<uintptr_t>(memory));
    return cudaSuccess;
}

API cudaHostAlloc(void** memory, size_t size, unsigned) {
    LOCKED;
    *memory = rounded(size, kPage);
    locked_pages[reinterpret_cast<uintptr_t>(*memory)] = size;
    return cudaSuccess;
}

API cudaFreeHost(void* memory) {
    cudaHostUnregister(memory);
    std::free(memory);
    return cudaSuccess;
}

API cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
    LOCKED;
    std::memset(attributes, 0, sizeof *attributes);
    attributes->type = is_locked(memory) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

API cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind,
                    cudaStream_t stream) {
    LOCKED;
    count_call();
    std::function<void()> copy = [=] { std::memcpy(target, source, size); };
    if (kind == cudaMemcpyHostToDevice && is_locked(source)) {
        copy = [=] {
            if (is_locked(source)) std::memcpy(target, source, size);
            else std::memset(target, kPoison, size);
        };
    } else if (kind == cudaMemcpyHostToDevice) {
        void* taken = std::memcpy(std::malloc(size), source, size);
        copy = [=] {
            std::memcpy(target, taken, size);
            std::free(taken);
        };
    }
    stream_of(stream)->work.push_back({copy, nullptr, false});
    return cudaSuccess;
}

API cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
    LOCKED;
    stream_of(stream)->work.push_back(
        {[=] { std::memset(target, value, size); }, nullptr, false});
    return cudaSuccess;
}

// -- streams --------------------------------------------------------------------------------------

API cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
    LOCKED;
    count_call();
    auto* stream = new Stream;
    stream->priority = priority;
    streams.push_back(stream);
    *handle = reinterpret_cast<cudaStream_t>(stream);
    return cudaSuccess;
}

API cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}

API cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    return *priority = stream_of(stream)->priority, cudaSuccess;
}

API cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

API cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*,
                             cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                             size_t*) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

API cudaStreamSynchronize(cudaStream_t stream) {
    LOCKED;
    drain(stream_of(stream));
    return cudaSuccess;
}

API cudaStreamQuery(cudaStream_t stream) {
    LOCKED;
    return stream_of(stream)->work.empty() ? cudaSuccess : cudaErrorNotReady;
}

API cudaDeviceSynchronize() {
    LOCKED;
    drain_all();
    return cudaSuccess;
}

// -- events ---------------------------------------------------------------------------------------

API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return *event = reinterpret_cast<cudaEvent_t>(new Event), cudaSuccess;
}

API cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

API cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    LOCKED;
    count_call();
    Stream* stream = stream_of(handle);
    Mark* mark = reinterpret_cast<Event*>(event)->mark = new Mark{stream};
    stream->work.push_back({nullptr, mark, false});
    return cudaSuccess;
}

API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

API cudaEventQuery(cudaEvent_t event) {
    LOCKED;
    count_call();
    Mark* mark = mark_of(event);
    if (!mark || mark->is_done) return cudaSuccess;
    if (++mark->num_looks >= switches.at("looks")) do_until(mark);  // for the next look
    return cudaErrorNotReady;
}

API cudaEventSynchronize(cudaEvent_t event) {
    LOCKED;
    count_call();
    if (Mark* mark = mark_of(event)) do_until(mark);
    return cudaSuccess;
}

API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    LOCKED;
    Mark* mark = mark_of(event);
    if (mark && !mark->is_done) stream_of(stream)->work.push_back({nullptr, mark, true});
    return cudaSuccess;
}

// -- the driver, of which torch asks a little when it begins: this file is libcuda.so.1, too -------

extern "C" int cuInit(unsigned) { return 0; }
extern "C" int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
    return *flags = 0, *is_active = num_calls[device] > 0, 0;
}
extern "C" int cuPointerGetAttribute(void* value, int, unsigned long long) {
    return *static_cast<int*>(value) = 0, 0;
}
