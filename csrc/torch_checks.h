// What every op needs between its tensors and its argument struct: checks with one form of message, and the recording of calls.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <functional>
#include <initializer_list>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/linear.h"

namespace eagle::torch_api {

using at::Tensor;
using eagle::Dtype;
using OptionalTensor = const std::optional<Tensor>&;

constexpr int64_t kAny = -1;
const at::Device kCpu(at::kCPU);  // where tensors are expected unless a check says otherwise

inline std::string short_name(at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat: return "float32";
        case at::kDouble: return "float64";
        case at::kHalf: return "float16";
        case at::kBFloat16: return "bfloat16";
        case at::kLong: return "int64";
        case at::kInt: return "int32";
        case at::kBool: return "bool";
        default: return c10::toString(dtype);
    }
}

// "name: expected [4, *] int32 on cpu, got [4, 8] int64 on cpu"
[[noreturn]] inline void fail(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, const std::string& dtype, const char* extra, at::Device device = kCpu) {
    std::ostringstream message;
    message << name << ": expected [";
    const char* separator = "";
    for (int64_t size : shape) {
        message << separator;
        if (size == kAny) message << "*";
        else message << size;
        separator = ", ";
    }
    message << "] " << dtype << extra << " on " << device.str() << ", got [";
    separator = "";
    for (int64_t size : t.sizes()) message << separator << size, separator = ", ";
    message << "] " << short_name(t.scalar_type()) << (t.is_contiguous() ? "" : " (not contiguous)") << " on " << t.device().str();
    C10_THROW_ERROR(ValueError, message.str());
}

inline bool fits(const Tensor& t, std::initializer_list<int64_t> shape, at::Device device) {
    if (t.device() != device || t.dim() != static_cast<int64_t>(shape.size())) return false;
    int64_t i = 0;
    for (int64_t size : shape) {
        if (size != kAny && t.size(i) != size) return false;
        ++i;
    }
    return true;
}

// Contiguous tensor of this shape and dtype.
inline void check(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, at::ScalarType dtype, at::Device device = kCpu) {
    if (!fits(t, shape, device) || t.scalar_type() != dtype || !t.is_contiguous()) fail(name, t, shape, short_name(dtype), ", contiguous", device);
}
// Its last dimension must be contiguous, the others may have any stride.
inline void check_rows(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, at::ScalarType dtype, at::Device device = kCpu) {
    if (!fits(t, shape, device) || t.scalar_type() != dtype || (t.numel() > 0 && t.size(-1) > 1 && t.stride(-1) != 1)) fail(name, t, shape, short_name(dtype), ", last dimension contiguous", device);
}
inline void check_optional(const char* name, OptionalTensor t, std::initializer_list<int64_t> shape, at::ScalarType dtype, at::Device device = kCpu) {
    if (t.has_value()) check(name, *t, shape, dtype, device);
}
template <typename T>
const T* optional_ptr(OptionalTensor t) { return t.has_value() ? t->const_data_ptr<T>() : nullptr; }

#define EK_REQUIRE(condition, ...) TORCH_CHECK_VALUE(condition, __VA_ARGS__)

inline Dtype weight_dtype(const char* name, const Tensor& t) {
    EK_REQUIRE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16, name, ": expected float32 or bfloat16, got ", short_name(t.scalar_type()));
    return t.scalar_type() == at::kFloat ? Dtype::fp32 : Dtype::bf16;
}

// A packed weight, with or without experts, and the x [rows, K] that it is multiplied with. Of a bf16 weight only K rounded up to even is known.
inline void check_packed(const char* name, const Tensor& x, const Tensor& weight, int64_t out_features, bool experts) {
    const bool pairs = weight_dtype("weight", weight) == Dtype::bf16;
    if (experts) check("weight", weight, {kAny, (out_features + 15) / 16, kAny, 16}, weight.scalar_type());
    else check("weight", weight, {(out_features + 15) / 16, kAny, 16}, weight.scalar_type());
    const int64_t depth = weight.size(experts ? 2 : 1);
    check_rows(name, x, {kAny, kAny}, at::kFloat);
    if ((pairs ? (x.size(1) + 1) / 2 * 2 : x.size(1)) != depth) fail(name, x, {kAny, depth}, "float32", "");
}

// Recording: while one is open on a thread, every op that the thread runs is also kept, with its arguments and the tensors behind them, so that the whole sequence can be
// run again without Python or the dispatcher in between. It is the CPU's counterpart of a captured graph: same buffers, same shapes, new contents.
struct Recording {
    std::vector<std::function<void()>> calls;
    std::vector<Tensor> tensors;
};
extern thread_local Recording* recording;

template <typename Call>
void launch(Call call, std::initializer_list<Tensor> tensors) {
    call();
    if (recording == nullptr) return;
    recording->calls.emplace_back(std::move(call));
    recording->tensors.insert(recording->tensors.end(), tensors);
}

// For ops whose result the host reads, or that are not worth it.
inline void refuse_recording(const char* op) { TORCH_CHECK(recording == nullptr, op, ": cannot be recorded"); }

// torch.set_num_threads holds for the kernels too.
inline int threads() { return at::get_num_threads(); }

}  // namespace eagle::torch_api
